"""Whether a checkpoint is due: asked once per step, before the step, and the answer kept for the whole step.

The engine stays down from a step's end through a save that follows, so whoever wakes it and whoever saves must have the same
answer. It is therefore decided up front and latched; what is asked for in the meantime counts from the next decision on (or
is served between two steps, where `urgent` says so).

A save is due by step, by seconds since the last one, by an absolute deadline, or because somebody asked. The deadline is the
run's, start-up included: a step is the last one when there is no room for another step and a save after it, judged by the
longest of the recent ones. So the save has ended when the deadline comes, as long as steps do not suddenly take longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

#: Steps and saves whose longest is expected of the next one.
RECENT = 20


class Cause(StrEnum):
    """Why a save is due."""

    STEP = "Step"
    LAST_STEP = "LastStep"
    SECONDS = "Seconds"
    DEADLINE = "Deadline"
    REQUEST = "Request"
    STOP = "Stop"


#: Causes after whose save the run ends, whatever steps are left.
ENDING = frozenset({Cause.DEADLINE, Cause.STOP})


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one step."""

    step: int
    causes: tuple[Cause, ...] = ()

    @property
    def save(self) -> bool:
        """Whether the step ends with a save."""
        return bool(self.causes)

    @property
    def end(self) -> Cause | None:
        """Why the run ends after that save; None while it goes on."""
        return next((cause for cause in self.causes if cause in ENDING), None)


@dataclass(frozen=True, slots=True)
class DueRules:
    """What a job says about saves. `deadline` is a moment on the clock that `Due` is given, in seconds."""

    every_steps: int
    last_step: int
    every_seconds: float | None = None
    deadline: float | None = None


class Due:
    """Decides and remembers. `clock` gives seconds that never go back."""

    def __init__(self, rules: DueRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        # Two flags, each written in one way only between two decisions: safe in signal handlers and other threads.
        self._save_wanted = False
        self._stop_wanted = False
        self._latched = Decision(0)
        self._saved_at = clock()
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._saves: deque[float] = deque(maxlen=RECENT)

    # ---- what happens -----------------------------------------------------------------------

    def ask_save(self) -> None:
        """Somebody wants what is there now to be saved."""
        self._save_wanted = True

    def ask_stop(self) -> None:
        """Somebody wants the run to save and end; this is never taken back."""
        self._stop_wanted = True

    def stepped(self, seconds: float) -> None:
        """A step took so long, its save left out."""
        self._steps.append(seconds)

    def begun(self) -> None:
        """The newest state is being saved: whoever has asked for a save until now has it."""
        self._saved_at = self._clock()
        self._drop(Cause.SECONDS)
        self.served()

    def took(self, seconds: float) -> None:
        """A save took so long, from its begin to the checkpoint. Called in any thread."""
        self._saves.append(seconds)

    def served(self) -> None:
        """The newest state is saved: whoever asked for a save has it. A wanted end stays wanted."""
        self._save_wanted = False
        # A step that was decided and then put off must not save for a wish that has been served in between.
        self._drop(Cause.REQUEST)

    def _drop(self, cause: Cause) -> None:
        self._latched = Decision(self._latched.step, tuple(one for one in self._latched.causes if one is not cause))

    # ---- decisions --------------------------------------------------------------------------

    def decide(self, step: int) -> Decision:
        """The decision for a step, taken when it is first asked for. From then on it only loses what a save has served."""
        if step < self._latched.step:
            raise ValueError(f"step {step} was decided before step {self._latched.step}")
        if step > self._latched.step:
            self._latched = Decision(step, tuple(self._causes(step)))
        return self._latched

    def urgent(self) -> Cause | None:
        """Why the newest state must be saved before another step is begun, if it must."""
        if self._stop_wanted:
            return Cause.STOP
        if self.seconds_to_spare() < 0:
            return Cause.DEADLINE
        return Cause.REQUEST if self._save_wanted else None

    def seconds_to_spare(self) -> float:
        """Seconds until a step that is begun, and its save, no longer end before the deadline."""
        return self._left() - self._longest_step() - self._longest_save()

    def _causes(self, step: int) -> list[Cause]:
        rules = self._rules
        passed = self._clock() - self._saved_at
        # The step itself, and then no room for one more and its save.
        tight = self.seconds_to_spare() < self._longest_step()
        holds = {
            Cause.STEP: step % rules.every_steps == 0,
            Cause.LAST_STEP: step == rules.last_step,
            Cause.SECONDS: rules.every_seconds is not None and passed >= rules.every_seconds,
            Cause.DEADLINE: tight,
            Cause.REQUEST: self._save_wanted,
            Cause.STOP: self._stop_wanted,
        }
        return [cause for cause, true in holds.items() if true]

    def _left(self) -> float:
        return float("inf") if self._rules.deadline is None else self._rules.deadline - self._clock()

    def _longest_step(self) -> float:
        return max(self._steps, default=0.0)

    def _longest_save(self) -> float:
        return max(self._saves, default=0.0)
