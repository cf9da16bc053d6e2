"""A stretch of collecting, from one step to the next: its clock and its end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rljob_workload.algorithm.batch import TrainBatch
from rljob_workload.core.rollouts import StepInfo


@dataclass(frozen=True, slots=True)
class End:
    """How a stretch of collecting ended."""

    batch: TrainBatch | None
    info: StepInfo | None


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
