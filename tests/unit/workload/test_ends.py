"""Every end has its code and its words: errors of actors, signals at bad moments, a Ray that has gone."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services
from ray.exceptions import GetTimeoutError, RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_api.names import driver_log
from rljob_api.progress import Finished
from rljob_workload.core.due import Due, DueRules
from rljob_workload.core.handover import HandoverError, HandoverTimeoutError
from rljob_workload.core.source import SourceError
from rljob_workload.megatron.errors import DeviceError, EngineError, EngineStepError, NonFiniteError, WeightsError, reason_of
from rljob_workload.runtime import calls as calls_module
from rljob_workload.runtime import driver as driver_module
from rljob_workload.runtime import local
from rljob_workload.runtime import run as run_module
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.control import Control
from rljob_workload.runtime.errors import CollectorFailedError, HungError, RunError, cause_line
from rljob_workload.runtime.lastword import LastWord, watched
from rljob_workload.runtime.launch import Actors
from rljob_workload.runtime.progress import Progress
from rljob_workload.runtime.stop import StopSignal
from rljob_workload.runtime.whereabouts import described

from .test_beginnings import attempt_in, failed, run
from .test_driver_surroundings import report

TRACE = (
    "\x1b[36mray::Rank.decode()\x1b[39m (pid=1, ip=10.0.0.1)\n"
    "           ^^^^^^^^^^^^\n"
    '  File "sampling.py", line 109, in sample\n'
    "RuntimeError: probability tensor contains nan\n"
)


def raised(cause: Exception) -> RayTaskError:
    """As `ray.get` raises an actor's exception."""
    return RayTaskError("Rank.save", TRACE, cause)


@pytest.mark.parametrize(
    ("cause", "code", "message"),
    [
        (NonFiniteError("step 3: loss nan"), ExitCode.NON_FINITE, "step 3: loss nan"),
        (EngineError("cache too small"), ExitCode.INVALID_SPEC, "cache too small"),
        (SourceError("no rows"), ExitCode.BAD_DATA, "no rows"),
        (WeightsError("No space left on device"), ExitCode.SAVE_FAILED, "No space left on device"),
        (DeviceError("no CUDA"), ExitCode.ENVIRONMENT_MISSING, "no CUDA"),
        (OSError(28, "No space left on device", "/v/x"), ExitCode.SAVE_FAILED, "cannot write /v/x: No space left on device"),
        (CollectorFailedError("replica 0: " + TRACE), ExitCode.COLLECTOR_LOST, "RuntimeError: probability tensor contains nan"),
        (HungError("decode: no answer of rank 1"), ExitCode.HUNG, "decode: no answer of rank 1; rank 1 does not answer"),
        (EngineStepError("rank 0, Decode: odd"), ExitCode.COLLECTOR_LOST, "rank 0, Decode: odd"),
        (
            HandoverTimeoutError("Draining", (1,), 2.0),
            ExitCode.HANDOVER_TIMEOUT,
            "rank 1 did not arrive at the hand-over (Draining) within 2 s (deadlines.handoverSeconds); "
            "a rank that is only slow needs a longer one",
        ),
        (ValueError("odd"), ExitCode.UNEXPECTED, "ValueError: odd"),
    ],
)
def test_an_actors_exception_has_its_code_and_one_plain_line(cause: Exception, code: ExitCode, message: str) -> None:
    calls = calls_to(Silent())
    error = calls.classified(raised(pickle.loads(pickle.dumps(cause))))
    assert (error.code, str(error)) == (code, message)


class Silent:
    """An actor that lives and says nothing of interest, or is dead."""

    def __init__(self, dead: bool = False) -> None:
        self.status = dead


def calls_to(*ranks: Silent) -> Calls:
    return Calls(Actors(list(ranks), Silent(), None, []))


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_workload.runtime.calls._answers", lambda status: not status)
    monkeypatch.setattr("rljob_workload.runtime.calls.whereabouts", lambda ranks: "rank 1 does not answer")


def test_a_hang_says_where_the_ranks_are_and_first_who_says_nothing() -> None:
    waiting = {"phase": "Draining", "step": "barrier", "phase_seconds": 6.4, "engine_steps": 34, "policy_version": 7}
    decoding = waiting | {"phase": "Decode", "step": ""}
    assert described([waiting, None, decoding]) == (
        "rank 1 does not answer; rank 0: Draining (barrier) for 6 s, engine step 34, version 7; "
        "rank 2: Decode for 6 s, engine step 34, version 7"
    )
    assert described([decoding] * 7 + [None] * 3).startswith("rank 7 does not answer; rank 8 does not answer; rank 9")
    assert described([decoding] * 10).endswith("; 2 more ranks")


@pytest.mark.parametrize("cause", [CollectorFailedError, EngineStepError, HandoverError, RuntimeError])
def test_a_broken_collective_is_the_death_of_the_rank_behind_it(cause: type[Exception]) -> None:
    """The neighbour of a killed rank reports first; what ended the attempt is the rank that is gone."""
    error = calls_to(Silent(), Silent(dead=True)).classified(raised(cause("Connection closed by peer")))
    assert (error.code, str(error)) == (ExitCode.RANK_LOST, "rank 1 died: Connection closed by peer")


def test_a_remote_traceback_comes_down_to_its_last_named_error() -> None:
    assert cause_line(TRACE) == "RuntimeError: probability tensor contains nan"
    assert cause_line(TRACE + "Exception raised from here:\nframe #0: x\n") == "Exception raised from here:"
    assert cause_line("two\n lines,  plain") == "two lines, plain"
    assert cause_line("") == ""


def test_the_reason_is_the_error_at_the_bottom() -> None:
    class GatheredError(BaseException):
        failures = {0: (ValueError("Size mismatch\nwith more"), None)}  # noqa: RUF012

    assert reason_of(GatheredError()) == "ValueError: Size mismatch"
    full = RuntimeError("unexpected pos 64 vs 0")
    full.__context__ = OSError(28, "No space left on device")
    assert reason_of(full) == "No space left on device"
    unrelated = RuntimeError("the point")
    unrelated.__context__ = ModuleNotFoundError("No module named 'optional'")
    assert reason_of(unrelated) == "RuntimeError: the point"


# ---- signals ------------------------------------------------------------------------------------


def test_sigterm_while_ray_starts_is_a_stop_with_a_report(tmp_path: Path) -> None:
    """Ray's own handler is in place then; it exits with the signal's number."""

    def start_ray() -> dict[str, int]:
        sys.exit(signal.SIGTERM)

    assert run(attempt_in(tmp_path), start_ray) == ExitCode.STOPPED
    assert failed(tmp_path) == (ExitCode.STOPPED, "stopped by SIGTERM while Ray was starting")


@pytest.mark.parametrize("by_cause", [True, False])
def test_sigterm_that_ray_wraps_in_an_error_of_its_own_is_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_cause: bool
) -> None:
    """Seen while the ranks loaded: `ray.get` ended with a SystemError whose cause was our signal."""

    class Driver:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def prepare(self) -> None:
            pass

        def run(self) -> Finished:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException as err:
                broken = SystemError("<built-in method __new__> returned a result with an exception set")
                if by_cause:
                    raise broken from err
                raise broken  # noqa: B904 - the signal as the context
            raise AssertionError("no signal arrived")

    monkeypatch.setattr(driver_module, "Driver", Driver)
    assert run(attempt_in(tmp_path)) == ExitCode.STOPPED
    assert failed(tmp_path) == (ExitCode.STOPPED, "stopped by SIGTERM before a step was under way")


@pytest.mark.parametrize(("code", "level"), [(ExitCode.STOPPED, "W"), (ExitCode.DEADLINE, "W"), (ExitCode.HUNG, "E")])
def test_an_end_that_was_asked_for_is_no_error_in_the_log(
    code: ExitCode, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def prepare(self) -> None:
            raise RunError(code, "after step 7, which was saved")

    monkeypatch.setattr(driver_module, "Driver", Driver)
    attempt = attempt_in(tmp_path)
    assert run(attempt) == code
    (line,) = [line for line in (tmp_path / driver_log(attempt.number)).read_text().splitlines() if "after step 7" in line]
    assert f" {level} rljob.driver: exit code {int(code)} " in line


def test_sigterm_after_the_end_changes_nothing() -> None:
    stop = StopSignal()
    with stop.installed():
        stop.over()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.asked


def test_a_second_sigterm_sets_a_limit_to_the_end() -> None:
    limits: list[str] = []
    stop = StopSignal(lambda by: limits.append(f"{by}: at once"), lambda by: limits.append(f"{by}: save within the budget"))
    with stop.installed(), stop.while_training(lambda: limits.append("asked")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert limits == ["SIGTERM: save within the budget", "asked"]
        with pytest.raises(BaseException, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert limits[2:] == ["SIGTERM: at once"]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal, also where the tests were started in the background of a script, deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_and_says_so_and_a_second_one_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Driver:
        def __init__(self, attempt: Any, progress: Any, stop: StopSignal, control: Control, **_: Any) -> None:
            self.stop, self.control = stop, control

        def prepare(self) -> None:
            pass

        def run(self) -> Finished:
            self.control.attach(Due(DueRules(100, 100), lambda: 0.0), 7, None)
            with self.stop.while_training(self.control.ask_stop):
                os.kill(os.getpid(), signal.SIGINT)
                assert self.control.events.get(timeout=60) == "stop"
                if again:
                    os.kill(os.getpid(), signal.SIGINT)
            raise RunError(ExitCode.STOPPED, f"stopped by {self.stop.by} after step 7, which was saved")

    monkeypatch.setattr(driver_module, "Driver", Driver)
    before = signal.getsignal(signal.SIGINT)
    again = False
    assert run(attempt_in(tmp_path)) == 130
    assert failed(tmp_path) == (ExitCode.STOPPED, "stopped by Ctrl-C after step 7, which was saved")
    errors = capfd.readouterr().err
    assert "rljob: saving step 7, or the one that is being trained; Ctrl-C again ends at once\n" in errors
    assert " W rljob.driver: exit status 130, in the report 80 (Stopped): stopped by Ctrl-C" in errors
    again = True
    assert run(attempt_in(tmp_path)) == 130
    assert failed(tmp_path) == (ExitCode.STOPPED, "stopped by Ctrl-C a second time, before the save was done")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_background_command_stays_deaf_to_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal().installed():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_rays_daemons_get_a_session_of_their_own() -> None:
    """A signal to the driver's process group must not end them."""
    original = services.ConsolePopen
    with local._daemons_in_their_own_session():
        command = [sys.executable, "-c", "input()"]
        with services.ConsolePopen(command, stdin=subprocess.PIPE) as daemon:
            assert os.getsid(daemon.pid) == daemon.pid
            daemon.communicate(b"\n")
    assert services.ConsolePopen is original


# ---- a Ray that has gone ------------------------------------------------------------------------


def test_a_daemon_that_dies_is_named_at_once() -> None:
    died, names = threading.Event(), []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as daemon:

        def note(name: str) -> None:
            names.append(name)
            died.set()

        with watched({"gcs_server": daemon.pid}, note):
            daemon.kill()
            assert died.wait(60)
    assert names == [f"gcs_server (process {daemon.pid})"]


def test_a_daemon_that_outlives_the_run_is_not_reported() -> None:
    names: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as daemon:
        with watched({"raylet": daemon.pid}, names.append):
            pass
        daemon.kill()
    assert names == []


def last_word(progress: Progress, left: list[int], gone: threading.Event) -> LastWord:
    def leave(status: int) -> None:
        left.append(status)
        gone.set()

    def last_report(code: ExitCode, message: str) -> int:
        return run_module._last_report(progress, code, message, print_report=False)

    return LastWord(last_report, leave)


def test_an_end_that_hangs_is_cut_short_with_its_report() -> None:
    progress, left, gone = Progress(report()), [], threading.Event()  # type: ignore[var-annotated]
    last_word(progress, left, gone).overdue(ExitCode.STOPPED, "stopped", seconds=0.05)
    assert gone.wait(60)
    assert left == [ExitCode.STOPPED]
    assert progress.report.failed is not None
    assert progress.report.failed.message == "stopped"


def test_an_end_in_time_is_left_alone() -> None:
    progress, left, gone = Progress(report()), [], threading.Event()  # type: ignore[var-annotated]
    last = last_word(progress, left, gone)
    last.exit_overdue(0, seconds=0.05)
    last.cancel()
    assert not gone.wait(0.2)


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"finished": Finished(reason="Completed", message="done")}, 0), ({}, ExitCode.RANK_LOST)],
)
def test_a_report_that_is_final_already_stays(fields: dict[str, Any], status: int) -> None:
    progress, left, gone = Progress(report(**fields)), [], threading.Event()  # type: ignore[var-annotated]
    last_word(progress, left, gone).now(ExitCode.RANK_LOST, "Ray's raylet ended")
    assert left == [status]
    assert (progress.report.failed is None) == (status == 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (GetTimeoutError(), "and it does not tell its state (GetTimeoutError)"),
        (
            {"state": "Draining", "oldest_in_flight": [{"ordinal": 7}], "log": ["Collecting 2.000 s -> Draining: step 3"]},
            "which is Draining; in flight longest: 7; its last moves: Collecting 2.000 s -> Draining: step 3",
        ),
    ],
)
def test_a_collector_that_says_nothing_is_asked_once_more(monkeypatch: pytest.MonkeyPatch, answer: Any, said: str) -> None:
    def get(ref: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(calls_module.ray, "get", get)
    collector = SimpleNamespace(status=SimpleNamespace(remote=lambda: None))
    report = Calls(Actors([], collector, None, [])).stall_report(3, 300)
    assert report == f"step 3: no word of the collector within 300 s (deadlines.stallSeconds), {said}"


def test_a_call_that_is_not_answered_in_time_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ref: Any, timeout: float) -> Any:
        raise GetTimeoutError

    monkeypatch.setattr(calls_module.ray, "get", get)
    with pytest.raises(RunError, match=r"^the collector does not commit within 300 s$") as caught:
        Calls(Actors([], None, None, [])).get(None, 300, "the collector does not commit")
    assert caught.value.code is ExitCode.HUNG
