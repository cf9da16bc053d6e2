"""The collector's side of agents: prompts become rollouts, reports become finished groups. With the collector's lock held.

The process that plays them is `agent`'s business; this knows only what was taken and what was reported.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rljob_workload.algorithm.batch import Request
from rljob_workload.core.agents import AgentRollout, AgentRollouts, Purpose, RolloutOverError, VerdictError
from rljob_workload.core.groups import Group
from rljob_workload.core.source import Row
from rljob_workload.runtime.owner import Owner

log = logging.getLogger("rljob.collector")

#: First part of the tag of validation rollouts.
VALIDATION = -1


class PlayersOwner(Owner, Protocol):
    """The collector, as this module sees it."""

    @property
    def now(self) -> float: ...
    def lose(self, group: Group, why: str, *, counted: bool = True) -> None: ...


class Players:
    """Rollouts of a run, given to whoever asks for them."""

    def __init__(self, owner: PlayersOwner, replicas: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: a rollout's time, from when an agent takes it; `clock`: of validation, where the owner's stands still."""
        self._owner = owner
        self._rollouts = AgentRollouts(replicas)
        self._seconds = seconds
        self._clock = clock
        #: By row.
        self._validating: dict[int, AgentRollout] = {}
        self._validations = self._tries = 0
        self._reports = 0
        #: When the newest reward of each replica's rollouts was reported, by the clock.
        self._newest: dict[int, float] = defaultdict(float)
        self._epoch = 0
        #: Prompts that the agent had when it last ended by itself.
        self._suspects: set[tuple[int, int]] = set()
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

    def late(self, group: Group) -> str:
        """What of a group was not reported in time, for people."""
        reported, untaken = self._rollouts.standing((group.ordinal, group.attempt))
        late = self._rollouts.first_due((group.ordinal, group.attempt))
        held = f"; rollout {late.id} is not, {self._seconds:g} s after an agent took it" if late else ""
        return f"{reported} rollouts reported{f', {untaken} taken by no agent' if untaken else ''}{held}"

    @property
    def untaken(self) -> int:
        """Rollouts that no agent has taken."""
        return self._rollouts.waiting

    def newest(self, replica: int) -> float:
        """When the newest reward of this replica's rollouts was reported, by the clock; 0: none was."""
        return self._newest[replica]

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
    def epoch(self) -> int:
        """How often the agent has ended: what asked for rollouts before that is gone."""
        return self._epoch

    @property
    def reports(self) -> int:
        """Rollouts reported so far, with a reward."""
        return self._reports

    def hand_out(self, most: int) -> list[AgentRollout]:
        """Rollouts for an agent. Their time begins."""
        taken = self._rollouts.hand_out(most, lambda purpose: self._now(purpose) + self._seconds)
        self._set_deadlines(taken)
        return taken

    def seconds_left(self, rollout: AgentRollout) -> float:
        """Until a rollout must be reported, by the clock of its purpose."""
        return self._seconds if rollout.deadline is None else rollout.deadline - self._now(rollout.purpose)

    def _now(self, purpose: Purpose) -> float:
        return self._owner.now if purpose is Purpose.TRAIN else self._clock()

    def put_back(self, rollouts: Sequence[AgentRollout]) -> None:
        """The client that these were for is gone: they wait for the next one, and nothing has failed."""
        if back := self._rollouts.put_back(rollouts):
            log.info("%d rollouts were for a client that is gone: they are given to the next one", len(back))
            self._set_deadlines(back)
            self._owner.monitor.notify()

    def _set_deadlines(self, rollouts: Iterable[AgentRollout]) -> None:
        """Of the groups of these: agents have got or left some of their rollouts."""
        for tag in {rollout.tag for rollout in rollouts if rollout.purpose is Purpose.TRAIN}:
            first = self._rollouts.first_due(tag)
            self._owner.rollouts.set_deadline(tag, math.inf if first is None or first.deadline is None else first.deadline)

    def get(self, name: str) -> AgentRollout:
        """A rollout that is being played."""
        return self._rollouts.get(name)

    def report(self, name: str, reward: float, *, correct: bool | None) -> None:
        """The agent's verdict; with the last one of a group, the group is judged."""
        if self._rollouts.repeats(name, (reward, bool(correct))):
            return
        rollout = self._rollouts.get(name)
        if correct is None and rollout.purpose is Purpose.VALIDATE:
            raise VerdictError(f"correct: validation counts rollouts that are, and the result of {name} does not say")
        done = self._rollouts.report(name, reward, correct=bool(correct))
        self._reports += 1
        self._newest[rollout.replica or 0] = self._clock()
        if done is None:
            self._set_deadlines([rollout])
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

    def agent_ended(self, why: str, *, by_itself: bool) -> None:
        """The agent's process is gone, and with it what it had taken; who waits for rollouts is told that there are none.

        It may have had any number of prompts, of which at most one is to blame. So a prompt has failed only where the agent
        had it at its end before, too, and has ended `by_itself` both times; the others are played again at no cost.
        """
        self._epoch += 1
        taken = self._rollouts.taken()
        again = self._suspects
        if by_itself:
            self._suspects = {_prompt_of(rollout) for rollout in taken}
        for rollout in taken:
            self._fail(rollout, why, counted=by_itself and _prompt_of(rollout) in again)
        self._owner.monitor.notify()

    def _fail(self, rollout: AgentRollout, why: str, *, counted: bool = True) -> None:
        if rollout.purpose is Purpose.TRAIN:
            group = self._owner.rollouts.group_of(rollout.tag)
            if group is not None:  # else another of its rollouts has failed before
                self._owner.lose(group, f"rollout {rollout.id}: {why}", counted=counted)
                self._owner.settle()
            return
        log.warning("validation of row %d: %s; it %s", rollout.tag[1], why, "counts as wrong" if counted else "is played again")
        turn = self._rollouts.close(rollout, why)
        if counted:
            rollout.reward = 0.0
        else:
            self._open_validation(rollout.tag[1], rollout.tokens, rollout.expected)
        if turn is not None:
            self._owner.desk.cancel(turn, RolloutOverError(f"rollout {rollout.id} was given up: {why}"))

    # ---- validation -------------------------------------------------------------------------

    def open_validation(self, rows: Sequence[tuple[int, Row]]) -> None:
        """One greedy rollout for each (index, row)."""
        self._validations += 1
        self._validating = {}
        for index, row in rows:
            self._open_validation(index, row.tokens, row.expected)

    def _open_validation(self, index: int, tokens: tuple[int, ...], expected: str) -> None:
        self._tries += 1
        name = f"v{self._validations}.{index}.{self._tries}"
        self._validating[index] = self._rollouts.open_validation(name, (VALIDATION, index), tokens, expected)

    def missing_verdicts(self) -> int:
        """Validation rollouts that are neither reported nor given up."""
        return sum(not rollout.reported for rollout in self._validating.values())

    def untaken_verdicts(self) -> int:
        """Of these, the rollouts that no agent has taken."""
        return sum(rollout.replica is None for rollout in self._validating.values())

    def right(self) -> int:
        """Validation rollouts that were reported as correct."""
        return sum(rollout.correct for rollout in self._validating.values())

    def end(self) -> None:
        """The run is over: agents that ask are told so."""
        self._over = True


def _prompt_of(rollout: AgentRollout) -> tuple[int, int]:
    """The same for every try at a prompt, or at a row of validation."""
    return (rollout.tag[0], 0) if rollout.purpose is Purpose.TRAIN else rollout.tag
