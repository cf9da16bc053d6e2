"""The collector's states and the moves between them: one table, and a log of what was done.

::

    Starting ─▶ Collecting ◀─▶ Throttled ◀─▶ Exhausted     prompts out, answers in
                    └────────────┴──────┬───────┘
                                    Draining               no new slice; the running ones end
                                        │  └─▶ (back, when what was there turned out to be too old)
                                     Paused ◀─▶ Saving     the engines belong to training, or to a checkpoint
                                        └───────┼─▶ Collecting
                                                └─▶ Validating ─▶ Draining     agents play greedy rollouts
    any ─▶ Failed

What may be done follows from the state alone: a prompt is pulled in the first three only, and a snapshot is taken in
Paused and Saving only. There is no flag beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

#: Transitions that are remembered.
LOG_LENGTH = 64


class CollectorState(StrEnum):
    """What the collector is doing."""

    STARTING = "Starting"
    #: Prompts are answered.
    COLLECTING = "Collecting"
    #: Nothing may be handed out and nothing is being generated: the environment or the next step is waited for.
    THROTTLED = "Throttled"
    #: The run's last prompts are out; what is missing are their answers.
    EXHAUSTED = "Exhausted"
    #: A step is about to be taken: no new slice is begun, those that run end.
    DRAINING = "Draining"
    PAUSED = "Paused"
    SAVING = "Saving"
    #: Between two steps agents play validation rollouts: slices run, no prompt is pulled.
    VALIDATING = "Validating"
    FAILED = "Failed"


_S = CollectorState

#: States in which prompts are pulled and decode slices begun.
OPEN = frozenset({_S.COLLECTING, _S.THROTTLED, _S.EXHAUSTED})
#: States in which decode slices are begun; in the last of them only for requests over HTTP.
SERVING = OPEN | {_S.VALIDATING}
#: States between two steps: no slice runs, and a snapshot may be taken.
STILL = frozenset({_S.PAUSED, _S.SAVING})

TRANSITIONS: dict[CollectorState, frozenset[CollectorState]] = {
    _S.STARTING: frozenset({_S.COLLECTING, _S.FAILED}),
    _S.COLLECTING: frozenset({_S.THROTTLED, _S.EXHAUSTED, _S.DRAINING, _S.FAILED}),
    _S.THROTTLED: frozenset({_S.COLLECTING, _S.EXHAUSTED, _S.DRAINING, _S.FAILED}),
    _S.EXHAUSTED: frozenset({_S.COLLECTING, _S.THROTTLED, _S.DRAINING, _S.FAILED}),
    _S.DRAINING: frozenset({_S.PAUSED, _S.COLLECTING, _S.FAILED}),
    _S.PAUSED: frozenset({_S.SAVING, _S.VALIDATING, _S.COLLECTING, _S.FAILED}),
    _S.SAVING: frozenset({_S.VALIDATING, _S.COLLECTING, _S.FAILED}),
    _S.VALIDATING: frozenset({_S.DRAINING, _S.FAILED}),
    _S.FAILED: frozenset(),
}


class TransitionError(Exception):
    """A move that the table does not have: a mistake in the collector, or calls in a wrong order."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One move, with the seconds that the state before had lasted."""

    before: CollectorState
    after: CollectorState
    seconds: float
    why: str


class CollectorMachine:
    """The state, moved by `enter` alone. `changed` is called after every move; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float], changed: Callable[[Transition], None] = lambda move: None) -> None:
        self._state = CollectorState.STARTING
        self._clock = clock
        self._changed = changed
        self._since = clock()
        self._log: deque[Transition] = deque(maxlen=LOG_LENGTH)
        self._spent: dict[CollectorState, float] = dict.fromkeys(CollectorState, 0.0)

    @property
    def state(self) -> CollectorState:
        """The state of this moment."""
        return self._state

    @property
    def log(self) -> list[Transition]:
        """The newest transitions, oldest first."""
        return list(self._log)

    def seconds(self, state: CollectorState) -> float:
        """Seconds spent in a state so far, the present stay included."""
        return self._spent[state] + (self._clock() - self._since if state is self._state else 0.0)

    def enter(self, state: CollectorState, why: str) -> None:
        """Move. Staying where one is is no move; what the table does not have raises TransitionError."""
        if state is self._state:
            return
        if state not in TRANSITIONS[self._state]:
            raise TransitionError(f"the collector cannot go from {self._state} to {state} ({why})")
        now = self._clock()
        move = Transition(self._state, state, now - self._since, why)
        self._spent[self._state] += move.seconds
        self._state, self._since = state, now
        self._log.append(move)
        self._changed(move)
