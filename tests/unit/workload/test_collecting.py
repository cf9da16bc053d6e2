"""The collector's states: only the table's moves, a log of them, and waits that no wake-up gets past."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_workload.core.collecting import OPEN, STILL, TRANSITIONS, CollectorMachine, CollectorState, TransitionError
from rljob_workload.runtime.monitor import Monitor

ALL = list(CollectorState)


@given(st.lists(st.sampled_from(ALL), max_size=40))
def test_a_machine_goes_where_the_table_says_and_nowhere_else(wanted: list[CollectorState]) -> None:
    seconds = itertools.count()
    told = []
    machine = CollectorMachine(lambda: float(next(seconds)), told.append)
    for state in wanted:
        before = machine.state
        if state is before or state in TRANSITIONS[before]:
            machine.enter(state, "test")
            assert machine.state is state
        else:
            with pytest.raises(TransitionError, match=f"cannot go from {before} to {state}"):
                machine.enter(state, "test")
            assert machine.state is before
    assert told == machine.log
    assert [move.after for move in told[:-1]] == [move.before for move in told[1:]]
    assert all(move.seconds > 0 for move in told)
    for state in set(ALL) - {machine.state}:
        assert machine.seconds(state) == sum(move.seconds for move in told if move.before is state)


def test_every_state_can_be_reached_can_fail_and_a_failure_is_the_end() -> None:
    reached, frontier = {CollectorState.STARTING}, {CollectorState.STARTING}
    while frontier:
        frontier = {after for state in frontier for after in TRANSITIONS[state]} - reached
        reached |= frontier
    assert reached == set(ALL) == set(TRANSITIONS)
    assert all(CollectorState.FAILED in TRANSITIONS[state] for state in ALL if state is not CollectorState.FAILED)
    assert not TRANSITIONS[CollectorState.FAILED]


def test_a_step_and_a_save_are_only_reached_through_draining() -> None:
    """Else a rank could decode while its neighbour trains."""
    assert not OPEN & STILL
    for state in OPEN:
        assert not TRANSITIONS[state] & STILL


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), waiters=st.integers(1, 6), units=st.integers(1, 40))
def test_no_wake_up_is_lost_whoever_changes_things_and_whenever(seed: int, waiters: int, units: int) -> None:
    """Takers and a giver on one loop, a second giver in a thread: every unit is taken, and nobody sleeps beside one."""
    chance = random.Random(seed)
    monitor, stock, taken, given_away = Monitor(), 0, [], threading.Event()

    def take() -> bool | None:
        nonlocal stock
        if stock:
            stock -= 1
            return True
        # None left: True ends the taker once everything has been given.
        return False if given_away.is_set() else None

    async def taker(name: int) -> None:
        while await monitor.first(take):
            taken.append(name)
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)

    def give() -> None:
        nonlocal stock
        with monitor.changing():
            stock += 1

    async def giver(count: int) -> None:
        for _ in range(count):
            give()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)

    async def world() -> None:
        half = units // 2
        thread = threading.Thread(target=lambda: [give() for _ in range(units - half)])
        takers = [asyncio.create_task(taker(name)) for name in range(waiters)]
        thread.start()
        await giver(half)
        await asyncio.to_thread(thread.join)
        with monitor.changing():
            given_away.set()
        await asyncio.gather(*takers)

    asyncio.run(asyncio.wait_for(world(), 20))
    assert (len(taken), stock) == (units, 0)


async def test_a_change_between_the_look_and_the_sleep_is_seen() -> None:
    """The order in which a wake-up used to be lost elsewhere: look, change, sleep."""
    monitor = Monitor()
    with monitor.reading():
        seen = monitor.changes
    with monitor.changing():
        pass
    await asyncio.wait_for(monitor.changed(seen), 5)


async def test_a_wait_ends_at_its_deadline_and_leaves_nobody_behind() -> None:
    monitor = Monitor()
    assert await monitor.first(lambda: None, seconds=0.01) is None
    task = asyncio.create_task(monitor.first(lambda: None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not monitor._waiters
