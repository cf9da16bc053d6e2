"""The driver: one attempt of a run, from its beginning (`_start`) over its steps (`training`) to the way it ends.

Every wait has a deadline, and every way to end badly has its own exit code.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_api.layout import layout_of
from rljob_api.progress import Finished
from rljob_workload.core.checkpoint import CheckpointError, RunDirectory
from rljob_workload.runtime import launch, preflight
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.control import Control
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.keeper import Keeper, Parts
from rljob_workload.runtime.progress import Progress
from rljob_workload.runtime.prompts import cap_report, too_many_skipped
from rljob_workload.runtime.record import Record
from rljob_workload.runtime.resume import Beginning, Resumed, beginning, resume
from rljob_workload.runtime.serving import close_server, server_place
from rljob_workload.runtime.settings import Attempt
from rljob_workload.runtime.step import prompt_counts
from rljob_workload.runtime.stop import StopSignal
from rljob_workload.runtime.training import Training
from rljob_workload.runtime.watch import Watch

log = logging.getLogger("rljob.driver")


class Driver:
    """Runs one attempt. `run` returns how it finished or raises `RunError`."""

    def __init__(
        self,
        attempt: Attempt,
        progress: Progress,
        stop: StopSignal,
        control: Control,
        *,
        spread: bool,
        token_file: Path | None = None,
    ) -> None:
        """`spread`: nodes are different machines; `token_file`: of the run's token, which its HTTP server asks for too."""
        self._attempt = attempt = preflight.with_model(attempt)
        self._token_file = token_file
        self._spec = attempt.spec
        self._progress = progress
        self._stop = stop
        self._control = control
        self._spread = spread
        self._directory = RunDirectory(attempt.directory)
        preflight.check_settings(self._spec)
        self._task = preflight.load_task(self._spec)
        preflight.check_directory(attempt.directory)
        self._record = Record(attempt)
        self._actors: launch.Actors | None = None
        self._keeper: Keeper | None = None
        self._beginning: Beginning | None = None

    def prepare(self) -> None:
        """Decide where to go on from. It needs no Ray, so that a refusal comes before one is started.

        Raises RunError: see `beginning`; SAVE_FAILED where the volume cannot be written.
        """
        try:
            self._prepared()
        except OSError as err:
            raise self._unwritable(err) from err

    def _prepared(self) -> Beginning:
        if self._beginning is None:
            self._beginning = beginning(self._attempt)
            if self._beginning.checkpoint is None:
                preflight.check_weights(self._attempt)
        return self._beginning

    def _unwritable(self, err: OSError) -> RunError:
        where = err.filename or self._attempt.directory
        return RunError(ExitCode.SAVE_FAILED, f"cannot write {where}: {err.strerror or err}")

    def run(self) -> Finished:
        """Start, resume, train to the end."""
        try:
            resumed, cap = self._start()
            with Watch(self._calls().actors, self._progress).looking():
                parts = Parts(self._attempt, self._calls(), self._record, self._progress, self._control)
                self._keeper = keeper = Keeper(parts, self._prepared(), resumed)
                finished = Training(parts, keeper, self._stop, self._task, resumed.version, cap).to_the_end()
            keeper.wait()
        except RayTaskError as err:
            raise self._calls().classified(err) from err
        except RayActorError as err:
            raise self._calls().lost(err) from err
        except CheckpointError as err:
            raise RunError(ExitCode.SAVE_FAILED, str(err)) from err
        except OSError as err:
            raise self._unwritable(err) from err
        finally:
            if self._keeper is not None:
                self._keeper.settle()
            if self._actors is not None and ray.is_initialized():
                close_server(self._spec, self._actors)
                self._actors.kill()
            self._record.close()
        self._progress.update(
            phase="Finished", finished=finished, elapsed_seconds=self._record.clocks.elapsed, oldest=[], handover=None
        )
        return finished

    def _start(self) -> tuple[Resumed, int]:
        """Launch the actors, load, begin to collect. Returns where the weights are, and how many prompts may be in flight."""
        began = time.monotonic()
        begin = self._prepared()
        fresh = begin.checkpoint is None
        for name in self._directory.remove_unfinished(begin.token):
            log.info("removed the unfinished %s of an earlier attempt", name)
        self._actors = launch.launch(
            self._attempt, spread=self._spread, place=server_place(self._attempt, self._token_file, spread=self._spread)
        )
        placed = time.monotonic()
        self._progress.update(phase="Loading")
        ranks = self._actors.ranks
        deadline = self._spec.deadlines.first_step_seconds
        address = self._calls().get(ranks[0].address.remote(), deadline, "rank 0 did not name its address")
        self._calls().get([rank.setup.remote(address, fresh) for rank in ranks], deadline, "the ranks did not get ready")
        loaded = time.monotonic()
        resumed = resume(self._calls(), begin.checkpoint, self._attempt, self._record.totals, self._record.before)
        urls = self._calls().get(
            self._actors.collector.start.remote(self._actors.replicas, resumed.version, layout_of(self._spec).replicas()),
            deadline,
            "the collector hangs",
        )
        self._record.begin(resumed.version)
        ready = time.monotonic()
        log.info("ready: actors %.1f s, model and engine %.1f s, resume %.1f s",
                 placed - began, loaded - placed, ready - loaded)  # fmt: skip
        status = self._calls().get(self._calls().collector.status.remote(), deadline, "the collector does not answer")
        cap = cap_report(status["cap"])
        # One update: a report that names what it resumed from also has the prompts of then.
        self._progress.update(
            phase="Generating",
            prompts=prompt_counts(status),
            in_flight_prompts=cap,
            dp_openai_server_base_urls=urls,
            **resumed.report,
        )
        if why := too_many_skipped(self._spec, status):
            raise RunError(ExitCode.SKIPPED_TOO_MANY, why)
        return resumed, cap.effective

    def _calls(self) -> Calls:
        """The actors, once they are there."""
        if self._actors is None:
            raise RuntimeError("the actors have not been launched")
        return Calls(self._actors)
