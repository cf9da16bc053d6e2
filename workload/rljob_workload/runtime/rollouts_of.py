"""The collector's bookkeeping as a spec wants it."""

from __future__ import annotations

import logging

from rljob_api.spec import RLJobSpec
from rljob_workload.core.cap import Cap, in_flight_cap
from rljob_workload.core.ledger import SkipCause
from rljob_workload.core.rollouts import Rollouts, RolloutSettings
from rljob_workload.core.source import SeekableSource
from rljob_workload.core.window import Window
from rljob_workload.data.builtin import TaskData
from rljob_workload.runtime.journal import RolloutsMaker

log = logging.getLogger("rljob.collector")


def cap_of(spec: RLJobSpec) -> Cap:
    """The cap on groups in flight. Ranks decode in slices, one call for all groups, so calls do not limit it."""
    grpo = spec.algorithm.grpo
    return in_flight_cap(
        spec.generation.max_in_flight_prompts,
        prompts_per_step=grpo.prompts_per_step,
        max_age=grpo.max_trajectory_age_steps,
        calls_per_group=0,
    )


def build_rollouts(spec: RLJobSpec, task: TaskData, keeper: RolloutsMaker = Rollouts) -> Rollouts:
    """The bookkeeping for a validated spec. `keeper`: another class of the same making (the audit journal's)."""
    grpo, generation = spec.algorithm.grpo, spec.generation
    source = SeekableSource(task.rows, seed=spec.data.seed, shuffle=spec.data.shuffle)
    window = Window(grpo.prompts_per_step, grpo.max_trajectory_age_steps, grpo.steps)
    settings = RolloutSettings(
        group_size=grpo.generations_per_prompt,
        in_flight_limit=cap_of(spec).effective,
        longest_prompt=generation.max_sequence_length - task.new_tokens(generation.max_new_tokens),
        answer_timeout=float(generation.answer_timeout_seconds),
        retry_budget=spec.prompts.retry_budget,
        filters_per_step=grpo.prompts_per_step,
        timed_from_dispatch=spec.environment.agent is None,
    )
    return keeper(source, window, settings, _log_skip)


def _log_skip(ordinal: int, cause: SkipCause, particulars: str) -> None:
    log.warning("prompt %d is skipped (%s): %s", ordinal, cause, particulars)
