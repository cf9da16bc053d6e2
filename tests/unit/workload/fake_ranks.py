"""Ranks, trainers and environments made of plain Python, and what the tests of the collector do with them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rljob_workload.algorithm.batch import Answer, DecodeSlice, Request, TrainBatch
from rljob_workload.core.slices import SliceGoal
from rljob_workload.environments.base import Score
from rljob_workload.runtime.collector import Collector

ROOT = Path(__file__).parents[3]


class FakeRank:
    """Answers everything in one slice, unless told otherwise. `decode.remote(...)` is awaited, as on a Ray actor."""

    def __init__(self) -> None:
        self.decode = self
        self.collector: Collector | None = None
        self.held: list[Request] = []
        self.hold: Callable[[Request], bool] = lambda request: False
        self.gate = asyncio.Event()
        self.gate.set()
        self.slices = 0
        self.error: Exception | None = None

    async def remote(self, requests: list[Request], goal: SliceGoal) -> DecodeSlice:
        self.slices += 1
        await self.gate.wait()
        if self.error:
            raise self.error
        self.held += requests
        ready = [request for request in self.held if not self.hold(request)]
        self.held = [request for request in self.held if self.hold(request)]
        answers = [
            Answer(request.tag, (4, 5, 6), (-1.0,) * 3, ((0, self.collector._version if self.collector else 0),))
            for request in ready
            for _ in range(request.answers)
        ]
        await asyncio.sleep(0)
        return DecodeSlice(tuple(answers), sum(request.answers for request in self.held))


class FakeEnvironment:
    """Scores at once, slowly or not at all."""

    def __init__(self, *, quick: bool = True, judge: Callable[[str, str], float] = lambda answer, expected: 0.5) -> None:
        self.quick = quick
        self.judge = judge
        self.extra = itertools.cycle((0.0, 0.25))  # equal rewards would be filtered

    def score(self, answer: str, expected: str) -> Score:
        return Score(self.judge(answer, expected) + next(self.extra), False)


class FakeTrainer:
    """The `train` of a rank, which says its own number."""

    def __init__(self, number: int, trace: list[Any]) -> None:
        self.number = number
        self.trace = trace
        self.during: Callable[[], Any] = lambda: asyncio.sleep(0)

    async def remote(self, batch: TrainBatch, wake: bool) -> int:
        self.trace.append((self.number, batch.ordinals, wake))
        await self.during()
        return self.number


def trainers(count: int) -> tuple[list[Any], list[Any]]:
    """Ranks that answer and train, and what they were asked to train."""
    trace: list[Any] = []
    ranks: list[Any] = [FakeRank() for _ in range(count)]
    for number, rank in enumerate(ranks):
        rank.train = FakeTrainer(number, trace)
    return ranks, trace


def collector_in(directory: Path, environment: FakeEnvironment | None = None, steps: int = 500, **changes: Any) -> Collector:
    """A collector for the copy task with P = 4, G = 2. `changes`: `section__field=value` of the spec."""
    spec = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
    spec["algorithm"]["grpo"] |= {"promptsPerStep": 4, "generationsPerPrompt": 2, "microBatchSize": 8, "steps": steps}
    spec["generation"] |= {"maxInFlightPrompts": 8}
    spec["prompts"] |= {"retryBudget": 1}
    spec["environment"] |= {"timeoutSeconds": 1}
    for path, value in changes.items():
        *sections, field = path.split("__")
        node = spec
        for section in sections:
            node = node[section]
        node[field] = value
    collector = Collector(spec, str(directory), 1)
    # The environment is chosen by name in a spec; here by object.
    collector._scorer.environment = environment or FakeEnvironment()
    return collector


async def soon(awaitable: Any, seconds: float = 60.0) -> Any:
    """The result of what takes milliseconds; past the deadline it never comes."""
    return await asyncio.wait_for(awaitable, seconds)


def counts(collector: Collector) -> dict[str, int]:
    return {name: value for name, value in collector.counters()["counts"].items() if value and name != "skipped_by"}


async def steps(collector: Collector, count: int, first: int = 1) -> list[int]:
    """Take and commit so many steps; the trained ordinals."""
    for replica in collector._pumps._replicas:
        replica[0].collector = collector  # answers carry the version that is current when they are made
    trained: list[int] = []
    for step in range(first, first + count):
        taken, _ = await soon(collector.take(step))
        await collector.commit(step, taken.ordinals)
        await collector.resume(step)
        trained += taken.ordinals
    return trained
