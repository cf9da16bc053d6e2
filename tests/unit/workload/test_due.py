"""When a save is due: a table for each cause, and what holds for any run."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rljob_workload.core.due import Cause, Due, DueRules


@dataclass
class Clock:
    """Seconds that pass only when told."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Life:
    """A `Due` with its clock."""

    rules: DueRules
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.due = Due(self.rules, self.clock)

    def step(self, number: int, seconds: float = 0.0, save: float = 0.0) -> tuple[Cause, ...]:
        """Decide, step, and save where that was decided."""
        decision = self.due.decide(number)
        self.clock.now += seconds
        self.due.stepped(seconds)
        if decision.save:
            self.clock.now += save
            self.saved(save)
        return decision.causes

    def saved(self, seconds: float) -> None:
        """A save took so long, in which nothing else happened."""
        self.due.took(seconds)
        self.due.begun()


def life(every_steps: int = 1000, last_step: int = 1000, seconds: float | None = None, deadline: float | None = None) -> Life:
    return Life(DueRules(every_steps, last_step, seconds, deadline))


def test_by_step_and_at_the_last_step() -> None:
    run = life(every_steps=3, last_step=7)
    assert [run.step(n) for n in range(1, 8)] == [(), (), (Cause.STEP,), (), (), (Cause.STEP,), (Cause.LAST_STEP,)]


def test_by_seconds_since_the_last_save_whatever_it_was_saved_for() -> None:
    run = life(every_steps=4, seconds=10)
    causes = [run.step(n, seconds=4) for n in range(1, 9)]
    #        0   4   8  12 -> both at step 4, then 16 is 0 again
    assert causes == [(), (), (), (Cause.STEP, Cause.SECONDS), (), (), (), (Cause.STEP, Cause.SECONDS)]
    run = life(seconds=10)
    assert [bool(run.step(n, seconds=4)) for n in range(1, 9)] == [False, False, False, True, False, False, False, True]


def test_by_request_once_and_by_stop_for_good() -> None:
    run = life()
    run.due.ask_save()
    assert run.due.urgent() is Cause.REQUEST
    assert run.step(1) == (Cause.REQUEST,)
    assert run.step(2) == ()
    run.due.ask_save()
    run.due.ask_stop()
    assert run.due.urgent() is Cause.STOP
    assert run.step(3) == (Cause.REQUEST, Cause.STOP)
    assert run.due.decide(3).end is Cause.STOP
    assert run.due.urgent() is Cause.STOP


def test_a_decision_is_kept_whatever_happens_meanwhile() -> None:
    """The engine was left awake (or down) because of it."""
    run = life(seconds=10, deadline=200)
    assert not run.due.decide(1).save
    run.clock.now += 1000
    run.due.ask_save()
    run.due.ask_stop()
    assert not run.due.decide(1).save
    assert run.due.decide(2).causes == (Cause.SECONDS, Cause.DEADLINE, Cause.REQUEST, Cause.STOP)
    run.saved(1)
    assert run.due.decide(2).save
    with pytest.raises(ValueError, match="step 1 was decided before step 2"):
        run.due.decide(1)


def test_a_save_takes_its_own_causes_off_a_step_that_was_put_off_for_it() -> None:
    run = life(every_steps=2, seconds=10)
    run.clock.now += 10
    run.due.ask_save()
    assert run.due.decide(1).causes == (Cause.SECONDS, Cause.REQUEST)
    run.due.begun()
    assert not run.due.decide(1).save
    run.due.ask_save()
    assert run.due.decide(2).causes == (Cause.STEP, Cause.REQUEST)
    run.due.begun()
    assert run.due.decide(2).causes == (Cause.STEP,)


@pytest.mark.parametrize(
    ("left", "causes", "urgent"),
    [
        # A step takes 10 s, a save 4 s.
        (25.0, (), None),
        (23.9, (Cause.DEADLINE,), None),
        (14.0, (Cause.DEADLINE,), None),
        (13.9, (Cause.DEADLINE,), Cause.DEADLINE),
    ],
)
def test_the_deadline_looks_one_step_and_one_save_ahead(left: float, causes: tuple[Cause, ...], urgent: Cause | None) -> None:
    run = life(every_steps=1, deadline=1000)
    run.step(1, seconds=10, save=4)
    run.clock.now = 1000 - left
    assert run.due.urgent() is urgent
    assert tuple(cause for cause in run.due.decide(2).causes if cause is Cause.DEADLINE) == causes


def test_the_longest_of_the_recent_steps_counts_and_old_ones_are_forgotten() -> None:
    run = life(deadline=10_000)
    run.step(1, seconds=50)
    run.step(2, seconds=1)
    assert run.due.seconds_to_spare() == 10_000 - run.clock.now - 50
    for number in range(3, 30):
        run.step(number, seconds=1)
    assert run.due.seconds_to_spare() == 10_000 - run.clock.now - 1


@settings(deadline=None)
@example(steps=[1.0, 12.0, 19.0], saves=10.0, every=3, room=60.0)
@given(
    steps=st.lists(st.floats(0.5, 20), min_size=1, max_size=60),
    saves=st.floats(0, 10),
    every=st.integers(1, 7),
    room=st.floats(60, 500),
)
def test_a_run_with_a_deadline_has_saved_its_last_step_before_it(
    steps: list[float], saves: float, every: int, room: float
) -> None:
    """As long as nothing takes longer than the longest so far. The first step and the first save are the yardstick."""
    longest = max(steps)
    run = life(every_steps=every, last_step=len(steps) + 1, deadline=100 + room)
    run.step(0, seconds=longest)
    run.clock.now += saves
    run.saved(saves)
    unsaved = 0
    for number, seconds in enumerate(steps, 1):
        if run.due.urgent():
            break
        causes = run.step(number, seconds, saves)
        unsaved = 0 if causes else unsaved + 1
        if run.due.decide(number).end:
            break
    else:
        return  # the steps ran out first
    assert unsaved == 0, "a step before the deadline was not saved"
    assert run.clock.now <= 100 + room + 1e-6


@settings(deadline=None)
@given(st.data())
def test_any_order_of_requests_and_steps_serves_each_request_and_never_changes_a_decision(data: st.DataObject) -> None:
    run = life(every_steps=data.draw(st.integers(1, 5)), last_step=50, seconds=data.draw(st.none() | st.floats(1, 30)))
    for number in range(1, 20):
        before = run.due.urgent()
        first = run.due.decide(number)
        if before is Cause.REQUEST:
            assert Cause.REQUEST in first.causes
        if late := data.draw(st.booleans()):
            run.due.ask_save()
        run.clock.now += data.draw(st.floats(0, 5))
        assert run.due.decide(number) is first
        if first.save:
            run.saved(0.1)
        assert run.due.urgent() is (Cause.REQUEST if late and not first.save else None)
