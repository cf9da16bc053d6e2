"""The status that a pass is about to write: starts as the old one, ends as a merge patch, or as nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rljob_api import reasons
from rljob_api.reasons import ConditionType, Event, Reason
from rljob_api.status import Condition, RLJobStatus

from .plan import EventNote
from .times import format_time
from .world import World

_ORDER = tuple(ConditionType)
# A status stays under 32 kB whatever people's and machines' words it quotes: eleven conditions, the last failure, and the
# ordinals of skipped prompts (at most 8 causes of 100) are what can grow.
_MESSAGE_BYTES = 1200
LAST_FAILURE_BYTES = 3500

# What a running driver or other people's words move all the time; its writes are spaced, the others are written at once.
_PACED = frozenset({"step", "reward", "validation", "prompts", "rolledBack", "inFlightPrompts", "checkpoint", "lastStepTime"})
_PACED_MESSAGES = frozenset(ConditionType) - {ConditionType.VALIDATED}


class Draft:
    """Collects fields, conditions and events of one pass."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._fields: dict[str, Any] = {"observed_generation": world.job.generation}
        self._before = {condition.type: condition for condition in world.job.status.conditions}
        self._conditions = dict(self._before)
        self.events: list[EventNote] = []

    def update(self, **fields: Any) -> None:
        """Set fields of the status by their Python names."""
        self._fields.update(fields)

    def set(self, reason: Reason, /, **values: object) -> None:
        """Set a condition; its transition time moves only when its status does, whatever else this pass has set it to."""
        before = self._before.get(reason.condition)
        turned = before is None or before.status != reason.status
        self._conditions[reason.condition] = Condition.model_validate(
            {
                "type": reason.condition.value,
                "status": reason.status,
                "observed_generation": self._world.job.generation,
                "last_transition_time": format_time(self._world.now)
                if before is None or turned
                else before.last_transition_time,
                "reason": reason.name,
                "message": clip(reason.message(**values), _MESSAGE_BYTES),
            }
        )

    def reason_of(self, type_: ConditionType) -> str | None:
        """A condition's reason as it stood before this pass: for events on a change only, never for decisions."""
        return next((one.reason for one in self._world.job.status.conditions if one.type == type_), None)

    def reason_so_far(self, type_: ConditionType) -> str:
        """A condition's reason as this pass has it so far; empty where it was never set."""
        found = self._conditions.get(type_)
        return "" if found is None else found.reason

    def event(self, what: Event | Reason, message: str) -> None:
        """Add an event: one of its own, or a condition's turn."""
        type_, name = reasons.event_of(what)
        self.events.append(EventNote(type_, name, clip(message, 1024)))

    def build(self) -> RLJobStatus:
        """The new status. Conditions that nobody ever set get their first value."""
        for reason, values in _FIRST:
            if reason.condition not in self._conditions:
                self.set(reason, **values)
        conditions = [self._conditions[type_] for type_ in _ORDER if type_ in self._conditions]
        return self._world.job.status.model_copy(update={**self._fields, "conditions": conditions})

    def patch(self) -> tuple[dict[str, Any] | None, float | None]:
        """The merge patch to write now, or None; and in how many seconds a change that was held back is due."""
        new = self.build().to_wire()
        patch = merge_patch(self._world.job.raw_status, new)
        if not patch:
            return None, None
        world = self._world
        if world.written is None or world.job.status.finish_time is not None or is_urgent(world.job.raw_status, new):
            return patch, None
        if world.report is not None and world.report.finished is not None:
            return patch, None
        age = (world.now - world.written).total_seconds()  # negative after the clock was set back: as good as expired
        return (None, world.status_seconds - age) if 0 <= age < world.status_seconds else (patch, None)


_FIRST: tuple[tuple[Reason, dict[str, object]], ...] = (
    (reasons.CLUSTER_NOT_CREATED, {}),
    (reasons.DRIVER_NOT_SUBMITTED, {}),
    (reasons.NOT_STARTED, {}),
    (reasons.NOT_CHECKED, {}),
    (reasons.SKIPPED_NOT_REPORTED, {}),
    (reasons.NOT_SUSPENDED, {}),
    (reasons.NOT_RESTARTING, {}),
    (reasons.STATE_PENDING, {"detail": "not started"}),
)


def clip(text: str, limit: int) -> str:
    """The text, cut in its middle when it would take more than `limit` bytes of JSON: both ends say most."""
    if _size(text) <= limit:
        return text
    low, high = 0, len(text) // 2
    while low < high:  # the longest ends that fit
        half = (low + high + 1) // 2
        low, high = (half, high) if _size(text[:half] + text[-half:]) + 5 <= limit else (low, half - 1)
    return f"{text[:low]} ... {text[-low:] if low else ''}"


def _size(text: str) -> int:
    """Bytes in JSON as the API server writes it: UTF-8, with <, > and & escaped."""
    return len(json.dumps(text, ensure_ascii=False).encode(errors="replace")) - 2 + 5 * sum(map(text.count, "<>&"))


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that turns `old` into `new`; empty when they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch


def is_urgent(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether more than moving numbers has changed."""
    return _skeleton(old) != _skeleton(new)


def _skeleton(status: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in status.items() if key not in _PACED and key != "conditions"}
    out["conditions"] = [
        (one["type"], one["status"], one["reason"], "" if one["type"] in _PACED_MESSAGES else one.get("message", ""))
        for one in status.get("conditions") or []
    ]
    return out
