"""`RLJob.status`: what the operator observed. Written by it alone."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .base import ApiModel, Count, Decimal
from .progress import CheckpointInfo, InFlightPrompts, PromptCounts, Resume, RolledBack
from .spec import Volume


def _a_time(text: str) -> str:
    # The API server takes more for a date-time than there are moments: a year 0, an offset of 99 hours.
    if datetime.datetime.fromisoformat(text.upper()).tzinfo is None:
        raise ValueError("has no time zone")
    return text


Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"}), AfterValidator(_a_time)]


class Condition(ApiModel):
    """One observation, in the standard form of Kubernetes conditions."""

    type: Annotated[str, Field(max_length=64)]
    """What is observed."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this was observed for."""
    last_transition_time: Time
    """When status last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, as one stable word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, for people."""


class ValidationResult(ApiModel):
    """The last validation."""

    step: Count
    """Step after which it ran."""
    reward: Decimal
    """Its mean reward."""


class LastFailure(ApiModel):
    """Evidence of the last failed attempt, kept after its pods are gone."""

    attempt: Count
    """Attempt that failed."""
    reason: Annotated[str, Field(max_length=128)]
    """Why, as one word."""
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = None
    """The driver's exit code, when known."""
    checkpoint_step: Count | None = None
    """Step of the newest checkpoint at that time; a later one is progress (failurePolicy.resetAfterProgress)."""
    action: Literal["Restart", "RestartUncounted", "Fail"] = "Restart"
    """What follows: another attempt that counts toward failurePolicy.maxRestarts, one that does not, or none."""
    rule: Annotated[str, Field(max_length=63)] = ""
    """Rule of failurePolicy.rules that decided; empty where the default table did."""
    in_a_row: Count = 1
    """Failures since the last progress, counted or not; the wait before the next attempt grows with them."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """What was seen: exit code by name, last log lines, Kubernetes' own words."""
    time: Time
    """When it was seen."""


class RLJobStatus(ApiModel):
    """Observed state of the job."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status speaks of."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field(default_factory=list)
    """Observations; Succeeded is the summary."""
    attempt: Count = 0
    """Attempts started, this one included."""
    restarts: Count = 0
    """Restarts after failures; those after preemptions, evictions and suspensions are not counted."""
    restarts_since_progress: Count = 0
    """The part of them that is compared with failurePolicy.maxRestarts (all without failurePolicy.resetAfterProgress)."""
    start_time: Time | None = None
    """When the first attempt began."""
    suspend_time: Time | None = None
    """When the suspension began that lasts now."""
    suspended_seconds: Count = 0
    """Length of earlier suspensions, not counted by deadlines.activeSeconds."""
    attempt_start_time: Time | None = None
    """When the attempt began."""
    attempt_end_time: Time | None = None
    """When the attempt ended; unset while it is under way."""
    finish_time: Time | None = None
    """When the job ended."""
    ray_cluster_name: Annotated[str, Field(max_length=63)] | None = None
    """RayCluster of the attempt."""
    step: Count = 0
    """Training steps done."""
    total_steps: Count = 0
    """Training steps wanted."""
    reward: Decimal | None = None
    """Mean reward of the last step's answers."""
    validation: ValidationResult | None = None
    """The last validation."""
    prompts: PromptCounts | None = None
    """Where the prompts of this run are."""
    rolled_back: RolledBack | None = None
    """Work that this attempt's resume undid; not a sum over the attempts."""
    in_flight_prompts: InFlightPrompts | None = None
    """The cap on prompts answered at the same time."""
    checkpoint_volume: Volume | None = None
    """Where this job's attempts write; it can't change afterwards."""
    checkpoint: CheckpointInfo | None = None
    """The newest complete checkpoint."""
    unloadable: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=8)] = Field(default_factory=list)
    """Checkpoints that attempts could not load; the next attempt passes them over."""
    resume: Resume | None = None
    """What the attempt started from."""
    last_step_time: Time | None = None
    """When the last step was committed."""
    last_failure: LastFailure | None = None
    """Evidence of the last failed attempt."""
