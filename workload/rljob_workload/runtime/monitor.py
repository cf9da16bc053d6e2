"""One lock, and wake-ups that cannot be lost.

Ray gives every concurrency group of an asyncio actor an event loop in a thread of its own, so a control call really runs
beside the others. What they share is guarded by one lock that is held for moments only and never over an `await`. Waiting
means: look under the lock, remember how often things had changed by then, and sleep only if they have not changed since.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice

type _Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Monitor:
    """The lock and those who wait for what it guards. Usable from several threads, each with its own event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = 0
        self._waiters: set[_Waiter] = set()
        #: By name, who has waited longest first.
        self._lines: defaultdict[str, dict[_Place, None]] = defaultdict(dict)

    def reading(self) -> AbstractContextManager[bool]:
        """Hold the lock to look."""
        return self._lock

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock to change something; whoever waits looks again afterwards."""
        with self._lock:
            try:
                yield
            finally:
                self.notify()

    def notify(self) -> None:
        """Have everybody look again, of a line its first. The lock must be held."""
        self._changes += 1
        waiters, self._waiters = self._waiters, set()
        for line in self._lines.values():
            waiters.update(place.waiter for place in islice(line, 1))
        _wake_all(waiters)

    async def first[T](self, attempt: Callable[[], T | None], seconds: float | None = None) -> T | None:
        """The first result of `attempt` that is not None; None when there is none within so many seconds.

        `attempt` is called with the lock held, once now and again after each change. When it succeeds, that is a change.
        """
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        while True:
            with self._lock:
                seen = self._changes
                result = attempt()
                if result is not None:
                    self.notify()
                    return result
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return None
            await self.changed(seen, left)

    async def first_in_line[T](self, line: str, attempt: Callable[[], T | None], seconds: float) -> T | None:
        """As `first`, for many who ask the same thing: who has waited longest looks first, the next one when that one is gone.

        So a change costs the same however many wait. It is right where nobody finds what the one before did not find.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        with self._lock:
            if (result := attempt()) is not None:
                self.notify()
                return result
            place = _Place((loop, loop.create_future()))
            self._lines[line][place] = None
        timer = loop.call_later(seconds, lambda: _wake(place.waiter[1]))
        try:
            while True:
                await place.waiter[1]
                with self._lock:
                    result = attempt()
                    if result is not None or loop.time() >= deadline:
                        return result
                    place.waiter = (loop, loop.create_future())
        finally:
            timer.cancel()
            with self._lock:
                del self._lines[line][place]
                self.notify()  # the next one's turn, whether this one found something, waited in vain, or is gone

    @property
    def changes(self) -> int:
        """How often something has changed. The lock must be held, if the answer is to mean something."""
        return self._changes

    async def changed(self, seen: int, seconds: float | None = None) -> None:
        """Return as soon as there are more changes than the `seen` ones, or after so many seconds."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._changes != seen:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add((loop, waiter))
        timer = None if seconds is None else loop.call_later(max(0.0, seconds), _wake, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            with self._lock:
                self._waiters.discard((loop, waiter))


@dataclass(eq=False, slots=True)
class _Place:
    """In a line; with a new future for each look."""

    waiter: _Waiter


def _wake_all(waiters: Iterable[_Waiter]) -> None:
    own = asyncio._get_running_loop()
    for loop, waiter in waiters:
        if loop is own:
            _wake(waiter)
        elif not loop.is_closed():  # writes to a pipe of that loop
            loop.call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
