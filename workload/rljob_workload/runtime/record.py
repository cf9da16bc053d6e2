"""What a run leaves behind for people: metrics.jsonl and TensorBoard, against steps and against seconds over all attempts."""

from __future__ import annotations

import time
from typing import Any

from rljob_api.exitcodes import ExitCode
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.metrics import LastMetrics, MetricsFile
from rljob_workload.runtime.settings import Attempt
from rljob_workload.runtime.step import Clocks, Totals
from rljob_workload.runtime.tensorboard import TensorBoard


class Record:
    """The files of one attempt, its totals and its clocks."""

    def __init__(self, attempt: Attempt) -> None:
        """Open what is there already. Raises RunError (ENVIRONMENT_MISSING) where that cannot be used."""
        path = attempt.directory / "metrics.jsonl"
        try:
            self._metrics = MetricsFile(path)
        except OSError as err:
            raise RunError(ExitCode.ENVIRONMENT_MISSING, f"cannot use {err.filename or path}: {err.strerror or err}") from err
        self._attempt = attempt
        self._board: TensorBoard | None = None
        self._training_since = time.monotonic()
        active, left = attempt.spec.deadlines.active_seconds, attempt.active_left
        #: Of earlier attempts: as the launcher has counted, else as far as the metrics tell.
        self._active_before = self.before.active_seconds if active is None or left is None else active - left
        self.totals = Totals()

    @property
    def before(self) -> LastMetrics:
        """How far earlier attempts got."""
        return self._metrics.last

    @property
    def clocks(self) -> Clocks:
        """The moment, in the run's own seconds."""
        now = time.monotonic()
        elapsed = self.totals.elapsed_before + now - self._training_since
        return Clocks(elapsed, self._active_before + now - self._attempt.began)

    @property
    def ends(self) -> float | None:
        """When deadlines.activeSeconds is over, on the monotonic clock; None where there is no such deadline."""
        active = self._attempt.spec.deadlines.active_seconds
        return None if active is None else self._attempt.began + active - self._active_before

    def begin(self, step: int) -> None:
        """Training goes on after this step, from now on. Raises OSError."""
        self._training_since = time.monotonic()
        elapsed = self.totals.elapsed_before
        self._board = TensorBoard(self._attempt.directory / "tensorboard", self._attempt.number, step, elapsed)

    def write(self, line: dict[str, Any]) -> None:
        """One step's line of metrics. Raises OSError."""
        self._metrics.write(line)
        if self._board is not None:
            self._board.write(line)

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        if self._board is not None:
            self._board.close()
