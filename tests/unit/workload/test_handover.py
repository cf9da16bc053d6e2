"""The hand-over's order: thousands of cycles on virtual ranks with random delays, and three wrong orders that must show."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_workload.core.handover import (
    TRANSITIONS,
    Handover,
    HandoverOrderError,
    HandoverTimeoutError,
    Phase,
    Step,
)

from .turns import StuckError, Turns


class MixedError(AssertionError):
    """Collectives of decode and training met."""


class World:
    """Virtual ranks on one communicator. Work that an engine queued runs on the rank's device whenever the device likes."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.turns = Turns(seed)
        self.turns.events = self._devices
        self.queued = [0] * ranks
        self.training = [False] * ranks
        self.arrived: dict[int, int] = {}
        #: Tags of each rank's collectives, in the order of its communicator.
        self.collectives: list[list[str]] = [[] for _ in range(ranks)]

    def _devices(self) -> list[Callable[[], None]]:
        return [lambda device=device: self._run_one(device) for device, work in enumerate(self.queued) if work]

    def _run_one(self, device: int) -> None:
        if any(self.training):
            raise MixedError(f"device {device} decodes while {self.training} trains")
        self.queued[device] -= 1
        self.collectives[device].append("decode")

    def train_collective(self, rank: int, tag: str) -> None:
        if any(self.queued):
            raise MixedError(f"rank {rank} issues {tag} while {self.queued} decode")
        self.collectives[rank].append(tag)


class VirtualRank:
    """A rank's parts: an engine that queues decode work, a device, a place at the barrier."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.awake = True
        self.barriers = 0

    def decode(self, count: int) -> None:
        """What the engine does on its signal: queue collectives, and not wait for them."""
        for _ in range(count):
            assert self.awake
            self.world.queued[self.rank] += 1
            if self.world.turns.random.random() < 0.5:
                self.world.turns.pause()

    def stop_intake(self) -> None:
        self.world.turns.pause()

    def suspend_engine(self) -> None:
        self.awake = False
        self.world.turns.pause()

    def synchronize(self) -> None:
        self.world.turns.wait_for(lambda: not self.world.queued[self.rank])

    def barrier(self, phase: Phase) -> None:
        self.barriers += 1
        number, ranks = self.barriers, len(self.world.queued)
        self.world.arrived[number] = self.world.arrived.get(number, 0) + 1
        self.world.turns.wait_for(lambda: self.world.arrived[number] == ranks)

    def enter_train(self) -> None:
        self.world.training[self.rank] = True

    def leave_train(self) -> None:
        self.world.turns.pause()
        self.world.training[self.rank] = False
        self.world.turns.pause()

    def resume_engine(self) -> None:
        self.awake = True
        self.decode(1)


class DrainsTheCallersDevice(VirtualRank):
    """The bug of every bare `torch.cuda.synchronize()`: it drains the calling thread's current device."""

    def synchronize(self) -> None:
        self.world.turns.wait_for(lambda: not self.world.queued[0])


class BarrierBeforeDrain(Handover):
    drain_order = (Step.STOP_INTAKE, Step.SUSPEND_ENGINE, Step.BARRIER, Step.SYNCHRONIZE, Step.ENTER_TRAIN)


class SignalBeforeBarrier(Handover):
    wake_order = (Step.LEAVE_TRAIN, Step.SYNCHRONIZE, Step.RESUME_ENGINE, Step.BARRIER)


def cycle(
    seed: int,
    ranks: int,
    cycles: int,
    *,
    machine: type[Handover] = Handover,
    parts: type[VirtualRank] = VirtualRank,
) -> World:
    """Run ranks through decode, train, sometimes save; returns the world, or raises MixedError."""
    world = World(seed, ranks)
    plan = [(world.turns.random.randint(0, 3), world.turns.random.random() < 0.2) for _ in range(cycles)]

    def work(rank: int) -> None:
        part = parts(world, rank)
        handover = machine(rank, part)
        for number, (count, saves) in enumerate(plan):
            part.decode(count)
            handover.to_train()
            world.train_collective(rank, f"train {number}")
            world.turns.pause()
            if saves:
                with handover.saving():
                    world.train_collective(rank, f"save {number}")
                    world.turns.pause()
            handover.to_decode()

    for rank in range(ranks):
        world.turns.spawn(lambda rank=rank: work(rank))
    world.turns.run()
    while choices := world._devices():
        choices[0]()
    return world


def test_a_thousand_cycles_on_three_ranks_never_mix_decode_and_training() -> None:
    world = cycle(seed=1, ranks=3, cycles=1000)
    first = world.collectives[0]
    assert world.collectives[1:] == [first, first]
    assert first.count("decode") > 1000
    assert [tag for tag in first if tag.startswith("train")] == [f"train {number}" for number in range(1000)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5), cycles=st.integers(1, 8))
def test_no_schedule_mixes_decode_and_training(seed: int, ranks: int, cycles: int) -> None:
    world = cycle(seed, ranks, cycles)
    assert all(log == world.collectives[0] for log in world.collectives)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("machine", "parts"),
    [(BarrierBeforeDrain, VirtualRank), (SignalBeforeBarrier, VirtualRank), (Handover, DrainsTheCallersDevice)],
    ids=["barrier before drain", "signal before barrier", "wrong device drained"],
)
def test_a_wrong_order_shows(seed: int, machine: type[Handover], parts: type[VirtualRank]) -> None:
    with pytest.raises(MixedError):
        cycle(seed, 3, 1000, machine=machine, parts=parts)


def test_an_absent_rank_keeps_all_others_from_training() -> None:
    """The virtual barrier has no deadline: without the absent rank nobody gets further."""
    world = World(seed=0, ranks=2)
    handover = Handover(0, VirtualRank(world, 0))
    world.turns.spawn(handover.to_train)  # type: ignore[arg-type]
    with pytest.raises(StuckError):
        world.turns.run()
    assert not any(world.training)


class Still:
    """Parts of one rank that note the calls; `fails` raises."""

    def __init__(self, fails: Step | None = None) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def _note(self, step: Step) -> None:
        self.calls.append(step)
        if step is self._fails:
            raise HandoverTimeoutError(Phase.DRAINING, (1,), 2.0)

    def stop_intake(self) -> None:
        self._note(Step.STOP_INTAKE)

    def suspend_engine(self) -> None:
        self._note(Step.SUSPEND_ENGINE)

    def synchronize(self) -> None:
        self._note(Step.SYNCHRONIZE)

    def barrier(self, phase: Phase) -> None:
        self._note(Step.BARRIER)

    def enter_train(self) -> None:
        self._note(Step.ENTER_TRAIN)

    def leave_train(self) -> None:
        self._note(Step.LEAVE_TRAIN)

    def resume_engine(self) -> None:
        self._note(Step.RESUME_ENGINE)


def lead(handover: Handover, phase: Phase) -> None:
    """Bring a fresh machine into a phase."""
    handover._now = type(handover.now)(phase, "", 0.0)


@pytest.mark.parametrize("phase", list(Phase))
def test_what_does_not_follow_from_a_phase_is_refused(phase: Phase) -> None:
    allowed = {
        "to_train": phase is Phase.DECODE,
        "to_decode": phase is Phase.TRAIN,
        "saving": phase is Phase.TRAIN,
    }
    for name, legal in allowed.items():
        parts = Still()
        handover = Handover(0, parts)
        lead(handover, phase)

        def run(name: str = name, handover: Handover = handover) -> None:
            result = getattr(handover, name)()
            if name == "saving":
                with result:
                    assert handover.phase is Phase.SAVE

        if legal:
            run()
        else:
            with pytest.raises(HandoverOrderError, match=f"rank 0 cannot go from {phase}"):
                run()
            assert parts.calls == []
            assert handover.phase is phase


def test_every_phase_has_its_place_in_the_table() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert [phase for phase, following in TRANSITIONS.items() if Phase.SAVE in following] == [Phase.TRAIN]
    assert [phase for phase, following in TRANSITIONS.items() if Phase.WAKING in following] == [Phase.TRAIN]


def test_the_signal_is_the_last_step_and_the_passage_tells_the_times() -> None:
    clock = iter(range(1000))
    parts = Still()
    handover = Handover(0, parts, clock=lambda: float(next(clock)), cpu_clock=lambda: 0.0)
    handover.to_train()
    passage = handover.to_decode()
    assert parts.calls == [*Handover.drain_order, *Handover.wake_order]
    assert parts.calls[-1] == Step.RESUME_ENGINE
    assert passage.to == Phase.DECODE
    assert list(passage.steps) == list(Handover.wake_order)
    assert passage.waited_seconds == 1.0
    assert passage.seconds > sum(passage.steps.values())


def test_a_failed_hand_over_stays_broken_and_names_rank_and_phase() -> None:
    parts = Still(fails=Step.BARRIER)
    handover = Handover(3, parts)
    with pytest.raises(HandoverTimeoutError, match=r"rank 1 did not arrive at the hand-over \(Draining\) within 2 s"):
        handover.to_train()
    assert (handover.phase, handover.now.step) == (Phase.BROKEN, Step.BARRIER)
    assert Step.ENTER_TRAIN not in parts.calls
    with pytest.raises(HandoverOrderError, match="rank 3 cannot go from Broken"):
        handover.to_train()


def test_a_failed_save_leaves_no_way_back_to_decode() -> None:
    handover = Handover(0, Still())
    handover.to_train()
    with pytest.raises(OSError, match="full"), handover.saving():
        raise OSError("full")
    with pytest.raises(HandoverOrderError):
        handover.to_decode()


def test_a_timeout_travels_between_processes() -> None:
    sent = HandoverTimeoutError(Phase.WAKING, (1, 3), 60.0)
    received = pickle.loads(pickle.dumps(sent))
    assert (received.phase, received.absent, received.seconds) == ("Waking", (1, 3), 60.0)
    assert str(received).startswith("ranks 1, 3 did not arrive at the hand-over (Waking) within 60 s")
