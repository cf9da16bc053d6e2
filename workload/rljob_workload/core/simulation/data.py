"""The simulated data set: its rows, its order, and a loader that can resume its place the way torchdata's can."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rljob_workload.core.replayable import ReplayableSource
from rljob_workload.core.simulation.settings import SimSettings
from rljob_workload.core.source import Row, SeekableSource, Source

LONGEST_PROMPT = 8


@dataclass(frozen=True, slots=True)
class DataFacts:
    """The rows, and those of them that are special."""

    rows: int
    seed: int
    always_fail: frozenset[int]
    never_return: frozenset[int]
    too_long: frozenset[int]
    #: Raise in the reader; only a loader's rows are read late enough for that.
    unreadable: frozenset[int]

    @classmethod
    def of(cls, settings: SimSettings) -> DataFacts:
        """Draw the special rows. Most rows stay ordinary, whatever the share."""
        rng = random.Random(f"data:{settings.seed}")  # noqa: S311 - reproducible, not secret

        def some() -> frozenset[int]:
            return frozenset(row for row in range(1, settings.rows) if rng.random() < settings.bad_rows)

        fail, hang, long, broken = some(), some(), some(), some()
        return cls(settings.rows, settings.seed, fail, hang, long, broken if settings.source == "replayable" else frozenset())

    def row_at(self, ordinal: int) -> int:
        """The row that the stream has at an ordinal, worked out apart from the sources."""
        epoch, place = divmod(ordinal, self.rows)
        return epoch_order(self.rows, self.seed, epoch)[place]

    def row(self, index: int) -> Row:
        """The row as a prompt."""
        padding = LONGEST_PROMPT if index in self.too_long else 0
        return Row((1, index, *[0] * padding), str(index))


@lru_cache(maxsize=64)
def epoch_order(rows: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of one epoch."""
    order = list(range(rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311 - reproducible, not secret
    return order


class SimLoader:
    """Handouts of `batch` rows, the last one of an epoch short; refuses a place of another number of workers."""

    def __init__(self, facts: DataFacts, *, batch: int, workers: int = 0) -> None:
        self._facts, self._batch, self._workers = facts, batch, workers
        self._epoch = self._offset = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self._offset < self._facts.rows:
            order = epoch_order(self._facts.rows, self._facts.seed, self._epoch)
            handout = list(order[self._offset : self._offset + self._batch])
            self._offset += len(handout)
            yield handout
        self._epoch, self._offset = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "offset": self._offset, "workers": self._workers, "generator": b"\x00state"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["workers"] == self._workers, f"saved by {state['workers']} workers, loaded by {self._workers}"
        assert state["generator"] == b"\x00state"
        self._epoch, self._offset = state["epoch"], state["offset"]


def make_source(facts: DataFacts, settings: SimSettings) -> Source:
    """A fresh source of the kind that is asked for."""
    if settings.source == "seekable":
        return SeekableSource([facts.row(index) for index in range(facts.rows)], seed=facts.seed, shuffle=True)

    def read(index: int) -> Row:
        if index in facts.unreadable:
            raise ValueError(f"row {index} is broken")
        return facts.row(index)

    identity = {"rows": facts.rows, "seed": facts.seed}
    loader = SimLoader(facts, batch=settings.handout)
    return ReplayableSource(loader, read, identity=identity, keep_rows=settings.keep_rows)
