"""A whole run under `rljob local`: its rank is killed, then its driver, and the third attempt finishes.

What was trained is judged by the record that the ranks write, not by the ledger.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rljob_api.exitcodes import ExitCode
from rljob_workload.runtime.local import CONTROL_FILE, TOKEN_FILE
from rljob_workload.runtime.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS = 36, 8
#: Of every wait here; a run starts in ten seconds, and in a hundred where ten others start beside it.
DEADLINE = 180.0

pytestmark = pytest.mark.timeout(900)


@dataclass
class Run:
    """A run directory and how its attempts ended."""

    directory: Path
    manifest: Path
    resumed_from: list[int]

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rljob_cli.main", "local", str(self.manifest), "--dir", str(self.directory)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory / "metrics.jsonl")

    def progress(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.directory / "progress.json").read_text())
        return report

    def wait_for_step(self, process: subprocess.Popen[str], attempt: int, step: int) -> None:
        def reached() -> bool:
            assert process.poll() is None, process.communicate()[1][-3000:]
            return any(line["attempt"] == attempt and line["step"] >= step for line in self.metrics())

        wait(reached, f"attempt {attempt} reaches step {step}")
        self.resumed_from.append(self.progress()["resume"]["fromStep"])


def wait(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def post(run: Run, what: str, query: str = "") -> dict[str, Any]:
    """As a researcher would: the address and the token from the run's directory."""
    control = json.loads((run.directory / CONTROL_FILE).read_text())
    token = Path(control["tokenFile"])
    assert token.stat().st_mode & 0o777 == 0o600
    request = urllib.request.Request(control[what] + query, b"", {"Authorization": f"Bearer {token.read_text()}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_a_run_saves_when_asked_and_after_sigterm_the_next_start_goes_on(tmp_path: Path) -> None:
    """SIGTERM to the whole group, as `timeout` and service managers send it: Ray's daemons must survive it until the save."""
    manifest = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())
    manifest["spec"]["algorithm"]["grpo"]["steps"] = 4000
    manifest["spec"]["checkpoint"]["everySteps"] = 4000
    del manifest["spec"]["validation"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    run = Run(tmp_path / "run", path, [])
    process = run.start()
    try:
        run.wait_for_step(process, attempt=1, step=1)
        asked = post(run, "save", "?wait=60")
        assert asked["accepted"]
        assert (tmp_path / "run" / Path(asked["checkpoint"]["path"]).name / "MANIFEST.json").exists()
        run.wait_for_step(process, attempt=1, step=asked["checkpoint"]["step"] + 2)
        left = descendants(process)
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == ExitCode.STOPPED == 80, errors[-3000:]
    assert "Traceback" not in errors
    step = run.progress()["checkpoint"]["step"]
    assert step > asked["checkpoint"]["step"]
    assert run.progress()["failed"]["message"] == f"stopped by SIGTERM after step {step}, which was saved"
    assert not (run.directory / CONTROL_FILE).exists()
    assert not (run.directory / TOKEN_FILE).exists()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [child.name() for child in alive if child.is_running() and child.status() != "zombie"] == []
    go_on(run, step)


def go_on(run: Run, step: int) -> None:
    """The next start begins where the stopped one was saved; then it is stopped over HTTP."""
    process = run.start()
    try:
        run.wait_for_step(process, attempt=2, step=step + 1)
        assert run.resumed_from[-1] == step
        assert run.progress()["rolledBack"] == {"steps": 0, "prompts": 0}
        assert post(run, "stop")["accepted"]
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == ExitCode.STOPPED, errors[-3000:]
    assert run.progress()["failed"]["message"].startswith("stopped by a control request after step")
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for key in ("elapsed_seconds", "active_seconds", "consumed_samples", "consumed_tokens"):
        assert [line[key] for line in lines] == sorted(line[key] for line in lines)
    assert len(list((run.directory / "tensorboard" / "by-step").iterdir())) == 2


def test_a_killed_rank_and_a_killed_driver_lose_no_prompt_and_leave_no_process(tmp_path: Path) -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())
    spec = manifest["spec"]
    spec["model"]["shape"]["vocabSize"] = 18
    spec["data"]["builtin"] = "copyv"
    spec["generation"] |= {"maxNewTokens": 7, "maxInFlightPrompts": 16, "maxRequests": 64}
    spec["algorithm"]["grpo"] |= {"steps": STEPS, "promptsPerStep": PROMPTS, "microBatchSize": PROMPTS * 8}
    spec["checkpoint"]["everySteps"] = 12
    spec["validation"] = {"everySteps": 12, "prompts": 50}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    run = Run(tmp_path / "run", path, [])

    kill_the_rank(run)
    kill_the_driver(run)
    finish(run)
    audit(run)


def kill_the_rank(run: Run) -> None:
    process = run.start()
    try:
        run.wait_for_step(process, attempt=1, step=14)
        (rank,) = (child for child in descendants(process) if child.name().startswith("ray::Rank"))
        rank.kill()
        _, errors = process.communicate(timeout=DEADLINE)  # long before the 300 s that a stall may take
    finally:
        process.kill()
    assert process.returncode == ExitCode.RANK_LOST
    assert "exit code 73 (RankLost): rank 0 died" in errors
    assert "Traceback" not in errors
    assert run.progress()["failed"]["exitCode"] == ExitCode.RANK_LOST


def kill_the_driver(run: Run) -> None:
    process = run.start()
    try:
        run.wait_for_step(process, attempt=2, step=26)
        left = descendants(process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert len(left) > 3
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [child.name() for child in alive if child.is_running() and child.status() != "zombie"] == []


def finish(run: Run) -> None:
    process = run.start()
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors[-3000:]
    last = errors.strip().splitlines()[-1]
    assert "Succeeded (Completed): all 36 steps are done" in last
    report = run.progress()
    run.resumed_from.append(report["resume"]["fromStep"])
    assert report["finished"]["reason"] == "Completed"
    assert report["phase"] == "Finished"
    assert report["attempt"] == 3
    assert report["rolledBack"]["steps"] >= 2
    assert report["checkpoint"]["step"] == STEPS
    assert len([path for path in run.directory.iterdir() if path.name.startswith("step-")]) == 2


def lineage(run: Run) -> dict[int, list[int]]:
    """Ordinals by step, of the steps that the final weights descend from."""
    by_step: dict[int, list[int]] = {}
    for line in records(run):
        if line["step"] == run.resumed_from[line["attempt"] - 1] + 1:
            by_step = {step: ordinals for step, ordinals in by_step.items() if step < line["step"]}
        by_step[line["step"]] = line["ordinals"]
    return by_step


def records(run: Run) -> Iterator[dict[str, Any]]:
    for text in (run.directory / "trained" / "rank-00000.jsonl").read_text().splitlines():
        yield json.loads(text)


def audit(run: Run) -> None:
    assert run.resumed_from == [0, 12, 24]
    by_step = lineage(run)
    assert sorted(by_step) == list(range(1, STEPS + 1))
    trained = [ordinal for ordinals in by_step.values() for ordinal in ordinals]
    metrics = run.metrics()
    last = {line["step"]: line for line in metrics}  # a later attempt's line replaces what it rolled back
    filtered = [ordinal for line in last.values() for ordinal in line["filtered"]]

    prompts = run.progress()["prompts"]
    assert len(trained) == prompts["trained"] == STEPS * PROMPTS
    assert len(filtered) == prompts["filtered"]
    assert sorted(trained + filtered) == list(range(prompts["handedOut"])), "a prompt was trained twice or lost"
    assert prompts["skipped"] == prompts["buffered"] == prompts["inFlight"] == prompts["retryable"] == 0

    assert [line["elapsed_seconds"] for line in metrics] == sorted(line["elapsed_seconds"] for line in metrics)
    assert max(line["oldest_age"] for line in metrics) == 1
    spanning = sum(line["spanning_answers"] for line in metrics)
    assert spanning >= 0.1 * sum(line["samples"] for line in metrics)
    assert {line["step"] for line in metrics if "validation_reward" in line} == {12, 24, 36}
