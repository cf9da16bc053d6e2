"""What the collector says of the prompts that are in flight for longest."""

from __future__ import annotations

from typing import Any

from rljob_workload.core.groups import Group
from rljob_workload.core.rollouts import Rollouts
from rljob_workload.runtime.players import Players

#: Prompts that a report names.
OLDEST = 8


def oldest_in_flight(rollouts: Rollouts, players: Players | None, now: float, timeout: float) -> list[dict[str, Any]]:
    """The prompts in flight for longest, oldest first. Tokens: of complete answers; what runs only its rank knows.

    `now`: seconds of the clock of the answers' deadlines; `timeout`: what they have of it.
    """
    return [
        _described(group, rollouts, players, now - (group.deadline - timeout)) for group in rollouts.oldest_in_flight(OLDEST)
    ]


def _described(group: Group, rollouts: Rollouts, players: Players | None, age: float) -> dict[str, Any]:
    return {
        "ordinal": group.ordinal,
        "age_seconds": round(max(0.0, age), 3),
        "tokens": sum(len(answer.tokens) for answer in group.answers),
        "answers": len(group.answers) if players is None else players.reported(group),
        "attempt": rollouts.ledger.failures_of(group.ordinal),
        "tag": [group.ordinal, group.attempt],
    }


def named(oldest: list[dict[str, Any]], size: int) -> str:
    """The same in words. `size`: answers of a group."""
    said = (
        f"prompt {one['ordinal']} ({one['answers']} of {size} answers after {one['age_seconds']:.0f} s, "
        f"{one['attempt']} failures before)"
        for one in oldest
    )
    return "; ".join(said) or "none"
