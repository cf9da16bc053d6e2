"""One real SIGKILL between an optimizer step and its commit, and the resume; `make proof` is the long form."""

from __future__ import annotations

import json
import time
from pathlib import Path

from dev.proof.audit import audit
from dev.proof.job import Sizes, write
from dev.proof.life import Life
from dev.proof.moments import Hit, hit, until_uncommitted

SIZES = Sizes(steps=30, every_steps=10)
SECONDS = 120.0


def test_a_run_killed_between_optimizer_step_and_commit_trains_every_prompt_once(tmp_path: Path) -> None:
    job, directory = write(SIZES, tmp_path / "job.yaml"), tmp_path / "run"
    life = Life.begin(job, directory, 1)
    try:
        assert life.wait_until(lambda: any(directory.glob("step-*")), "the first checkpoint", seconds=SECONDS)
        assert until_uncommitted(life, 0.5)
    finally:
        life.kill()
    assert hit(life) is Hit.COMMIT
    uncommitted = life.trained()[-1]

    again = Life.begin(job, directory, 2)
    try:
        deadline = time.monotonic() + SECONDS
        assert not again.wait_until(lambda: time.monotonic() > deadline, "", seconds=2 * SECONDS, every=0.1), "not finished"
    finally:
        if again.process.poll() is None:
            again.kill()
    report = json.loads((directory / "progress.json").read_text())
    found = audit(directory, SIZES, report)
    assert found.clean, found.violations
    assert found.resumes == 1
    assert report["resume"]["fromStep"] in (10, 20)
    assert found.rolled_back_steps == uncommitted - report["resume"]["fromStep"] > 0
    assert found.trained == SIZES.steps * SIZES.prompts_per_step
