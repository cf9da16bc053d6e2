"""The pieces of a step that need no process: its phases' times, its totals, its line of metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rljob_api.progress import PromptCounts
from rljob_workload.algorithm.batch import Request
from rljob_workload.core.rollouts import StepInfo
from rljob_workload.data.builtin import TaskData

if TYPE_CHECKING:
    from rljob_workload.runtime.rank import RankStep

#: Tag of validation prompts; the same as `megatron.engine.VALIDATION`.
VALIDATION = -1


@dataclass(slots=True)
class Totals:
    """What accumulates over the steps of the weights' lineage, and over restarts."""

    consumed_samples: int = 0
    trained_prompts: int = 0
    consumed_tokens: int = 0
    #: Seconds that training waited for groups, and that ranks spent between generation and training.
    starved_seconds: float = 0.0
    handover_seconds: float = 0.0
    #: Seconds of training before this attempt.
    elapsed_before: float = 0.0

    def add(self, info: StepInfo) -> None:
        """Count one step's answers."""
        self.consumed_samples += info.samples
        self.consumed_tokens += info.answer_tokens

    def spend(self, starved: float, handover: float) -> None:
        """Count one step's seconds."""
        self.starved_seconds += starved
        self.handover_seconds += handover

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a checkpoint's totals; older ones have fewer. Raises KeyError, TypeError or ValueError."""
        self.trained_prompts = int(saved["trained_prompts"])
        self.consumed_samples = int(saved["consumed_samples"])
        self.consumed_tokens = int(saved.get("consumed_tokens", 0))
        self.starved_seconds = float(saved.get("starved_seconds", 0.0))
        self.handover_seconds = float(saved.get("handover_seconds", 0.0))


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where the run stands in time."""

    #: Seconds of training over all attempts.
    elapsed: float
    #: The same with start-ups: what deadlines.activeSeconds limits.
    active: float


@dataclass(slots=True)
class Phases:
    """Seconds of one step by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began

    def move(self, source: str, target: str, seconds: float) -> None:
        """Part of a phase belongs to another."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds


def metrics_line(
    step: int,
    attempt: int,
    clocks: Clocks,
    info: StepInfo,
    results: Sequence[RankStep],
    counts: dict[str, Any],
    phases: Phases,
    totals: Totals,
) -> dict[str, Any]:
    """One line of metrics.jsonl. Sums of the ranks are divided by the step's answer tokens."""
    speaking = [result.stats for result in results if result.stats.speaks]
    tokens = info.answer_tokens
    return {
        "step": step,
        "attempt": attempt,
        "elapsed_seconds": round(clocks.elapsed, 3),
        "active_seconds": round(clocks.active, 3),
        "consumed_samples": totals.consumed_samples,
        "consumed_prompts": totals.trained_prompts,
        "consumed_tokens": totals.consumed_tokens,
        "reward": info.reward,
        "correct": info.correct,
        "loss": sum(s.loss for s in speaking) / tokens,
        "entropy": sum(s.entropy for s in speaking) / tokens,
        "clipped": sum(s.clipped for s in speaking) / tokens,
        "grad_norm": max(s.grad_norm for s in speaking),
        "largest_logprob_change": max(s.largest_logprob_change for s in speaking),
        # None: no answer of this step was sampled by the weights that were trained.
        "train/gen_logprob_error": max(
            (s.gen_logprob_error for s in speaking if s.gen_logprob_error is not None), default=None
        ),
        "handover/suspend_seconds": round(max(result.suspend.seconds for result in results), 5),
        "handover/wake_seconds": round(max((r.wake.seconds for r in results if r.wake), default=0.0), 5),
        "engine/constructions": max(result.engines for result in results),
        "memory/peak_bytes": _most(result.memory for result in results),
        "samples": info.samples,
        "answer_tokens": tokens,
        "spanning_answers": info.spanning,
        "filtered": info.filtered,
        "oldest_age": info.oldest_age,
        "mean_age": info.mean_age,
        "ages": {str(age): groups for age, groups in info.ages},
        "seconds": {phase: round(value, 5) for phase, value in phases.seconds.items()},
        "totals": {
            "starved_seconds": round(totals.starved_seconds, 5),
            "handover_seconds": round(totals.handover_seconds, 5),
        },
        "prompts": counts,
    }


def _most(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The largest number of any rank, by phase."""
    most: dict[str, int] = {}
    for part in parts:
        most |= {phase: max(number, most.get(phase, 0)) for phase, number in part.items()}
    return most


def prompt_counts(counters: Mapping[str, Any]) -> PromptCounts:
    """The collector's counters in the report's form."""
    partition = {name: value for name, value in counters["counts"].items() if name != "skipped_by"}
    return PromptCounts(**partition, skipped_by=counters["skipped_names"])


def validation_prompts(task: TaskData, limit: int) -> list[Request]:
    """The task's first rows, one greedy answer each."""
    return [Request((VALIDATION, index), row.tokens, 1) for index, row in enumerate(task.rows[:limit])]
