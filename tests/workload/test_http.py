"""Two replicas under `rljob local`, asked by the public `openai` client and played by an agent at the same time.

One run: hand-overs under load, a killed agent, a killed driver.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rljob_workload.runtime.local import TOKEN_FILE

from .test_local_run import DEADLINE, ROOT, Run, descendants, wait

pytestmark = pytest.mark.timeout(600)

CLIENTS, ROUNDS = 8, 6


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Run, subprocess.Popen[str]]]:
    """A run that does not end by itself, with two data-parallel replicas."""
    manifest = yaml.safe_load((ROOT / "examples" / "http-agent.yaml").read_text())
    spec = manifest["spec"]
    spec["trainer"]["ranksPerNode"] = 2
    spec["algorithm"]["grpo"] |= {"promptsPerStep": 4, "generationsPerPrompt": 4, "microBatchSize": 8, "steps": 100_000}
    spec["generation"]["maxInFlightPrompts"] = 8
    spec["checkpoint"]["everySteps"] = 100_000
    spec["validation"] = {"everySteps": 4, "prompts": 8}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    started = Run(tmp_path / "run", path, [])
    process = started.start()
    try:
        started.wait_for_step(process, attempt=1, step=1)
        yield started, process
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def test_two_replicas_serve_a_public_client_and_an_agent_over_hand_overs_and_kills(
    run: tuple[Run, subprocess.Popen[str]],
) -> None:
    started, process = run
    urls = started.progress()["dp_openai_server_base_urls"]
    assert len(set(urls)) == 2
    token = (started.directory / TOKEN_FILE).read_text()
    versions = ask_together(urls, token)
    assert len(versions) > 2, "hand-overs went on under load"
    the_agent_is_started_again(started, process)
    lines = started.metrics()
    errors = [line["train/gen_logprob_error"] for line in lines if line["train/gen_logprob_error"] is not None]
    assert max(errors) <= 1e-5
    assert all(line["answer_tokens"] == 6 * line["samples"] for line in lines), "two turns of three tokens each"
    assert started.progress()["prompts"]["skipped"] == 0
    assert any("validation_reward" in line for line in lines)
    nothing_survives_the_driver(process)


def ask_together(urls: list[str], token: str) -> set[int]:
    """Several clients of each replica at once; no request fails."""
    with ThreadPoolExecutor(len(urls) * CLIENTS) as pool:
        clients = [pool.submit(converse, url, token, number) for url in urls for number in range(CLIENTS)]
        return set().union(*(client.result() for client in clients))


def converse(url: str, token: str, number: int) -> set[int]:
    """Ask in each of the ways that there are; the versions of the policy that answered."""
    import openai

    client = openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=DEADLINE)
    (model,) = client.models.list().data
    versions: set[int] = set()
    for _ in range(ROUNDS):
        got = client.completions.create(
            model=model.id, prompt="123=", n=2, seed=number, logprobs=1, extra_body={"return_token_ids": True}
        )
        assert len(got.choices) == 2
        for choice in got.choices:
            said: dict[str, Any] = choice.model_extra or {}
            assert len(said["token_ids"]) == 3
            assert choice.logprobs is not None
            assert len(choice.logprobs.token_logprobs or ()) == 3
            versions |= {version for _, version in said["policy_versions"]}
        chat = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "123="}], temperature=0, max_tokens=2
        )
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 2
        parts = list(client.completions.create(model=model.id, prompt="45=", stream=True))
        assert [part.choices[0].finish_reason for part in parts] == [None, "length"]
    with pytest.raises(openai.BadRequestError, match="not in the model's alphabet"):
        client.completions.create(model=model.id, prompt="hello")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    return versions


def last_step(started: Run) -> int:
    """The newest step in the metrics; the report's file lags behind."""
    return int(started.metrics()[-1]["step"])


def agents(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The agent's own process, not its guard's."""
    return [
        child
        for child in descendants(process)
        if "rljob_workload.agents.hints" in command(child) and "guard" not in command(child)
    ]


def command(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        return ""


def the_agent_is_started_again(started: Run, process: subprocess.Popen[str]) -> None:
    (agent,) = agents(process)
    agent.kill()
    wait(lambda: [one.pid for one in agents(process)] not in ([], [agent.pid]), "another agent")
    started.wait_for_step(process, attempt=1, step=last_step(started) + 5)


def nothing_survives_the_driver(process: subprocess.Popen[str]) -> None:
    left = descendants(process)
    assert agents(process)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(left, timeout=60)
    names = [child.name() for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert names == [], f"alive {time.monotonic() - began:.0f} s after the driver"
