"""The real policy and engine in this process, for tests that need no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import Answer, TrainBatch, TrainStats
from rljob_workload.core.handover import Handover
from rljob_workload.core.rollouts import Rollouts, StepInfo
from rljob_workload.data.builtin import TaskData, load_builtin
from rljob_workload.environments import load_environment
from rljob_workload.megatron import meeting
from rljob_workload.megatron.colocated import Colocated
from rljob_workload.megatron.device import RankBarrier
from rljob_workload.megatron.engine import ResidentEngine
from rljob_workload.megatron.policy import (
    Policy,
    init_process_groups,
    quiet_megatron,
)
from rljob_workload.megatron.settings import engine_settings, model_settings
from rljob_workload.runtime.rollouts_of import build_rollouts
from rljob_workload.runtime.step import validation_prompts

from .many_ranks import ManyRanks

ROOT = Path(__file__).parents[2]


def copy_spec(task: str = "copy3", **changes: Any) -> RLJobSpec:
    """The example's spec with another task and changed algorithm or generation fields."""
    raw = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
    raw["data"]["builtin"] = task
    raw["algorithm"]["grpo"] |= {"promptsPerStep": 8, "microBatchSize": 64}
    raw["generation"]["maxInFlightPrompts"] = 8
    if task == "copyv":
        raw["generation"] |= {"maxNewTokens": 7, "maxSequenceLength": 16}
        # The fewer other tokens there are, the sooner an untrained policy hits the end token: lengths differ from the start.
        raw["model"]["shape"]["vocabSize"] = 18
    for name, value in changes.items():
        target = raw["algorithm"]["grpo"] if name in raw["algorithm"]["grpo"] else raw["generation"]
        target[name] = value
    verdict = judge("copy", raw)
    assert verdict.spec is not None, verdict.findings
    return verdict.spec


@pytest.fixture(scope="session")
def ranks() -> Iterator[None]:
    """A world of one rank."""
    quiet_megatron()
    init_process_groups(model_settings(copy_spec()), rank=0, world=1, store=meeting.alone(), timeout=60)
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ManyRanks]:
    """The processes of two ranks; each `Trainer.of` begins with new ones."""
    made = ManyRanks(2)
    yield made
    made.close()


@dataclass
class Loop:
    """The trainer's loop without its processes."""

    spec: RLJobSpec
    task: TaskData
    policy: Policy
    engine: ResidentEngine
    rollouts: Rollouts
    infos: list[StepInfo] = field(default_factory=list)
    stats: list[TrainStats] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)

    @classmethod
    def of(cls, spec: RLJobSpec) -> Loop:
        task = load_builtin(str(spec.data.builtin))
        policy = Policy(model_settings(spec))
        engine = ResidentEngine(policy, engine_settings(spec, task), task.tokenizer)
        return cls(spec, task, policy, engine, build_rollouts(spec, task))

    def step(self, handover: Handover | None = None) -> None:
        """Generate until a batch is there, train it, go on."""
        version = self.policy.version
        while True:
            self.engine.submit(self.rollouts.dispatch(version, 0.0))
            taken = self.rollouts.take(version + 1, version)
            if taken is not None:
                break
            self.accept(self.engine.step())
        batch, info = taken
        if handover is None:
            handover = Handover(0, Colocated(self.policy, self.engine, RankBarrier(10), offload=False))
        handover.to_train()
        self.stats.append(self.policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens))
        handover.to_decode()
        self.rollouts.commit(batch.step, batch.ordinals)
        self.infos.append(info)
        self.batches.append(batch)

    def accept(self, answers: list[Answer]) -> None:
        environment = load_environment("exactMatch", fixed_length=self.task.eos is None)
        for group in self.rollouts.arrive(answers):
            expected = self.rollouts.expected(group.ordinal)
            scores = [environment.score(self.task.tokenizer.decode(a.tokens), expected) for a in group.answers]
            self.rollouts.scored(group, [(s.reward, s.correct) for s in scores])

    def train(self, batch: TrainBatch) -> TrainStats:
        self.policy.enter_train()
        stats = self.policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
        self.policy.enter_generate()
        return stats

    def validate(self, limit: int = 100) -> int:
        prompts = validation_prompts(self.task, limit)
        answers, training = self.engine.validate(prompts)
        self.accept(training)
        return len(answers)
