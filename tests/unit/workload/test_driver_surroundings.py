"""What the driver needs besides training: its environment, its report, its metrics, its ways to stop."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api import names
from rljob_api.exitcodes import ExitCode
from rljob_api.progress import Finished, ProgressReport
from rljob_workload.algorithm.batch import TrainStats
from rljob_workload.core.handover import Passage
from rljob_workload.core.rollouts import StepInfo
from rljob_workload.runtime import guardian
from rljob_workload.runtime import progress as progress_module
from rljob_workload.runtime.control import Access, Control
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.logs import close_files, log_to_file
from rljob_workload.runtime.metrics import MetricsFile, read_metrics
from rljob_workload.runtime.progress import Progress, ProgressServer
from rljob_workload.runtime.rank import RankStep
from rljob_workload.runtime.settings import attempt_from_environment
from rljob_workload.runtime.step import Clocks, Phases, Totals, metrics_line
from rljob_workload.runtime.stop import StoppedError, StopSignal

ROOT = Path(__file__).parents[3]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    spec = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
    return {
        names.ENV_SPEC: json.dumps(spec),
        names.ENV_NAME: "copy",
        names.ENV_NAMESPACE: "team",
        names.ENV_UID: "u-1",
        names.ENV_ATTEMPT: "3",
        names.ENV_VOLUME: str(tmp_path),
    }


def test_the_operators_environment_describes_an_attempt(environment: dict[str, str], tmp_path: Path) -> None:
    attempt = attempt_from_environment(environment)
    assert (attempt.name, attempt.namespace, attempt.uid, attempt.number) == ("copy", "team", "u-1", 3)
    assert (attempt.volume, attempt.preflight) == (tmp_path, None)
    assert attempt.directory == tmp_path / "runs" / "team" / "copy"


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({names.ENV_SPEC: ""}, ExitCode.ENVIRONMENT_MISSING, "RLJOB_SPEC is not set"),
        ({names.ENV_SPEC: "{"}, ExitCode.INVALID_SPEC, "RLJOB_SPEC is not JSON"),
        ({names.ENV_SPEC: "{}"}, ExitCode.INVALID_SPEC, "spec.trainer: is required"),
        ({names.ENV_ATTEMPT: "0"}, ExitCode.ENVIRONMENT_MISSING, "RLJOB_ATTEMPT='0' is not a number from 1"),
        ({names.ENV_PREFLIGHT: "{"}, ExitCode.ENVIRONMENT_MISSING, "RLJOB_PREFLIGHT is no preflight report"),
        ({names.ENV_VOLUME: "/nowhere/at/all"}, ExitCode.ENVIRONMENT_MISSING, "mount the claim 'copy-checkpoints'"),
    ],
)
def test_a_bad_environment_is_one_message_with_its_code(
    environment: dict[str, str], change: dict[str, str], code: ExitCode, message: str
) -> None:
    with pytest.raises(RunError, match=message) as caught:
        attempt_from_environment(environment | change)
    assert caught.value.code is code


def test_the_entry_point_ends_bad_input_with_its_code_and_without_a_traceback(environment: dict[str, str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "rljob_workload.runtime.main"],
        env=os.environ | environment | {names.ENV_ATTEMPT: "one"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == ExitCode.ENVIRONMENT_MISSING
    assert "exit code 66 (EnvironmentMissing): RLJOB_ATTEMPT='one'" in run.stderr
    assert "Traceback" not in run.stderr


def report(**fields: Any) -> ProgressReport:
    base = {"name": "copy", "namespace": "team", "uid": "u", "attempt": 1, "phase": "Starting"}
    return ProgressReport(**(base | {"updated_time": "2026-01-01T00:00:00Z", "total_steps": 9} | fields))


def fetch(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)


def test_the_report_is_served_mirrored_and_known_to_be_read_at_the_end(tmp_path: Path) -> None:
    progress = Progress(report(), tmp_path / "progress.json")
    server = ProgressServer(progress, Control(StopSignal()), Access(None), "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}{names.PROGRESS_PATH}"
        progress.update(phase="Training", step=4, reward=0.5)
        served = ProgressReport.model_validate(fetch(url))
        assert (served.phase, served.step, served.reward) == ("Training", 4, 0.5)
        assert not progress.wait_until_read(0)
        progress.update(phase="Finished", finished=Finished(reason="Completed", message="done"))
        assert json.loads((tmp_path / "progress.json").read_text())["finished"]["reason"] == "Completed"
        assert not progress.wait_until_read(0)
        assert fetch(url)["finished"] == {"reason": "Completed", "message": "done"}
        assert progress.wait_until_read(0)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(f"http://127.0.0.1:{server.port}/other")
    finally:
        server.close()


def test_two_threads_may_update_the_report_and_the_mirror_ends_with_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_module, "MIRROR_SECONDS", -1.0)  # every update is written
    progress = Progress(report(), tmp_path / "progress.json")
    other = threading.Thread(target=lambda: [progress.update(collector_state=f"State{n}") for n in range(200)])
    other.start()
    for step in range(1, 201):
        progress.update(step=step)
    other.join()
    mirrored = ProgressReport.model_validate_json((tmp_path / "progress.json").read_text())
    assert (mirrored.step, mirrored.collector_state) == (200, "State199")
    assert not caplog.records


def test_metrics_go_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write({"step": 1, "elapsed_seconds": 2.5, "prompts": {"trained": 8}})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 2, "elap')
    second = MetricsFile(path)
    assert (second.last.step, second.last.elapsed_seconds, second.last.trained_prompts) == (1, 2.5, 8)
    second.write({"step": 2, "elapsed_seconds": 3.0, "prompts": {"trained": 16}})
    second.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_lines_that_are_no_steps_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"step": 7, "elapsed_seconds": 2.5, "prompts": {"trained": 56}}).encode()
    path.write_bytes(good + b'\n{"step": 31}\n{"step": "x", "elapsed_seconds": 1, "prompts": {}}\n\xff\xfe\n[]\n')
    metrics = MetricsFile(path)
    metrics.close()
    assert (metrics.last.step, metrics.last.trained_prompts) == (7, 56)


def test_metrics_on_a_full_volume_name_the_file_once_and_close_without_another_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics._file.close()
    metrics._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - closed below, which is what is tested
    with pytest.raises(OSError, match="No space left on device") as caught:
        metrics.write({"step": 1})
    assert caught.value.filename == str(path)
    metrics.close()


def test_a_log_file_on_a_full_volume_costs_one_line_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "driver.log"
    path.symlink_to("/dev/full")
    log_to_file(path)
    try:
        for _ in range(3):
            logging.getLogger("rljob.driver").info("words")
    finally:
        close_files()
    lines = [line for line in capsys.readouterr().err.splitlines() if "driver.log" in line or "Traceback" in line]
    assert lines == [f"rljob: cannot write {path}: [Errno 28] No space left on device"]


def test_a_metrics_line_divides_the_ranks_sums_by_the_steps_tokens() -> None:
    info = StepInfo(reward=0.5, correct=0.25, samples=4, answer_tokens=10, spanning=1, oldest_age=1, mean_age=0.5)
    stats = [
        TrainStats(5.0, 20.0, 1.0, 0.1, 0.7, speaks=True),
        TrainStats(5.0, 20.0, 1.0, 0.3, 0.7, speaks=True, gen_logprob_error=4e-7),
    ]
    silent = TrainStats(99.0, 99.0, 99.0, 99.0, 0.7, speaks=False)
    suspends, wakes = [Passage("Train", s, 0.0, {}) for s in (0.2, 0.5, 0.3)], [Passage("Decode", 0.1, 0.0, {})] * 3
    peaks = [{"generate": 5, "train": 9}, {"generate": 7, "train": 8}, {"generate": 6, "save": 1}]
    steps = zip((*stats, silent), suspends, wakes, peaks, strict=True)
    results = [RankStep(s, 0.0, suspend, wake, memory=peak) for s, suspend, wake, peak in steps]
    phases = Phases({"generate": 1.0})
    line = metrics_line(7, 2, Clocks(12.3456, 20.0), info, results, {"trained": 8}, phases, Totals(consumed_samples=28))
    assert (line["loss"], line["entropy"], line["clipped"]) == (1.0, 4.0, 0.2)
    assert (line["step"], line["attempt"], line["elapsed_seconds"], line["consumed_samples"]) == (7, 2, 12.346, 28)
    assert line["largest_logprob_change"] == 0.3
    assert line["train/gen_logprob_error"] == 4e-7
    assert (line["handover/suspend_seconds"], line["handover/wake_seconds"]) == (0.5, 0.1)
    assert line["engine/constructions"] == 1
    assert line["memory/peak_bytes"] == {"generate": 7, "train": 9, "save": 1}
    json.dumps(line, allow_nan=False)


def test_sigterm_asks_first_between_steps_and_stops_at_once_elsewhere() -> None:
    stop = StopSignal()
    with stop.installed():
        with stop.while_training(lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.by == "SIGTERM"
            with pytest.raises(StoppedError, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedError):
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_guardian_kills_what_uses_the_directory_and_spares_the_driver(tmp_path: Path) -> None:
    directory = tmp_path / "ray"
    directory.mkdir()
    held = (directory / "log").open("w")
    program = "import time, sys; f = open(sys.argv[1]); print('open', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(directory / "log")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    try:
        watch = guardian.Guardian(directory)
        watch.release()
        assert child.wait(5) == -signal.SIGKILL
        assert not directory.exists()
    finally:
        held.close()
        child.kill()


def test_the_driver_never_imports_torch_whatever_the_ranks_send_it() -> None:
    """It would cost the head pod hundreds of megabytes and the first step two seconds. Nor is there a web server unasked."""
    program = """
import pickle, sys
from rljob_workload.algorithm.batch import TrainStats
from rljob_workload.core.handover import Passage
from rljob_workload.megatron.errors import NonFiniteError
from rljob_workload.runtime import collector, driver, local, main
from rljob_workload.runtime.rank import RankStep
sent = RankStep(TrainStats(0.0, 0.0, 0.0, 0.0, 0.0, True), 0.0, Passage("Train", 0.0, 0.0, {}), None), NonFiniteError("x")
pickle.loads(pickle.dumps(sent))
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "aiohttp"}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
