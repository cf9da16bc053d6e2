"""What the stages of `decide` share: the part of the spec that may change while an attempt runs, and what a stage answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_api.spec import Deadlines, FailurePolicy, RLJobSpec

from .plan import Action

WAIT_SECONDS = 15.0
"""How often something outside (a claim, KubeRay, a namesake) is looked for again."""

PENDING_SECONDS = 5.0
"""How often an attempt is looked at while its pods start."""


@dataclass(frozen=True)
class Terms:
    """The parts of the spec that may change while an attempt runs."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    max_skipped: int = 0
    ttl: int | None = None

    @classmethod
    def of(cls, spec: RLJobSpec | None) -> Terms:
        """The terms of a spec; the defaults where none can be read."""
        if spec is None:
            return cls()
        return cls(spec.deadlines, spec.failure_policy, spec.prompts.max_skipped, spec.ttl_seconds_after_finished)


def waits_for_next_attempt(began: RLJobSpec, wanted: RLJobSpec) -> bool:
    """Whether an edit has changed more than what reaches an attempt that began with `began`."""
    reaching = {
        "deadlines": wanted.deadlines,
        "failure_policy": wanted.failure_policy,
        "prompts": began.prompts.model_copy(update={"max_skipped": wanted.prompts.max_skipped}),
        "suspend": wanted.suspend,
        "ttl_seconds_after_finished": wanted.ttl_seconds_after_finished,
    }
    return began.model_copy(update=reaching).to_wire() != wanted.to_wire()


@dataclass(frozen=True)
class Step:
    """What a stage answers: actions and when to look again."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
