"""Two ranks in one pod under `rljob local`: both layouts to their end, through a killed rank and a rank that stands still."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rljob_api.exitcodes import ExitCode

from .test_local_run import DEADLINE, ROOT, Run, descendants

#: More than any of these runs gets to; and the steps that a resumed one still takes.
ENDLESS, MORE = 2000, 6
LAYOUTS: dict[str, dict[str, Any]] = {"tensor": {"tensor": 2}, "data": {}}


def run_in(directory: Path, layout: str, *, steps: int) -> Run:
    manifest = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())
    spec = manifest["spec"]
    spec["trainer"]["ranksPerNode"] = 2
    spec["parallelism"] = LAYOUTS[layout]
    spec["generation"]["offloadTrainingBuffers"] = True
    spec["algorithm"]["grpo"] |= {"steps": steps, "promptsPerStep": 8, "microBatchSize": 16}
    spec["checkpoint"]["everySteps"] = 5
    spec["validation"] = {"everySteps": 5, "prompts": 51}
    spec["deadlines"] |= {"handoverSeconds": 4, "stallSeconds": 12, "saveSeconds": 10}
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return Run(directory / "run", path, [])


def ranks_of(process: Any) -> list[psutil.Process]:
    """The rank processes, by their rank: the log that each has open names it (Ray starts them in any order)."""
    found = {
        Path(file.path).name.split("-")[1]: child
        for child in descendants(process)
        if child.name().startswith("ray::Rank")
        for file in child.open_files()
        if Path(file.path).name.startswith("rank-")
    }
    assert sorted(found) == ["00000", "00001"]
    return [child for _, child in sorted(found.items())]


def disturbed(run: Run, how: signal.Signals) -> tuple[int, str, list[psutil.Process]]:
    """Start, and send a rank a signal in the middle of training."""
    process = run.start()
    try:
        run.wait_for_step(process, attempt=1, step=6)
        left = descendants(process)
        os.kill(ranks_of(process)[1].pid, how)
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    return process.returncode, errors, left


def assert_gone(left: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(left, timeout=15)
    assert [child.name() for child in alive if child.is_running() and child.status() != "zombie"] == []


def assert_goes_on_to_the_end(directory: Path, layout: str, run: Run) -> None:
    start = run.progress()["checkpoint"]["step"]
    run = run_in(directory, layout, steps=start + MORE)
    process = run.start()
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors[-3000:]
    assert run.progress()["resume"]["fromStep"] == start
    lines = {line["step"]: line for line in run.metrics()}
    assert sorted(lines) == list(range(1, run.progress()["totalSteps"] + 1))
    assert {line["engine/constructions"] for line in lines.values()} == {1}
    assert {step for step, line in lines.items() if "validation_reward" in line} >= {5, start + MORE}
    wrong = [line["train/gen_logprob_error"] for line in lines.values()]
    assert max(error for error in wrong if error is not None) < 1e-5
    assert run.progress()["prompts"]["skipped"] == 0


def test_a_killed_rank_ends_the_attempt_and_leaves_no_process(tmp_path: Path) -> None:
    """Tensor parallel: the neighbour reports a broken collective first, and the message still names the rank that is gone."""
    run = run_in(tmp_path, "tensor", steps=ENDLESS)
    code, errors, left = disturbed(run, signal.SIGKILL)
    assert code == ExitCode.RANK_LOST, errors[-3000:]
    assert "exit code 73 (RankLost): rank " in errors
    assert " died: " in errors
    assert "Traceback" not in errors.split("exit code 73")[1]
    assert_gone(left)
    assert_goes_on_to_the_end(tmp_path, "tensor", run)


def test_a_rank_that_stands_still_is_named_within_its_deadline(tmp_path: Path) -> None:
    """Stopped, so that it holds its connections and answers nothing: in a hand-over, a collective or a decode slice."""
    run = run_in(tmp_path, "data", steps=ENDLESS)
    code, errors, left = disturbed(run, signal.SIGSTOP)
    assert code in (ExitCode.HANDOVER_TIMEOUT, ExitCode.HUNG), errors[-3000:]
    message = run.progress()["failed"]["message"]
    assert "rank 1 did not arrive at the hand-over" in message or "rank 1 does not answer" in message, message
    assert_gone(left)
    assert_goes_on_to_the_end(tmp_path, "data", run)


@pytest.mark.parametrize("layout", ["data"])
def test_status_is_answered_while_a_hand_over_waits_for_a_rank_that_never_comes(layout: str, tmp_path: Path) -> None:
    """On Ray, on the trainer's own actor class: only rank 0 is told to train."""
    import ray

    from rljob_api.manifest import judge
    from rljob_workload.core.handover import HandoverTimeoutError
    from rljob_workload.runtime.launch import rank_actor
    from rljob_workload.runtime.rank import RankPlace

    raw = yaml.safe_load(run_in(tmp_path, layout, steps=1).manifest.read_text())["spec"]
    verdict = judge("copy", raw)
    assert verdict.spec is not None
    wire = verdict.spec.to_wire()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        ranks = [rank_actor().options(num_cpus=1).remote(RankPlace(rank, 2, rank, 1, str(tmp_path)), wire) for rank in range(2)]
        address = ray.get(ranks[0].address.remote(), timeout=DEADLINE)
        host, _, port = address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))  # the port is rank 0's from when it is named
        ray.get([rank.setup.remote(address) for rank in ranks], timeout=DEADLINE)
        waiting = ranks[0].sleep.remote()
        while (status := ray.get(ranks[0].status.remote(), timeout=DEADLINE))["step"] != "barrier":
            assert not ray.wait([waiting], timeout=0)[0], status
        assert (status["phase"], status["engine/constructions"]) == ("Draining", 1)
        assert not ray.wait([waiting], timeout=0)[0]
        with pytest.raises(HandoverTimeoutError, match=r"rank 1 did not arrive at the hand-over \(Draining\) within 4 s"):
            ray.get(waiting, timeout=DEADLINE)
        assert ray.get(ranks[0].status.remote(), timeout=DEADLINE)["phase"] == "Broken"
        assert ray.get(ranks[1].status.remote(), timeout=DEADLINE)["phase"] == "Decode"
    finally:
        ray.shutdown()
