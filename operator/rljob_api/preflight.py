"""What a preflight found on the checkpoint volume, before any GPU pod exists: its termination message, and the driver's order.

Whoever starts an attempt asks once (the operator's preflight pod, or the driver itself under `rljob local`): the volume is
looked at, a checkpoint chosen on the lineage, the next fencing token taken. The trainer then loads exactly what was chosen.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import ApiModel, Count

#: A container's termination message may have 4096 bytes; more is cut by the kubelet and would be no JSON any more.
MAX_BYTES = 4096

Outcome = Literal[
    "Fresh",  # nothing to go on from: step 0
    "Resume",  # `checkpoint` is to be loaded
    "OnExisting",  # somebody's run is there and checkpoint.onExisting is Refuse
    "Foreign",  # the directory belongs to a job of another name
    "Incompatible",  # the newest valid checkpoint does not fit the spec; `differs` says in what
    "Corrupt",  # there are checkpoints and none is valid; starting from scratch would forget the run
    "Unusable",  # the volume cannot be read or written
]


class PassedOver(ApiModel):
    """A checkpoint that was not chosen."""

    name: Annotated[str, Field(max_length=128)]
    """Its directory."""
    why: Annotated[str, Field(max_length=512)]
    """Names the file and the field."""


class Chosen(ApiModel):
    """The checkpoint to load."""

    path: Annotated[str, Field(max_length=1024)]
    """Its directory, below the root of its volume; of another job's run with `checkpoint.from`."""
    step: Count
    """Its step."""
    token: Count
    """The token that wrote it."""
    verified: Literal["Sizes", "Full"]
    """How it was verified."""
    ledger: bool = True
    """False: written without a prompt ledger; `atRisk` bounds what may have been lost before it."""
    handed_out: Count = 0
    """Prompts that the saved run had handed out."""
    at_risk: Count = 0
    """Prompts that may have been lost before it; 0 with a ledger."""
    source: bool = False
    """`path` is below the root of the claim of `checkpoint.from`, not of the job's own."""
    reshard: bool = False
    """It was written in another parallel layout and will be resharded on loading."""


class PreflightReport(ApiModel):
    """One preflight's result; as JSON at most `MAX_BYTES` long."""

    report_version: Literal[1] = 1
    outcome: Outcome
    token: Count = 0
    """The fencing token taken for this attempt; 0 where none was taken. The same attempt is given the same token again."""
    checkpoint: Chosen | None = None
    """With outcome Resume; with Incompatible the one that does not fit."""
    passed_over: Annotated[list[PassedOver], Field(max_length=8)] = Field(default_factory=list)
    """Newest first."""
    differs: Annotated[list[str], Field(max_length=16)] = Field(default_factory=list)
    """With outcome Incompatible: `spec.path: checkpoint has X, spec says Y; what would do`."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """For people."""

    @property
    def may_start(self) -> bool:
        """Whether pods that cost something may be made."""
        return self.outcome in ("Fresh", "Resume")
