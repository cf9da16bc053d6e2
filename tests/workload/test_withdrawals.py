"""A real run whose agent is killed again and again, and its trainer once: what the proof's auditor says of its records."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml
from dev.proof.evidence import facts, read_records, tell
from dev.proof.life import JOURNAL, read_lines

from rljob_api.manifest import judge
from rljob_workload.core.simulation.auditor import Auditor, Ended, Reported
from rljob_workload.runtime.journal import ENV_JOURNAL

from .test_local_run import DEADLINE, ROOT, Run, descendants

STEPS, PROMPTS, ANSWERS = 40, 4, 4
#: Plays 16 at once, and ends after so many results that some of them were reported: by SIGKILL, or every third time by itself.
AGENT = """
import os, random, signal
from rljob_workload.agents import hints, loop

dice = random.Random(os.getpid())
left = dice.randrange(40, 100)

async def play(session, rollout):
    global left
    result = await hints.play(session, rollout, 2)
    left -= 1
    if left == 0:
        if dice.random() < 0.33:
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return result

loop.run(play, at_once=16)
"""

pytestmark = pytest.mark.timeout(600)


def test_prompts_that_a_killed_agent_had_are_withdrawn_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_JOURNAL, "1")
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    manifest = yaml.safe_load((ROOT / "examples" / "http-agent.yaml").read_text())
    raw = manifest["spec"]
    raw["environment"]["agent"]["command"] = ["python", str(agent)]
    raw["algorithm"]["grpo"] |= {
        "steps": STEPS, "promptsPerStep": PROMPTS, "generationsPerPrompt": ANSWERS, "microBatchSize": PROMPTS * ANSWERS,
    }  # fmt: skip
    raw["generation"]["maxInFlightPrompts"] = 8
    raw["checkpoint"]["everySteps"] = 8
    del raw["validation"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    run = Run(tmp_path / "run", path, [])

    process = run.start()
    try:
        run.wait_for_step(process, attempt=1, step=20)
        left = descendants(process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    psutil.wait_procs(left, timeout=60)
    process = run.start()
    try:
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]

    spec = judge("http-agent", raw).spec
    assert spec is not None
    auditor = Auditor(facts(spec.data.seed, spec.prompts.retry_budget, str(spec.data.builtin)))
    for event in tell(read_records(run.directory), ANSWERS, spec.algorithm.grpo.max_trajectory_age_steps):
        auditor.observe(event)
    prompts = run.progress()["prompts"]
    auditor.observe(Reported(*(prompts[name] for name in ("handedOut", "trained", "filtered", "skipped"))))
    live = sum(prompts[name] for name in ("training", "buffered", "inFlight", "pending", "retryable"))
    auditor.observe(Ended(live, stalled=False))
    verdict = auditor.verdict()
    assert (verdict.lost_ordinals, verdict.trained_twice, verdict.violations) == ([], 0, 0), verdict.examples
    assert prompts["trained"] == STEPS * PROMPTS
    withdrawn = [event for event in read_lines(run.directory / JOURNAL) if "withdrawn" in event]
    assert verdict.withdrawn == len(withdrawn) > 5
