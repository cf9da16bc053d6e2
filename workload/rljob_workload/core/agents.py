"""Rollouts that agents play: which wait for an agent, which one has, and what they reported.

A prompt that is dispatched becomes as many rollouts as its group has answers. An agent takes rollouts, talks to the model
under each one's own address, and reports a reward. The group is judged when all of its rollouts are reported; it fails as a
whole when one of them does, or is not reported in time. A rollout's time begins when it is taken: one that waits for an agent
waits for as long as agents are busy. Validation rollouts are the same, but greedy, and belong to no group. No I/O and no
lock here: the collector's guards it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.core.trajectory import Trajectory

#: Rollouts that are over and whose end is remembered, for agents that ask for them again.
REMEMBERED = 4096


class RolloutError(Exception):
    """What was asked of a rollout can't be done; the message says why."""


class RolloutUnknownError(RolloutError):
    """There never was such a rollout, as far as is remembered."""


class RolloutOverError(RolloutError):
    """The rollout is over; the message says why."""


class RolloutBusyError(RolloutError):
    """A rollout takes one turn at a time, and ends between two of them."""


class VerdictError(RolloutError):
    """A verdict that lacks what its rollout is for."""


#: What an agent said of a rollout: reward and correctness, or why there are none.
Verdict = tuple[float, bool] | str


class Purpose(StrEnum):
    """What a rollout is for."""

    TRAIN = "train"
    VALIDATE = "validate"


@dataclass(slots=True, eq=False)
class AgentRollout:
    """One try at one prompt by one agent."""

    id: str
    purpose: Purpose
    #: Of the group; of validation, (-1, index of the row).
    tag: tuple[int, int]
    tokens: tuple[int, ...]
    expected: str
    #: Where it stands among those of its purpose that wait: the oldest prompt first, which a step may wait for.
    place: tuple[int, int]
    #: The replica that answers all of its turns; set when an agent takes it.
    replica: int | None = None
    #: When it must be reported, by the clock that its owner keeps for its purpose; None: no agent has it.
    deadline: float | None = None
    trajectory: Trajectory = field(default_factory=Trajectory)
    #: The desk's number of the turn that is being generated.
    turn: int | None = None
    reward: float | None = None
    correct: bool = False

    @property
    def reported(self) -> bool:
        """Whether the agent is done with it."""
        return self.reward is not None

    @property
    def untouched(self) -> bool:
        """Whether nothing was asked and nothing said of it."""
        return self.turn is None and not self.trajectory.turns and not self.reported


@dataclass(frozen=True, slots=True)
class Reported:
    """A group whose rollouts are all reported."""

    answers: tuple[Answer, ...]
    scores: tuple[tuple[float, bool], ...]


class AgentRollouts:
    """All rollouts that are not over."""

    def __init__(self, replicas: int) -> None:
        self._open: dict[str, AgentRollout] = {}
        self._groups: dict[tuple[int, int], list[AgentRollout]] = {}
        #: The trainer stands still while it validates, so validation comes first.
        self._waiting: dict[Purpose, list[tuple[tuple[int, int], AgentRollout]]] = {Purpose.VALIDATE: [], Purpose.TRAIN: []}
        self._count = 0
        self._load = [0] * replicas
        self._ended: dict[str, str] = {}
        #: Of those that an agent ended, what it said; of those that were given up, nothing.
        self._verdicts: dict[str, Verdict] = {}

    # ---- begin ------------------------------------------------------------------------------

    def open_group(self, request: Request, expected: str) -> None:
        """A prompt was dispatched: agents may take its rollouts."""
        ordinal, attempt = request.tag
        self._groups[request.tag] = [
            self._add(f"{ordinal}.{attempt}.{index}", Purpose.TRAIN, request.tag, request.tokens, expected)
            for index in range(request.answers)
        ]

    def open_validation(self, name: str, tag: tuple[int, int], tokens: tuple[int, ...], expected: str) -> AgentRollout:
        """One greedy rollout."""
        return self._add(name, Purpose.VALIDATE, tag, tokens, expected)

    def _add(self, name: str, purpose: Purpose, tag: tuple[int, int], tokens: tuple[int, ...], expected: str) -> AgentRollout:
        self._count += 1
        rollout = AgentRollout(name, purpose, tag, tokens, expected, (tag[0], self._count))
        self._open[name] = rollout
        self._wait(rollout)
        return rollout

    def _wait(self, rollout: AgentRollout) -> None:
        heapq.heappush(self._waiting[rollout.purpose], (rollout.place, rollout))

    # ---- play -------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Rollouts that are not over."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Rollouts that no agent has taken."""
        return sum(rollout.replica is None for rollout in self._open.values())

    def hand_out(self, most: int, deadline: Callable[[Purpose], float] = lambda _: math.inf) -> list[AgentRollout]:
        """Rollouts for an agent, the oldest prompt's first. `deadline`: of a rollout whose time begins now."""
        taken: list[AgentRollout] = []
        while len(taken) < most and (queue := next(filter(None, self._waiting.values()), None)):
            _, rollout = heapq.heappop(queue)
            if rollout.id not in self._open:
                continue  # its group was given up
            rollout.replica = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[rollout.replica] += 1
            rollout.deadline = deadline(rollout.purpose)
            taken.append(rollout)
        return taken

    def put_back(self, rollouts: Iterable[AgentRollout]) -> list[AgentRollout]:
        """Whoever these were handed out to never got them: they wait again, as before. Returns those that were still theirs."""
        back = [one for one in rollouts if self._open.get(one.id) is one and one.replica is not None and one.untouched]
        for rollout in back:
            assert rollout.replica is not None
            self._load[rollout.replica] -= 1
            rollout.replica = rollout.deadline = None
            self._wait(rollout)
        return back

    def get(self, name: str) -> AgentRollout:
        """A rollout that an agent plays. Raises RolloutUnknownError or RolloutOverError."""
        rollout = self._open.get(name)
        if rollout is not None and rollout.replica is not None and not rollout.reported:
            return rollout
        if rollout is not None and rollout.reported:
            raise RolloutOverError(f"rollout {name} is over: it was reported with reward {rollout.reward:g}")
        if name in self._ended:
            raise RolloutOverError(f"rollout {name} is over: {self._ended[name]}")
        raise RolloutUnknownError(f"there is no rollout {name}; GET /v1/rollouts/next gives one")

    def repeats(self, name: str, verdict: Verdict) -> bool:
        """Whether this very verdict was accepted and still holds: its answer may have been lost on its way."""
        rollout = self._open.get(name)
        if rollout is not None:
            return rollout.reported and verdict == (rollout.reward, rollout.correct)
        return self._verdicts.get(name) == verdict

    def accept_error(self, name: str, why: str) -> None:
        """A rollout is over because its agent said so."""
        if name in self._ended:
            self._verdicts[name] = why

    def report(self, name: str, reward: float, *, correct: bool) -> Reported | None:
        """The agent's verdict on its rollout; a value when that completes a group.

        Raises RolloutUnknownError, RolloutOverError, RolloutBusyError.
        """
        rollout = self.get(name)
        if rollout.turn is not None:
            raise RolloutBusyError(f"rollout {name}: a turn is being generated; report when its answer is there")
        if not rollout.trajectory.turns:
            raise RolloutBusyError(
                f"rollout {name}: nothing was generated; take a turn, or report an error instead of a reward"
            )
        rollout.reward, rollout.correct = reward, correct
        if rollout.purpose is Purpose.VALIDATE:
            self._end(rollout, f"it was reported with reward {reward:g}", (reward, correct))
            return None
        group = self._groups[rollout.tag]
        if not all(other.reported for other in group):
            return None
        for other in self._groups.pop(rollout.tag):
            self._end(other, f"it was reported with reward {other.reward:g}", (other.reward or 0.0, other.correct))
        answers = tuple(other.trajectory.as_answer(other.tag) for other in group)
        return Reported(answers, tuple((other.reward or 0.0, other.correct) for other in group))

    # ---- end --------------------------------------------------------------------------------

    def close_group(self, tag: tuple[int, int], why: str) -> list[int]:
        """All rollouts of a group are over. Returns the desk's numbers of their turns under way."""
        return [turn for rollout in self._groups.pop(tag, []) if (turn := self._end(rollout, why)) is not None]

    def close(self, rollout: AgentRollout, why: str) -> int | None:
        """A validation rollout is over, unreported. Returns the number of its turn under way."""
        return self._end(rollout, why)

    def overdue(self, now: float) -> list[AgentRollout]:
        """Validation rollouts that were not reported in time."""
        return [one for one in self._validating() if one.deadline is not None and one.deadline < now]

    def standing(self, tag: tuple[int, int]) -> tuple[int, int]:
        """Rollouts of a group that are reported, and those that no agent has taken."""
        group = self._groups.get(tag, ())
        return sum(rollout.reported for rollout in group), sum(rollout.replica is None for rollout in group)

    def first_deadline(self) -> float | None:
        """Of the validation rollouts that agents have."""
        return min((one.deadline for one in self._validating() if one.deadline is not None), default=None)

    def _validating(self) -> Iterable[AgentRollout]:
        return (one for one in self._open.values() if one.purpose is Purpose.VALIDATE)

    def first_due(self, tag: tuple[int, int]) -> AgentRollout | None:
        """Of a group's rollouts that agents have, the one that must be reported first."""
        has = [one for one in self._groups.get(tag, ()) if one.deadline is not None and not one.reported]
        return min(has, key=lambda one: one.deadline or 0.0, default=None)

    def taken(self) -> list[AgentRollout]:
        """Rollouts that an agent has and has not reported."""
        return [one for one in self._open.values() if one.replica is not None and not one.reported]

    def _end(self, rollout: AgentRollout, why: str, verdict: Verdict | None = None) -> int | None:
        if self._open.pop(rollout.id, None) is None:
            return None
        if rollout.replica is not None:
            self._load[rollout.replica] -= 1
        self._ended[rollout.id] = why
        if verdict is not None:
            self._verdicts[rollout.id] = verdict
        if len(self._ended) > REMEMBERED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._verdicts.pop(oldest, None)
        return rollout.turn
