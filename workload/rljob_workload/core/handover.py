"""The hand-over of one rank's device between generation and training: a state machine, pure, one per rank.

    Decode -> Draining -> Train <-> Save
       ^                    |
       +----- Waking <------+

Decode and training share weights and communicators. A rank that trains while another still decodes makes the two kinds of
collectives meet, which hangs or computes nonsense, and only after some cycles. The order of the steps below excludes it:
towards training, a rank's own device is drained *before* the barrier, so that behind the barrier no device decodes; towards
decode, the signal that starts the engine comes *after* the barrier, so that no engine runs while a device still trains.
A save is reached from Train only, and only Train leads on to Waking: the engine is down until the save's last collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

log = logging.getLogger("rljob.handover")


class Phase(StrEnum):
    """What a rank's device is used for."""

    DECODE = "Decode"
    DRAINING = "Draining"
    TRAIN = "Train"
    SAVE = "Save"
    WAKING = "Waking"
    #: A hand-over failed half-way; nothing may follow.
    BROKEN = "Broken"


#: Where each phase may lead, apart from Broken.
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.DECODE: frozenset({Phase.DRAINING}),
    Phase.DRAINING: frozenset({Phase.TRAIN}),
    Phase.TRAIN: frozenset({Phase.SAVE, Phase.WAKING}),
    Phase.SAVE: frozenset({Phase.TRAIN}),
    Phase.WAKING: frozenset({Phase.DECODE}),
    Phase.BROKEN: frozenset(),
}


class Step(StrEnum):
    """One action of a hand-over; each is a method of `Parts`."""

    STOP_INTAKE = "stop intake"
    SUSPEND_ENGINE = "suspend engine"
    SYNCHRONIZE = "synchronize"
    BARRIER = "barrier"
    ENTER_TRAIN = "enter train"
    LEAVE_TRAIN = "leave train"
    RESUME_ENGINE = "resume engine"


class Parts(Protocol):
    """What a rank hands over. The methods return when they are done; none of them decides about the order."""

    def stop_intake(self) -> None:
        """Take no new request and start no new engine step."""

    def suspend_engine(self) -> None:
        """Let the engine go; requests in flight stay."""

    def synchronize(self) -> None:
        """Wait until the device of this rank (LOCAL_RANK's, whichever thread asks) has done all that was queued on it."""

    def barrier(self, phase: Phase) -> None:
        """Wait for all ranks, beside the model's communicators. Raises HandoverTimeoutError."""

    def enter_train(self) -> None:
        """Bring back the training buffers, put the model into training."""

    def leave_train(self) -> None:
        """Put the model into inference, put the training buffers away where that is asked for."""

    def resume_engine(self) -> None:
        """The signal: the engine runs, requests are taken again."""


class HandoverError(Exception):
    """A hand-over went wrong."""


class HandoverOrderError(HandoverError):
    """A phase was asked for that does not follow from the current one."""


class HandoverTimeoutError(HandoverError):
    """Ranks did not arrive at the barrier of a phase in time. `absent`: those ranks."""

    def __init__(self, phase: str, absent: tuple[int, ...], seconds: float) -> None:
        super().__init__(phase, absent, seconds)
        self.phase = phase
        self.absent = absent
        self.seconds = seconds

    def __str__(self) -> str:
        who = f"rank {self.absent[0]}" if len(self.absent) == 1 else f"ranks {', '.join(map(str, self.absent))}"
        return (
            f"{who} did not arrive at the hand-over ({self.phase}) within {self.seconds:g} s (deadlines.handoverSeconds); "
            "a rank that is only slow needs a longer one"
        )


@dataclass(frozen=True, slots=True)
class Passage:
    """A finished hand-over. Seconds by the wall and of this process's CPU time; `steps` by the wall."""

    to: str
    seconds: float
    cpu_seconds: float
    steps: Mapping[str, float]

    @property
    def waited_seconds(self) -> float:
        """The part of it that was spent waiting for other ranks."""
        return self.steps.get(Step.BARRIER, 0.0)


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a rank is; read by other threads while a hand-over blocks."""

    phase: Phase
    step: str
    since: float


class Handover:
    """The state machine of one rank. Transitions are called by one thread; `now` may be read by any."""

    drain_order: ClassVar[tuple[Step, ...]] = (
        Step.STOP_INTAKE,
        Step.SUSPEND_ENGINE,
        Step.SYNCHRONIZE,
        Step.BARRIER,
        Step.ENTER_TRAIN,
    )
    wake_order: ClassVar[tuple[Step, ...]] = (Step.LEAVE_TRAIN, Step.SYNCHRONIZE, Step.BARRIER, Step.RESUME_ENGINE)

    def __init__(
        self,
        rank: int,
        parts: Parts,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._now = Moment(Phase.DECODE, "", clock())
        self._do: dict[Step, Callable[[], None]] = {
            Step.STOP_INTAKE: parts.stop_intake,
            Step.SUSPEND_ENGINE: parts.suspend_engine,
            Step.SYNCHRONIZE: parts.synchronize,
            Step.BARRIER: lambda: parts.barrier(self.phase),
            Step.ENTER_TRAIN: parts.enter_train,
            Step.LEAVE_TRAIN: parts.leave_train,
            Step.RESUME_ENGINE: parts.resume_engine,
        }

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._now.phase

    @property
    def now(self) -> Moment:
        """Phase, step and since when (by the clock)."""
        return self._now

    def lasting(self) -> float:
        """Seconds in the current phase."""
        return self._clock() - self._now.since

    def expect(self, *phases: Phase) -> None:
        """Raise HandoverOrderError unless the rank is in one of these phases."""
        if self.phase not in phases:
            raise HandoverOrderError(f"rank {self._rank} is in {self.phase}, not in {' or '.join(phases)}")

    def to_train(self) -> Passage:
        """Decode -> Draining -> Train. When it returns no rank decodes."""
        return self._pass(Phase.DRAINING, self.drain_order, Phase.TRAIN)

    def to_decode(self) -> Passage:
        """Train -> Waking -> Decode. When the engine gets its signal no rank trains or saves."""
        return self._pass(Phase.WAKING, self.wake_order, Phase.DECODE)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Train -> Save -> Train around the collectives of a save."""
        self._enter(Phase.SAVE)
        with self._broken_by_errors():
            yield
        self._enter(Phase.TRAIN)

    def _pass(self, through: Phase, order: tuple[Step, ...], to: Phase) -> Passage:
        began, cpu = self._clock(), self._cpu_clock()
        self._enter(through)
        steps: dict[str, float] = {}
        with self._broken_by_errors():
            for step in order:
                before = self._clock()
                self._now = Moment(through, step, self._now.since)
                self._do[step]()
                steps[step] = self._clock() - before
        self._enter(to)
        passage = Passage(to, self._clock() - began, self._cpu_clock() - cpu, steps)
        log.info("rank %d: %s -> %s in %.4f s (%.4f s of it waiting), %.4f s of CPU time",
                  self._rank, through, to, passage.seconds, passage.waited_seconds, passage.cpu_seconds)  # fmt: skip
        return passage

    def _enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise HandoverOrderError(f"rank {self._rank} cannot go from {self.phase} to {phase}")
        self._now = Moment(phase, "", self._clock())

    @contextmanager
    def _broken_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as err:
            was = self._now
            self._now = Moment(Phase.BROKEN, was.step, self._clock())
            log.warning("rank %d: %s%s failed after %.3f s: %s: %s", self._rank, was.phase,
                        f" ({was.step})" if was.step else "", self._clock() - was.since, type(err).__name__, err)  # fmt: skip
            raise
