"""Ranks that share experts take every generation step together.

Each copy of the model has its own prompts, and in every expert layer all of them exchange tokens: a rank that had nothing to
do and left the others alone would block them for ever. So they share out the prompts among them, agree before each step
whether there is another one, and who has no answer in flight takes part with an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rljob_api.layout import Layout
from rljob_workload.algorithm.batch import Request


class Lockstep:
    """One rank's membership. Ranks of one copy of the model see the same and need no agreement: `group` is None for them."""

    def __init__(self, copies: int, number: int, speaks: bool, group: dist.ProcessGroup | None) -> None:
        self._copies, self._number, self._speaks = copies, number, speaks
        self._group = group
        self._turn = 0

    @classmethod
    def join(cls, layout: Layout, *, rank: int, speaks: bool) -> Lockstep:
        """Collective over all ranks: gloo groups, so that the agreement costs no work on a GPU."""
        mine = cls(1, 0, speaks, None)
        for members in layout.replicas():
            copies = len(members) // layout.model_ranks
            if copies == 1:
                continue
            group = dist.new_group(members, backend="gloo")
            if rank in members:
                number = (members.index(rank) % (len(members) // layout.pipeline)) // (layout.tensor * layout.context)
                mine = cls(copies, number, speaks, group)
        return mine

    def share(self, requests: Sequence[Request]) -> list[Request]:
        """This copy's part of the requests, which all ranks of the set were given; copies take turns, over all calls."""
        own = [request for index, request in enumerate(requests, self._turn) if index % self._copies == self._number]
        self._turn += len(requests)
        return own

    def agree(self, *counts: int) -> list[int]:
        """Sums over the copies. Collective over the set."""
        if self._group is None:
            return list(counts)
        total = torch.tensor(counts if self._speaks else [0] * len(counts))
        dist.all_reduce(total, group=self._group)
        return [int(value) for value in total]
