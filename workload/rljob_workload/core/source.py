"""Where prompts come from: any ordinal of the run's endless stream can be opened again."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass


class SourceError(Exception):
    """The data cannot be used (empty, or changed since the checkpoint)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of the data set: its tokens and what its answer is judged by."""

    tokens: tuple[int, ...]
    expected: str


class SeekableSource:
    """Map-style data in an order that (seed, epoch) fixes.

    Ordinal n is row `permutation(seed, n // rows)[n % rows]`: epochs roll on without a seam, no tail is dropped, and a
    resumed run opens any ordinal directly, so nothing about the reading position has to be saved.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool) -> None:
        if not rows:
            raise SourceError("the data set has no rows; it needs at least one")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def epoch_of(self, ordinal: int) -> int:
        """The epoch an ordinal belongs to, from 0."""
        return ordinal // len(self._rows)

    def row(self, ordinal: int) -> Row:
        """The row behind an ordinal."""
        if ordinal < 0:
            raise SourceError(f"ordinal {ordinal} is negative")
        epoch, place = divmod(ordinal, len(self._rows))
        return self._rows[self._order(epoch)[place] if self._shuffle else place]

    def fingerprint(self) -> str:
        """Identifies rows and order: two sources with equal fingerprints give the same row for every ordinal."""
        digest = hashlib.sha256(json.dumps([len(self._rows), self._seed, self._shuffle]).encode())
        for row in self._rows:
            digest.update(json.dumps([row.tokens, row.expected]).encode())
        return f"sha256:{digest.hexdigest()}"

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = list(range(len(self._rows)))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)  # noqa: S311 - reproducible, not secret
            # Live ordinals span at most two neighbouring epochs in practice; older orders are cheap to remake.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = order
        return order
