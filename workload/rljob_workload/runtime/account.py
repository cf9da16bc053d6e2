"""What the collector says of itself, with its lock held: its state, its counters, the prompts in flight for longest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rljob_api.spec import RLJobSpec
from rljob_workload.core.collecting import CollectorMachine
from rljob_workload.core.groups import Group
from rljob_workload.core.rollouts import Rollouts
from rljob_workload.runtime.players import Players
from rljob_workload.runtime.pumps import Pumps
from rljob_workload.runtime.rollouts_of import cap_of
from rljob_workload.runtime.stretch import ActiveClock

#: Prompts that a report names.
OLDEST = 8
#: Moves of the state that a status names.
MOVES = 8


class Account:
    """Told from what the collector works with; changes nothing."""

    def __init__(
        self,
        spec: RLJobSpec,
        rollouts: Rollouts,
        players: Players | None,
        pumps: Pumps,
        machine: CollectorMachine,
        clock: ActiveClock,
    ) -> None:
        """`clock`: of the answers' deadlines."""
        self._spec = spec
        self._rollouts = rollouts
        self._players = players
        self._pumps = pumps
        self._machine = machine
        self._clock = clock

    def counters(self) -> dict[str, Any]:
        """The ledger's counters, and the skipped ordinals by cause."""
        ledger = self._rollouts.ledger
        return {"counts": asdict(ledger.counts()), "skipped_names": ledger.skipped_names()}

    def status(self) -> dict[str, Any]:
        """State, counters, and what is waited for longest."""
        moves = self._machine.log[-MOVES:]
        return {
            "state": self._machine.state,
            "oldest_in_flight": self._oldest(),
            "cap": asdict(cap_of(self._spec)),
            "log": [f"{move.before} {move.seconds:.3f} s -> {move.after}: {move.why}" for move in moves],
            **self.counters(),
        }

    def waiting_for(self, version: int) -> str:
        """In words, what keeps the next step of this version from having its groups."""
        missing, size = self._rollouts.missing(version), self._spec.algorithm.grpo.generations_per_prompt
        slices = ", ".join(f"replica {replica} for {seconds:.0f} s" for replica, seconds in self._pumps.slices.items())
        return (
            f"the collector is {self._machine.state}, {missing} groups are missing; decoding: {slices or 'nobody'}; in "
            f"flight longest: {named(self._oldest()[:3], size)}{self._untaken()}"
        )

    def _oldest(self) -> list[dict[str, Any]]:
        return oldest_in_flight(self._rollouts, self._players, self._clock.now())

    def _untaken(self) -> str:
        untaken = self._players.untaken if self._players else 0
        return f"; {untaken} rollouts are taken by no agent" if untaken else ""


def oldest_in_flight(rollouts: Rollouts, players: Players | None, now: float) -> list[dict[str, Any]]:
    """The prompts in flight for longest, oldest first. Tokens: of complete answers; what runs only its rank knows.

    `now`: seconds of the clock of the answers' deadlines.
    """
    return [_described(group, rollouts, players, now - group.begun) for group in rollouts.oldest_in_flight(OLDEST)]


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
