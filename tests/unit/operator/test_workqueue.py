"""The queue: coalescing, exclusion, delays, backoff; time is a variable."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.workqueue import WorkQueue

A, B = ("ns", "a"), ("ns", "b")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def queue() -> tuple[WorkQueue, Clock]:
    clock = Clock()
    return WorkQueue(clock), clock


def test_a_key_is_queued_once() -> None:
    q, _ = queue()
    for _n in range(5):
        q.add(A)
    assert q.take() == A
    assert q.take() is None


def test_a_key_is_not_handled_twice_at_the_same_time() -> None:
    q, _ = queue()
    q.add(A)
    assert q.take() == A
    q.add(A)
    assert q.take() is None
    q.done(A, None)
    assert q.take() == A


def test_the_earlier_of_two_times_stays() -> None:
    q, clock = queue()
    q.add(A, 10)
    q.add(A, 2)
    q.add(A, 5)
    clock.now += 2
    assert q.take() == A
    q.done(A, None)
    clock.now += 100
    assert q.take() is None


def test_what_has_begun_goes_before_what_waits_and_the_queue_looks_no_older() -> None:
    q, clock = queue()
    q.add(B)
    assert q.take() == B
    for name in ("c", "d", "e"):
        clock.now += 1
        q.add(("ns", name))
    q.add(B)  # the watch tells of what its pass has written
    clock.now += 10
    q.done(B, 0.0)
    assert q.overdue() == 12
    assert q.take() == B
    q.done(B, None)
    assert [q.take(), q.take(), q.take()] == [("ns", "c"), ("ns", "d"), ("ns", "e")]


def test_done_brings_a_key_again_after_its_delay() -> None:
    q, clock = queue()
    q.add(A)
    assert q.take() == A
    q.done(A, 3)
    clock.now += 2.9
    assert q.take() is None
    clock.now += 0.2
    assert q.take() == A


def test_failures_back_off_per_key_up_to_a_cap_and_success_forgets_them() -> None:
    q, clock = queue()
    delays = []
    q.add(A)
    for _n in range(14):
        assert q.take() == A
        delays.append(q.failed(A))
        clock.now += delays[-1]
    assert delays[:4] == [0.25, 0.5, 1.0, 2.0]
    assert delays[-1] == 120.0
    q.take()
    q.done(A, None)
    q.add(A)
    q.take()
    assert q.failed(A) == 0.25


def test_a_key_that_is_busy_does_not_hold_up_the_others() -> None:
    q, _ = queue()
    q.add(A)
    assert q.take() == A
    q.add(A, 0.0001)
    q.add(B)
    assert q.take() == B


def test_overdue_says_how_late_the_queue_is() -> None:
    q, clock = queue()
    assert q.overdue() == 0
    q.add(A)
    clock.now += 42
    assert q.overdue() == 42


def test_a_queue_whose_jobs_are_due_later_is_not_overdue_at_all() -> None:
    q, clock = queue()
    q.add(A, 5)
    assert q.overdue() == 0
    clock.now += 8
    assert q.overdue() == 3


async def test_get_waits_until_a_key_is_added() -> None:
    q = WorkQueue()
    waiter = asyncio.create_task(q.get())
    await asyncio.sleep(0)
    assert not waiter.done()
    q.add(A)
    assert await asyncio.wait_for(waiter, 60) == A


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "done", "fail", "tick"]), st.sampled_from([A, B])), max_size=80))
def test_no_key_is_lost_or_handled_twice(steps: list[tuple[str, tuple[str, str]]]) -> None:
    q, clock = queue()
    busy: set[tuple[str, str]] = set()
    owed: set[tuple[str, str]] = set()
    for what, key in steps:
        if what == "add":
            q.add(key)
            owed.add(key)
        elif what == "take" and (got := q.take()) is not None:
            assert got not in busy
            busy.add(got)
            owed.discard(got)
        elif what == "done" and key in busy:
            busy.discard(key)
            q.done(key, None)
        elif what == "fail" and key in busy:
            busy.discard(key)
            owed.add(key)
            q.failed(key)
        else:
            clock.now += 0.1
    for key in busy:
        q.done(key, None)
    clock.now += 1000
    came = set()
    while (got := q.take()) is not None:
        came.add(got)
        q.done(got, None)
    assert came == owed
