"""Agents against the collector with ranks of plain Python: what the tests of both work with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from rljob_workload.algorithm.batch import Request
from rljob_workload.core.slices import SliceGoal
from rljob_workload.runtime.collector import Collector
from rljob_workload.runtime.logs import close_files
from rljob_workload.server.place import ServerPlace

from .fake_ranks import FakeRank

ROOT = Path(__file__).parents[3]
#: Of every wait here; all of them take milliseconds on a machine that does nothing else.
SOON = 60.0
#: An agent that plays nothing: the tests do.
IDLE = ["python", "-c", "import time; time.sleep(600)"]


class Rank(FakeRank):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    async def remote(self, requests: list[Request], goal: SliceGoal) -> Any:
        self.asked += requests
        answered = await super().remote(requests, goal)
        if self.held and not answered.answers:
            await asyncio.sleep(0.001)  # as a slice takes time: a loop of empty ones would hold the lock nearly always
        return answered


@dataclass
class Play:
    """A collector, its rank, and an agent's view of it."""

    collector: Collector
    rank: Rank
    session: aiohttp.ClientSession
    url: str

    async def next(self, most: int = 64, wait: float = 10.0) -> list[dict[str, Any]]:
        async with self.session.get(f"{self.url}/rollouts/next", params={"max": most, "wait": wait}) as response:
            assert response.status == 200
            rollouts: list[dict[str, Any]] = (await response.json())["rollouts"]
            return rollouts

    async def turn(self, rollout: dict[str, Any], prompt: str | None = None, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"prompt": rollout["prompt"] if prompt is None else prompt, **more}
        async with self.session.post(rollout["base_url"] + "/completions", json=body) as response:
            return response.status, await response.json()

    async def state(self, name: str) -> tuple[int, dict[str, Any]]:
        async with self.session.get(f"{self.url}/rollouts/{name}") as response:
            return response.status, await response.json()

    async def result(self, rollout: dict[str, Any], **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.url}/rollouts/{rollout['id']}/result", json=body) as response:
            return response.status, await response.json()

    async def results(self, body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.url}/rollouts/results", json=body) as response:
            return response.status, await response.json()

    async def play(self, rollouts: list[dict[str, Any]]) -> None:
        """Two turns of each, rewards that differ."""
        rewards = itertools.cycle((0.0, 1.0))
        for rollout in rollouts:
            status, first = await self.turn(rollout)
            assert status == 200, first
            text = f"{rollout['prompt']}{first['choices'][0]['text']}:="
            status, _ = await self.turn(rollout, text)
            assert status == 200
            assert (await self.result(rollout, reward=next(rewards)))[0] == 200


@asynccontextmanager
async def playing(
    directory: Path, *, replicas: int = 1, environment: dict[str, Any] | None = None, **generation: Any
) -> AsyncIterator[Play]:
    """P = 2, G = 2, a retry budget of one."""
    spec = yaml.safe_load((ROOT / "examples" / "http-agent.yaml").read_text())["spec"]
    spec["algorithm"]["grpo"] |= {"promptsPerStep": 2, "generationsPerPrompt": 2, "microBatchSize": 2}
    spec["generation"] |= {"maxInFlightPrompts": 2, **generation}
    spec["environment"] = environment or {"agent": {"command": IDLE}}
    spec["prompts"] = {"retryBudget": 1}
    spec["trainer"]["ranksPerNode"] = replicas
    token = directory / "token"
    token.write_text("secret")
    collector = Collector(spec, str(directory), 1, ServerPlace("127.0.0.1", str(token), "agent"))
    ranks = [Rank() for _ in range(replicas)]
    for rank in ranks:
        rank.collector = collector
    urls = await collector.start([[rank] for rank in ranks], 0)
    try:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
            yield Play(collector, ranks[0], session, urls[0])
    finally:
        await collector.close()
        for task in list(collector._pumps._tasks):
            task.cancel()
        close_files()


async def seen(play: Play, count: int) -> None:
    """The rank has been asked so much."""
    while len(play.rank.asked) < count:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


async def free(play: Play, name: str) -> None:
    """The rollout has no turn under way."""
    assert play.collector._players is not None
    while play.collector._players.get(name).turn is not None:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


def failures(play: Play) -> dict[int, int]:
    """Of the prompts that are not done."""
    ledger = play.collector.rollouts.ledger
    return {ordinal: ledger.failures_of(ordinal) for ordinal in ledger.live()}


async def opened(play: Play, groups: int) -> None:
    """So many prompts are dispatched."""
    while play.collector.counters()["counts"]["in_flight"] < groups:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


async def untaken(play: Play, count: int) -> None:
    """So many rollouts may be taken."""
    assert play.collector._players is not None
    while play.collector._players.untaken < count:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


async def waiting(play: Play) -> None:
    """A request waits for rollouts: it stands in the monitor's line."""
    while not play.collector.monitor._lines["rollouts"]:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


def called(players: Any, name: str) -> asyncio.Event:
    """Set when it is called, by whichever thread."""
    event, loop, original = asyncio.Event(), asyncio.get_running_loop(), getattr(players, name)

    def noted(*args: Any) -> Any:
        loop.call_soon_threadsafe(event.set)
        return original(*args)

    setattr(players, name, noted)
    return event
