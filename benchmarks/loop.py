"""The trainer's loop in one process, without Ray: the real policy, engine, ledger and environment, with a clock on each part.

Used for the figures that compare parts with each other. What a user runs (driver, collector and ranks) is measured by
`benchmarks.stack`.
"""

from __future__ import annotations

import copy
import dataclasses
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import Answer, Request, TrainBatch, TrainStats
from rljob_workload.core.rollouts import StepInfo
from rljob_workload.data.builtin import load_builtin
from rljob_workload.environments import load_environment
from rljob_workload.megatron import device, meeting
from rljob_workload.megatron.engine import ResidentEngine
from rljob_workload.megatron.policy import Policy, init_process_groups, quiet_megatron
from rljob_workload.megatron.settings import engine_settings, model_settings
from rljob_workload.runtime.rollouts_of import build_rollouts

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "copy.yaml"

#: Tokens of the answers of a prompt: (ordinal, answers) -> one length each.
Lengths = Callable[[int, int], tuple[int, ...]]
#: Reward of an answer: (prompt tokens, answer tokens) -> reward.
Reward = Callable[[tuple[int, ...], tuple[int, ...]], float]


def spec_of(changes: Mapping[str, Mapping[str, Any]]) -> RLJobSpec:
    """The example's spec with changed fields: `{"algorithm.grpo": {"steps": 10}}`. Raises ValueError when it is refused."""
    raw = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text())["spec"])
    for path, values in changes.items():
        part = raw
        for name in path.split("."):
            part = part[name]
        part.update(values)
    verdict = judge("bench", raw)
    if verdict.spec is None or any(finding.severity == "error" for finding in verdict.findings):
        raise ValueError(f"the bench's own spec is refused: {verdict.findings}")
    return verdict.spec


@dataclass(slots=True)
class Cost:
    """Seconds of this process: on the CPU (all threads) and on the wall."""

    cpu: float = 0.0
    wall: float = 0.0

    def add(self, cpu: float, wall: float) -> None:
        """Count more."""
        self.cpu += cpu
        self.wall += wall


class Clock:
    """What each part of the work has cost since the last `reset`."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count a block."""
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self.costs.setdefault(part, Cost()).add(time.process_time() - cpu, time.perf_counter() - wall)

    def reset(self) -> None:
        """Forget the warm-up."""
        self.costs.clear()

    def total(self, *parts: str) -> Cost:
        """The sum of some parts; of all when none is named."""
        found = [cost for part, cost in self.costs.items() if not parts or part in parts]
        return Cost(sum(cost.cpu for cost in found), sum(cost.wall for cost in found))


@dataclass
class Loop:
    """Generate, take, train, over and over.

    `synchronous`: a step answers all of its prompts with the weights it then trains, and nothing is in flight while it
    trains. Otherwise the job's own rules hold (age, room, prompts in flight).
    """

    spec: RLJobSpec
    lengths: Lengths | None = None
    reward: Reward | None = None
    synchronous: bool = False
    clock: Clock = field(default_factory=Clock)
    infos: list[StepInfo] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)
    stats: list[TrainStats] = field(default_factory=list)
    #: Engine iterations since the start.
    iterations: int = 0

    def __post_init__(self) -> None:
        task = load_builtin(str(self.spec.data.builtin))
        self.task = task
        self.policy = Policy(model_settings(self.spec))
        self.engine = ResidentEngine(self.policy, engine_settings(self.spec, task), task.tokenizer)
        self.rollouts = build_rollouts(self.spec, task)
        self._environment = load_environment("exactMatch", fixed_length=task.eos is None)
        device.settle()  # as a rank does

    def step(self) -> None:
        """One training step."""
        version = self.policy.version
        if self.synchronous:
            self._submit(version, self.spec.algorithm.grpo.prompts_per_step)
        while (taken := self._take(version)) is None:
            if not self.synchronous or not self.engine.in_flight:
                # A synchronous step goes on only for prompts whose equal rewards taught nothing.
                self._submit(version, None if not self.synchronous else self.rollouts.missing(version))
            with self.clock.timed("engine"):
                answers = self.engine.step()
            self.iterations += 1
            with self.clock.timed("score"):
                self._accept(answers)
        batch, info = taken
        with self.clock.timed("handover"):
            self.engine.suspend()
            self.policy.enter_train()
        with self.clock.timed("train"):
            self.stats.append(self.policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens))
        with self.clock.timed("commit"):
            self.rollouts.commit(batch.step, batch.ordinals)
        with self.clock.timed("handover"):
            self.policy.enter_generate()
            self.engine.resume(self.policy.version)
        self.infos.append(info)
        self.batches.append(batch)

    def _take(self, version: int) -> tuple[TrainBatch, StepInfo] | None:
        with self.clock.timed("take"):
            return self.rollouts.take(version + 1, version)

    def _submit(self, version: int, limit: int | None) -> None:
        with self.clock.timed("dispatch"):
            requests = [self._with_lengths(request) for request in self.rollouts.dispatch(version, 0.0, limit)]
        with self.clock.timed("submit"):
            self.engine.submit(requests)

    def _with_lengths(self, request: Request) -> Request:
        if self.lengths is None:
            return request
        return dataclasses.replace(request, limits=self.lengths(request.tag[0], request.answers))

    def _accept(self, answers: list[Answer]) -> None:
        for group in self.rollouts.arrive(answers):
            expected = self.rollouts.expected(group.ordinal)
            self.rollouts.scored(group, [self._score(answer, expected) for answer in group.answers])

    def _score(self, answer: Answer, expected: str) -> tuple[float, bool]:
        if self.reward is not None:
            return self.reward(self.task.tokenizer.encode(expected), answer.tokens), False
        score = self._environment.score(self.task.tokenizer.decode(answer.tokens), expected)
        return score.reward, score.correct


def one_rank(spec: RLJobSpec) -> None:
    """Make this process a world of one rank."""
    quiet_megatron()
    init_process_groups(model_settings(spec), rank=0, world=1, store=meeting.alone(), timeout=60)


def share_in_prompt(prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """A reward for answers of any length: the share of their tokens that the prompt holds."""
    known = set(prompt)
    return sum(token in known for token in answer) / len(answer)


def peak_megabytes() -> float:
    """The largest resident size that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
