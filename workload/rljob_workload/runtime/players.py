"""The collector's side of agents: prompts become rollouts, reports become finished groups. With the collector's lock held.

The process that plays them is `agent`'s business; this knows only what was taken and what was reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rljob_workload.algorithm.batch import Request
from rljob_workload.core.agents import AgentRollout, AgentRollouts, Purpose, RolloutOverError
from rljob_workload.core.groups import Group
from rljob_workload.core.source import Row
from rljob_workload.runtime.owner import Owner

log = logging.getLogger("rljob.collector")

#: First part of the tag of validation rollouts.
VALIDATION = -1


class PlayersOwner(Owner, Protocol):
    """The collector, as this module sees it."""

    def lose(self, group: Group, why: str) -> None: ...


class Players:
    """Rollouts of a run, given to whoever asks for them."""

    def __init__(self, owner: PlayersOwner, replicas: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: a validation rollout's time, from when an agent takes it."""
        self._owner = owner
        self._rollouts = AgentRollouts(replicas)
        self._seconds = seconds
        self._clock = clock
        self._validating: dict[str, AgentRollout] = {}
        self._validations = 0
        self._reports = 0
        #: When the newest reward was reported, by the clock.
        self.newest = 0.0
        self._over = False

    # ---- what the pumps ask -----------------------------------------------------------------

    def open(self, requests: Sequence[Request]) -> None:
        """Prompts were dispatched."""
        for request in requests:
            self._rollouts.open_group(request, self._owner.rollouts.expected(request.tag[0]))
        if requests:
            self._owner.monitor.notify()  # agents may wait for them

    def close(self, group: Group, why: str) -> None:
        """A group is given up: so are its rollouts and their turns under way."""
        for turn in self._rollouts.close_group((group.ordinal, group.attempt), why):
            self._owner.desk.cancel(turn, RolloutOverError(f"prompt {group.ordinal} was given up: {why}"))

    def reported(self, group: Group) -> int:
        """Rollouts of a group that are reported."""
        return self._rollouts.standing((group.ordinal, group.attempt))[0]

    def standing(self, group: Group) -> str:
        """How far agents are with a group, for people."""
        reported, untaken = self._rollouts.standing((group.ordinal, group.attempt))
        return f"{reported} rollouts reported" + (f", {untaken} taken by no agent" if untaken else "")

    def thinking(self, replica: int) -> bool:
        """Whether an agent has a rollout of this replica and no turn under way, or just got its answer: it may ask soon."""
        desk = self._owner.desk
        return any(one.replica == replica and not desk.holds(one.turn) for one in self._rollouts.taken())

    def until_deadline(self) -> float | None:
        """Seconds until a validation rollout is overdue; None without any."""
        first = self._rollouts.first_deadline()
        return None if first is None else first - self._clock()

    def give_up_overdue(self) -> None:
        """Validation rollouts that took too long count as wrong."""
        for rollout in self._rollouts.overdue(self._clock()):
            self._fail(rollout, f"not reported within {self._seconds:g} s (generation.answerTimeoutSeconds)")

    # ---- what the front asks ----------------------------------------------------------------

    @property
    def over(self) -> bool:
        """No rollout will come any more."""
        return self._over

    @property
    def reports(self) -> int:
        """Rollouts reported so far, with a reward."""
        return self._reports

    def hand_out(self, most: int) -> list[AgentRollout]:
        """Rollouts for an agent."""
        return self._rollouts.hand_out(most, self._clock() + self._seconds)

    def get(self, name: str) -> AgentRollout:
        """A rollout that is being played."""
        return self._rollouts.get(name)

    def report(self, name: str, reward: float, *, correct: bool) -> None:
        """The agent's verdict; with the last one of a group, the group is judged."""
        if self._rollouts.repeats(name, (reward, correct)):
            return
        rollout = self._rollouts.get(name)
        done = self._rollouts.report(name, reward, correct=correct)
        self._reports += 1
        self.newest = self._clock()
        if done is None:
            if rollout.purpose is Purpose.VALIDATE and not self.missing_verdicts():
                self._owner.monitor.notify()
            return
        self._owner.monitor.notify()
        for group in self._owner.rollouts.arrive(done.answers):
            self._owner.rollouts.scored(group, done.scores)
        log.debug("prompt %d is played", rollout.tag[0])
        self._owner.settle()

    def give_up(self, name: str, why: str) -> None:
        """The agent cannot end it: its group has failed, or its validation prompt."""
        if not self._rollouts.repeats(name, why):
            self._fail(self._rollouts.get(name), why)
            self._rollouts.accept_error(name, why)

    def agent_ended(self, why: str) -> None:
        """The agent's process is gone, and with it what it had taken."""
        for rollout in self._rollouts.taken():
            self._fail(rollout, why)

    def _fail(self, rollout: AgentRollout, why: str) -> None:
        if rollout.purpose is Purpose.TRAIN:
            group = self._owner.rollouts.group_of(rollout.tag)
            if group is not None:  # else another of its rollouts has failed before
                self._owner.lose(group, f"rollout {rollout.id}: {why}")
                self._owner.settle()
            return
        log.warning("validation of row %d: %s; it counts as wrong", rollout.tag[1], why)
        turn = self._rollouts.close(rollout, why)
        rollout.reward = 0.0
        if turn is not None:
            self._owner.desk.cancel(turn, RolloutOverError(f"rollout {rollout.id} was given up: {why}"))

    # ---- validation -------------------------------------------------------------------------

    def open_validation(self, rows: Sequence[tuple[int, Row]]) -> None:
        """One greedy rollout for each (index, row)."""
        self._validations += 1
        self._validating = {}
        for index, row in rows:
            name = f"v{self._validations}.{index}"
            self._validating[name] = self._rollouts.open_validation(name, (VALIDATION, index), row.tokens, row.expected)

    def missing_verdicts(self) -> int:
        """Validation rollouts that are neither reported nor given up."""
        return sum(not rollout.reported for rollout in self._validating.values())

    def right(self) -> int:
        """Validation rollouts that were reported as correct."""
        return sum(rollout.correct for rollout in self._validating.values())

    def end(self) -> None:
        """The run is over: agents that ask are told so."""
        self._over = True
