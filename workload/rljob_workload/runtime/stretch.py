"""A stretch of collecting, from one step to the next: its clock, its end, and what is told of the step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rljob_workload.algorithm.batch import TrainBatch
from rljob_workload.core.rollouts import StepInfo

if TYPE_CHECKING:
    from rljob_workload.runtime.rank import RankStep


@dataclass(frozen=True, slots=True)
class End:
    """How a stretch of collecting ended; `taken` is None where it was interrupted."""

    taken: tuple[TrainBatch, StepInfo] | None


@dataclass(frozen=True, slots=True)
class Stepped:
    """What the driver learns about a step that was trained and committed (its batch goes from here to the ranks)."""

    prompts: int
    info: StepInfo
    #: Seconds that the step waited for its groups, that the ranks' calls took, and that the commit took.
    wait_seconds: float
    train_seconds: float
    commit_seconds: float
    #: One of each rank.
    ranks: list[RankStep]
    #: After the commit: the ledger's counters, and the skipped ordinals by cause.
    counters: dict[str, Any]
    #: Whether the next stretch has begun.
    onward: bool


class ActiveClock:
    """Seconds of collecting: answers' deadlines stand still while the engines do."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def now(self) -> float:
        """Seconds so far."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._total + running

    def run(self) -> None:
        """Go on."""
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        """Stand still."""
        self._total, self._since = self.now(), None
