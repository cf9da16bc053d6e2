"""The driver's progress report: what `GET /progress` on the head answers and what `progress.json` holds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from .base import ApiModel, Count

Phase = Literal[
    "Starting",  # interpreter, Ray, actors
    "Loading",  # model, engine, checkpoint
    "Generating",  # waiting for answers
    "Training",
    "Saving",
    "Validating",
    "Finished",
    "Failed",
]

Word = Annotated[str, Field(max_length=253)]
_LONGEST_CAUSE = 64


class PromptCounts(ApiModel):
    """The ledger's partition: `handedOut` is the sum of the eight states (design: trained .. skipped)."""

    handed_out: Count = 0
    """Prompts pulled from the source and numbered."""
    trained: Count = 0
    """Prompts whose groups went into a committed step."""
    filtered: Count = 0
    """Prompts answered and rejected by the algorithm's own rule."""
    training: Count = 0
    """Prompts sampled for a step that is not committed."""
    buffered: Count = 0
    """Prompts with finished groups waiting to be trained."""
    in_flight: Count = 0
    """Prompts being answered."""
    pending: Count = 0
    """Prompts pulled, not dispatched."""
    retryable: Count = 0
    """Prompts that failed, timed out or became too old; they will be handed out again."""
    skipped: Count = 0
    """Prompts that will never be trained."""
    trained_twice: Count = 0
    """Prompts trained more than once on the lineage of the weights."""
    at_risk: Count = 0
    """Upper bound of prompts lost before a checkpoint without a ledger."""
    skipped_by: dict[str, Annotated[list[Count], Field(max_length=100)]] = Field(default_factory=dict, max_length=8)
    """Ordinals of skipped prompts by cause (the first 100 of each)."""

    @field_validator("skipped_by")
    @classmethod
    def _short_causes(cls, value: dict[str, list[int]]) -> dict[str, list[int]]:
        # Not as a type of the keys: the schema of a CustomResourceDefinition can't say it.
        if any(len(cause) > _LONGEST_CAUSE for cause in value):
            raise ValueError(f"a cause may have {_LONGEST_CAUSE} characters")
        return value

    def adds_up(self) -> bool:
        """Whether the partition holds."""
        return self.handed_out == (
            self.trained
            + self.filtered
            + self.training
            + self.buffered
            + self.in_flight
            + self.pending
            + self.retryable
            + self.skipped
        )


class RolledBack(ApiModel):
    """Work that a resume from an older checkpoint undid."""

    steps: Count = 0
    """Steps that no longer happened for the weights."""
    prompts: Count = 0
    """Prompts of those steps; they are handed out again and counted once."""


class InFlightPrompts(ApiModel):
    """The cap on prompts answered at the same time."""

    configured: Count = 0
    """What the spec says."""
    effective: Count = 0
    """What is used."""
    reason: Annotated[str, Field(max_length=256)] = ""
    """Why the two differ."""


class CheckpointInfo(ApiModel):
    """The newest complete checkpoint."""

    step: Count
    """Its step."""
    path: Annotated[str, Field(max_length=1024)]
    """Its directory, below the volume's subPath."""
    verified_time: Annotated[str, Field(max_length=64)] | None = None
    """When it was last verified."""


class Resume(ApiModel):
    """What this attempt started from."""

    from_step: Count
    """Step of the checkpoint; 0 means from scratch."""
    handed_out_before: Count = 0
    """Prompts that the saved run had handed out."""
    restored_groups: Count = 0
    """Finished groups taken over from the checkpoint."""
    rehanded: Count = 0
    """Prompts that are answered again."""


class OldestPrompt(ApiModel):
    """A prompt that has been answered for long: what a stall waits for."""

    ordinal: Count
    """Its position in the stream."""
    age_seconds: float
    """Seconds since it was dispatched, pauses of the engine left out."""
    tokens: Count = 0
    """Tokens generated so far, over all its answers."""
    answers: Count = 0
    """Answers that are complete."""
    attempt: Count = 0
    """Tries that failed before."""


class Handover(ApiModel):
    """A hand-over between generation and training that is under way."""

    phase: Annotated[str, Field(max_length=32)]
    """Its state: Draining, Train, Save, Waking."""
    seconds: float = 0.0
    """How long it has lasted."""
    absent_ranks: Annotated[list[Count], Field(max_length=64)] = Field(default_factory=list)
    """Ranks that have not arrived, where known."""


class Finished(ApiModel):
    """How the run ended."""

    reason: Literal["Completed", "TargetReached"]
    """Completed: all steps done. TargetReached: validation.stopAtReward reached."""
    message: Annotated[str, Field(max_length=1024)]
    """For people."""


class Failed(ApiModel):
    """How the driver failed, as far as it could still say."""

    exit_code: Annotated[int, Field(ge=1, le=255)]
    """Code that the driver is about to exit with."""
    message: Annotated[str, Field(max_length=2048)]
    """For people."""


class ProgressReport(ApiModel):
    """One report; `report_version` grows when a field changes its meaning."""

    report_version: Literal[1] = 1
    name: Word
    namespace: Word
    uid: Word
    attempt: Count
    phase: Phase
    updated_time: Word
    """RFC 3339, UTC."""
    last_step_time: Word | None = None
    """When the last step was committed; RFC 3339, UTC."""
    step: Count = 0
    total_steps: Count
    reward: float | None = None
    """Mean reward of the last step's answers."""
    validation_step: Count | None = None
    validation_reward: float | None = None
    elapsed_seconds: float = 0.0
    """Wall-clock seconds of training over all attempts."""
    consumed_samples: Count = 0
    """Answers trained over all attempts."""
    prompts: PromptCounts = PromptCounts()
    rolled_back: RolledBack = RolledBack()
    in_flight_prompts: InFlightPrompts = InFlightPrompts()
    collector_state: Annotated[str, Field(max_length=32)] = ""
    """The collector's state: Collecting, Throttled, Paused, ..."""
    oldest: Annotated[list[OldestPrompt], Field(max_length=8)] = Field(default_factory=list)
    """The prompts in flight for longest, oldest first."""
    handover: Handover | None = None
    """Set while ranks are on their way from generation to training or back."""
    dp_openai_server_base_urls: Annotated[
        list[Annotated[str, Field(max_length=256)]], Field(alias="dp_openai_server_base_urls", max_length=4096)
    ] = Field(default_factory=list)
    """Base URLs of the OpenAI-compatible server, one per data-parallel replica; empty without a server."""
    checkpoint: CheckpointInfo | None = None
    resume: Resume | None = None
    finished: Finished | None = None
    failed: Failed | None = None
