"""From an attempt to an exit code: logging, progress report, driver, and the words at the end."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rljob_api.exitcodes import ExitCode, describe
from rljob_api.names import REPORT_LINE_PREFIX, driver_log
from rljob_api.progress import Failed, Finished, ProgressReport
from rljob_workload.runtime.control import Access, Control
from rljob_workload.runtime.errors import RunError, cause_line
from rljob_workload.runtime.lastword import LastWord, watched
from rljob_workload.runtime.logs import FORMAT, close_files, log_to_file
from rljob_workload.runtime.progress import Progress, ProgressServer, utc_now
from rljob_workload.runtime.settings import Attempt, check_versions
from rljob_workload.runtime.stop import CTRL_C, INTERRUPTED_STATUS, StoppedError, StopSignal, stop_behind

log = logging.getLogger("rljob.driver")

#: Ends that somebody asked for, now or in the spec: no errors in a log.
_ASKED_FOR = frozenset({ExitCode.STOPPED, ExitCode.DEADLINE})

#: Connects to Ray or starts it; returns the daemons (name: pid) that must live as long as the run.
StartRay = Callable[[], Mapping[str, int]]


def execute(
    attempt: Attempt,
    *,
    start_ray: StartRay,
    mirror: Path,
    host: str,
    port: int,
    spread: bool,
    show_log: bool,
    show_bar: bool,
    linger_seconds: float,
    access: Access,
    served: Callable[[int], AbstractContextManager[None]] = lambda port: nullcontext(),
) -> int:
    """Run one attempt. Always returns an exit code, always leaves a final report behind.

    `access` says who may use the control endpoints; `served` is entered with the port once they answer, and left at the end.
    """
    log_to_stderr(quiet=not show_log)
    try:
        log_to_file(attempt.directory / driver_log(attempt.number))
        progress = Progress(_first_report(attempt), mirror)
        last = LastWord(
            lambda code, message: _status(stop, _last_report(progress, code, message, print_report=linger_seconds > 0))
        )
        stop = _stop_signal(attempt, last, lambda: _answer_ctrl_c(control))
        control = Control(stop)
        server = _serve(attempt, progress, control, access, host, port)
    except (OSError, RunError) as err:
        code, message = _volume_or_port(err)
        log.error("exit code %s: %s", describe(code), message)  # noqa: TRY400 - bad input gets no traceback
        return int(code)
    try:
        with served(server.port), _shown(progress, show_bar):
            status = _guarded(_Run(attempt, progress, start_ray, stop, control, last, spread, access.token_file))
        _say(progress, show_bar)
        if linger_seconds:
            progress.wait_until_read(linger_seconds)
            # Ray keeps the log: the report can still be read there when nobody came in time.
            _print_report(progress)
        return status
    finally:
        server.close()
        close_files()


def _shown(progress: Progress, show_bar: bool) -> AbstractContextManager[None]:
    if not show_bar:
        return nullcontext()
    from rljob_workload.runtime import view

    return view.bar(progress)


def _say(progress: Progress, show_bar: bool) -> None:
    """Where the bar took the log's place, the end still needs a sentence."""
    finished = progress.report.finished
    if show_bar and finished:
        print(f"Succeeded ({finished.reason}): {finished.message}", file=sys.stderr)


def _first_report(attempt: Attempt) -> ProgressReport:
    return ProgressReport(
        name=attempt.name,
        namespace=attempt.namespace,
        uid=attempt.uid,
        attempt=attempt.number,
        phase="Starting",
        updated_time=utc_now(),
        total_steps=attempt.spec.algorithm.grpo.steps,
    )


def _serve(attempt: Attempt, progress: Progress, control: Control, access: Access, host: str, port: int) -> ProgressServer:
    try:
        server = ProgressServer(progress, control, access, host, port)
    except OSError as err:
        cure = "; the operator looks for the report there: end the process that listens on that port"
        raise RunError(
            ExitCode.ENVIRONMENT_MISSING,
            f"cannot serve the progress report on {host}:{port}: {err.strerror or err}"
            f"{cure if err.errno == errno.EADDRINUSE else ''}",
        ) from err
    log.info("attempt %d of %s/%s; progress on http://%s:%d/progress",
             attempt.number, attempt.namespace, attempt.name, host, server.port)  # fmt: skip
    for finding in attempt.warnings:
        log.warning("%s: %s", finding.path, finding.message)
    return server


def _stop_signal(attempt: Attempt, last: LastWord, told: Callable[[], None]) -> StopSignal:
    seconds = float(attempt.spec.deadlines.save_seconds)
    return StopSignal(
        lambda by: last.overdue(ExitCode.STOPPED, f"stopped by {by} without finishing the step"),
        lambda by: last.overdue(
            ExitCode.STOPPED,
            f"stopped by {by}; the step under way was not saved within {seconds:g} s (deadlines.saveSeconds), so the "
            "checkpoint before it stands",
            seconds,
        ),
        told,
    )


def _answer_ctrl_c(control: Control) -> None:
    """One line at once, since the save takes a moment. From within a signal handler: neither the log nor a buffer, whose
    locks the interrupted code may hold."""
    step = control.version
    what = f"saving step {step}, or the one that is being trained" if step else "ending after the step that is being trained"
    os.write(2, f"\nrljob: {what}; Ctrl-C again ends at once\n".encode())


@dataclass(frozen=True, slots=True)
class _Run:
    """One attempt and what stands around its driver."""

    attempt: Attempt
    progress: Progress
    start_ray: StartRay
    stop: StopSignal
    control: Control
    last: LastWord
    spread: bool
    token_file: Path | None


def _guarded(run: _Run) -> int:
    """The driver with every end turned into an exit code and a last report; then Ray is shut down, or left when it hangs."""
    with run.stop.installed():
        status = _attempted(run)
        run.last.exit_overdue(status)
        _shut_ray_down()
        run.last.cancel()
    return status


def _attempted(run: _Run) -> int:
    progress, stop = run.progress, run.stop
    try:
        try:
            finished = _drive(run)
        finally:
            stop.over()
            run.control.close()
    except RunError as err:
        return _failed(progress, err.code, str(err), stop)
    except SystemExit as err:
        # Ray's own handler, while Ray starts and before ours is back.
        if err.code != signal.SIGTERM:
            return _failed(progress, ExitCode.UNEXPECTED, f"Ray ended the driver with exit status {err.code}")
        return _failed(progress, ExitCode.STOPPED, "stopped by SIGTERM while Ray was starting")
    except StoppedError as err:
        return _stopped(run, err)
    except KeyboardInterrupt:
        # Python's own handler, where ours is not in place.
        _stopped(run, StoppedError(CTRL_C))
        return INTERRUPTED_STATUS
    except Exception as err:
        if signalled := stop_behind(err):
            return _stopped(run, signalled)
        log.exception("unexpected")
        return _failed(progress, ExitCode.UNEXPECTED, cause_line(f"{type(err).__name__}: {err}"))
    log.info("Succeeded (%s): %s", finished.reason, finished.message)
    return int(ExitCode.OK)


def _stopped(run: _Run, signalled: StoppedError) -> int:
    """A signal where nothing can be saved, or nothing more."""
    by = str(signalled)
    again = "a second time, " if run.stop.by == by else ""
    when = f"{again}before the save was done" if run.stop.asked else "before a step was under way"
    return _failed(run.progress, ExitCode.STOPPED, f"stopped by {by} {when}", run.stop)


def _status(stop: StopSignal, code: int) -> int:
    """The process's status for an exit code."""
    return INTERRUPTED_STATUS if code == ExitCode.STOPPED and stop.interrupted else code


def _drive(run: _Run) -> Finished:
    began = time.monotonic()
    from rljob_workload.runtime.driver import Driver

    check_versions()
    driver = Driver(run.attempt, run.progress, run.stop, run.control, spread=run.spread, token_file=run.token_file)
    driver.prepare()
    daemons = run.start_ray()
    run.stop.listen()  # again: Ray has put its own handler over ours, one that aborts
    log.info("Ray is up after %.1f s", time.monotonic() - began)
    with watched(daemons, lambda name: run.last.now(ExitCode.RANK_LOST, f"Ray's {name} ended, and all actors with it")):
        return driver.run()


def _shut_ray_down() -> None:
    """Leave Ray, also when its start was broken off."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def _print_report(progress: Progress) -> None:
    print(REPORT_LINE_PREFIX + json.dumps(progress.report.to_wire()), flush=True)


def _last_report(progress: Progress, code: ExitCode, message: str, *, print_report: bool) -> int:
    """The report of a driver that cannot end in order; one that is there already stays."""
    report = progress.report
    if report.finished is not None:
        status = int(ExitCode.OK)
    elif report.failed is not None:
        status = report.failed.exit_code
    else:
        status = _failed(progress, code, message)
    if print_report:
        _print_report(progress)
    close_files()
    return status


def _failed(progress: Progress, code: ExitCode, message: str, stop: StopSignal | None = None) -> int:
    """Report it and return the process's status."""
    progress.update(phase="Failed", failed=Failed(exit_code=int(code), message=message[:2048]))
    status = _status(stop, int(code)) if stop is not None else int(code)
    said = "exit code" if status == code else f"exit status {status}, in the report"
    log.log(logging.WARNING if code in _ASKED_FOR else logging.ERROR, "%s %s: %s", said, describe(int(code)), message)
    return status


def _volume_or_port(err: OSError | RunError) -> tuple[ExitCode, str]:
    if isinstance(err, RunError):
        return err.code, str(err)
    where = err.filename or "the run's directory"
    return ExitCode.ENVIRONMENT_MISSING, f"cannot write {where}: {err.strerror or err}"


def log_to_stderr(*, quiet: bool = False) -> None:
    """The driver's log for people and for `kubectl logs`."""
    logger = logging.getLogger("rljob")
    if not any(type(handler) is logging.StreamHandler for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        handler.setLevel(logging.WARNING if quiet else logging.INFO)
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
