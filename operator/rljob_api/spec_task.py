"""The part of `RLJob.spec` that says what is learnt: prompts, what scores their answers, the learning rule, validation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import ApiModel, Decimal, Flag, NonNegativeDecimal, Path, Seconds


class FilePath(ApiModel):
    """A file or directory that is mounted in the head pod."""

    path: Path
    """Where it is mounted."""


class Data(ApiModel):
    """Where prompts come from; exactly one of builtin, jsonl, parquet and dataset."""

    builtin: Literal["copy3", "copyv"] | None = None
    """A task that comes with the workload: copy3 (three digits) or copyv (one to six digits, answers of uneven length)."""
    jsonl: FilePath | None = None
    """One JSON object a line."""
    parquet: FilePath | None = None
    """A parquet file or directory."""
    dataset: FilePath | None = None
    """A directory written by the datasets library."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = 0
    """Seed of the order of prompts."""
    shuffle: Flag = True
    """A new order in each epoch; false keeps the rows' order."""
    on_change: Literal["Refuse", "Restart"] = "Refuse"
    """On resume with other data: refuse, or start it from the beginning and count the undone prompts as skipped."""


class Agent(ApiModel):
    """A process beside the collector that plays every prompt over the HTTP server, in any number of turns."""

    command: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=64)]
    """Its program and arguments, no shell; `python` is the trainer's own. Addresses and the token's file come by environment
    (docs/agents.md)."""


class Environment(ApiModel):
    """What scores an answer; exactly one of builtin and agent."""

    builtin: Literal["exactMatch", "unreliable"] | None = None
    """An environment that comes with the workload: exactMatch (share of matching characters); unreliable (the same, through
    a judge that raises, hangs and is slow: for drills)."""
    agent: Agent | None = None
    """An agent that plays each prompt by itself and reports a reward; needs generation.server.enabled."""
    timeout_seconds: Seconds = 30
    """Time for scoring one answer; past it the prompt's group has failed once. An agent has
    generation.answerTimeoutSeconds for a rollout."""


class Grpo(ApiModel):
    """Group Relative Policy Optimization, with importance correction for answers of older weights."""

    prompts_per_step: Annotated[int, Field(strict=True, ge=1, le=1_048_576)]
    """Prompts in one training step (P)."""
    generations_per_prompt: Annotated[int, Field(strict=True, ge=2, le=65_536)]
    """Answers to each prompt (G); the group's mean is the baseline, so at least 2."""
    micro_batch_size: Annotated[int, Field(strict=True, ge=1, le=1_048_576)]
    """Answers in one forward pass of a rank; P * G must be divisible by microBatchSize * data-parallel size."""
    steps: Annotated[int, Field(strict=True, ge=1, le=10_000_000)]
    """Optimizer steps of the whole run."""
    max_trajectory_age_steps: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """Most policy versions between an answer's first token and its training step."""
    learning_rate: NonNegativeDecimal = "0.000001"
    """Adam's learning rate."""
    clip_low: NonNegativeDecimal = "0.2"
    """The probability ratio is clipped at 1 - clipLow."""
    clip_high: NonNegativeDecimal = "0.28"
    """The probability ratio is clipped at 1 + clipHigh."""
    entropy_coefficient: NonNegativeDecimal = "0.0"
    """Weight of the entropy bonus."""


class Algorithm(ApiModel):
    """The learning rule."""

    grpo: Grpo
    """Group Relative Policy Optimization."""


class Validation(ApiModel):
    """Greedy answers to held-out prompts, every so many steps."""

    every_steps: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 25
    """Steps between two validations."""
    prompts: Annotated[int, Field(strict=True, ge=1, le=1_048_576)] = 1000
    """Prompts of one validation (at most; the task may have fewer)."""
    stop_at_reward: Decimal | None = None
    """Validation reward at which the run ends as Succeeded, reason TargetReached."""
