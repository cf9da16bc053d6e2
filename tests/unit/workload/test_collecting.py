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
@given(seed=st.integers(0, 2**32), waiters=st.integers(1, 6), units=st.integers(1, 40), line=st.booleans())
def test_no_wake_up_is_lost_whoever_changes_things_and_whenever(seed: int, waiters: int, units: int, line: bool) -> None:
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
        while await (monitor.first_in_line("a", take, 60.0) if line else monitor.first(take)):
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


async def test_a_change_costs_one_look_however_many_wait_in_a_line() -> None:
    monitor, stock, looks, found = Monitor(), 0, 0, list[int]()

    def take() -> bool | None:
        nonlocal stock, looks
        looks += 1
        if not stock:
            return None
        stock -= 1
        return True

    async def waiter(number: int) -> None:
        assert await monitor.first_in_line("a", take, 30.0)
        found.append(number)

    tasks = [asyncio.create_task(waiter(number)) for number in range(900)]
    await asyncio.sleep(0)
    assert looks == 900
    for _ in range(10):
        with monitor.changing():
            pass
        await asyncio.sleep(0)
    assert looks <= 910
    looks = 0
    with monitor.changing():
        stock = 3
    for _ in range(50):  # rounds of the event loop: each of the three passes the turn on
        await asyncio.sleep(0)
    assert found == [0, 1, 2], "who has waited longest is first"
    assert looks <= 4
    with monitor.changing():
        stock = 900
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert not any(monitor._lines.values())


async def test_who_leaves_a_line_takes_nobodys_turn_along() -> None:
    """The first is woken, and gone before it looks; its turn passes on. One that waits in vain leaves too."""
    monitor, stock = Monitor(), 0
    tasks = [asyncio.create_task(monitor.first_in_line("a", lambda: stock or None, seconds)) for seconds in (30.0, 30.0, 0.01)]
    await asyncio.sleep(0)
    with monitor.changing():
        stock = 1
    tasks[0].cancel()
    assert await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20) is not None
    assert tasks[0].cancelled()
    assert tasks[1].result() == 1
    stock = 0
    assert await monitor.first_in_line("a", lambda: stock or None, 0.01) is None
    assert not any(monitor._lines.values())
