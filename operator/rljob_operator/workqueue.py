"""A coalescing queue of keys: each is queued at most once, never handled twice at the same time, retried with backoff."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

from .world import Key

_FIRST_DELAY = 0.25
_LONGEST_DELAY = 120.0


class WorkQueue:
    """Add keys from anywhere in the loop; workers `get` one and call `done` or `failed`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._busy: dict[Key, float] = {}
        self._dirty: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._woken = asyncio.Event()

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Handle the key after `delay` seconds; an earlier time that is already set stays."""
        if key in self._busy and delay <= 0:
            self._dirty.add(key)
            return
        due = self._clock() + delay
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._heap, (due, key))
        self._woken.set()

    def take(self) -> Key | None:
        """A key that is due and not being handled, or None."""
        held: list[tuple[float, Key]] = []
        found = None
        while self._heap and self._heap[0][0] <= self._clock():
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) != due:
                continue  # superseded by an earlier time
            if key in self._busy:
                held.append((due, key))
                continue
            found = key
            break
        for entry in held:
            heapq.heappush(self._heap, entry)
        if found is not None:
            del self._due[found]
            self._busy[found] = self._clock()
        return found

    async def get(self) -> Key:
        """Wait for the next key."""
        while (key := self.take()) is None:
            self._woken.clear()
            try:
                async with asyncio.timeout(self._next_delay()):
                    await self._woken.wait()
            except TimeoutError:
                continue
        return key

    def done(self, key: Key, again_after: float | None) -> None:
        """The key was handled. With more to do at once (0) it goes before those that wait: what has begun is finished first."""
        self._failures.pop(key, None)
        if again_after == 0:
            # No earlier than the first of them: how long that has waited is the queue's health.
            again_after = min(0.0, self._heap[0][0] - self._clock()) if self._heap else 0.0
        self._release(key, again_after)

    def failed(self, key: Key) -> float:
        """The key was not handled: it comes again after a delay that doubles each time. Returns the delay."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = min(_FIRST_DELAY * (1 << min(count, 20)), _LONGEST_DELAY)
        self._dirty.discard(key)
        self._release(key, delay)
        return delay

    def overdue(self) -> float:
        """Seconds that the longest waiting key is past its time, 0 where none is: the queue's health."""
        now = self._clock()
        waiting = [due for key, due in self._due.items() if key not in self._busy]
        return max((now - due for due in waiting if due < now), default=0.0)

    def longest_pass(self) -> float:
        """Seconds that the oldest unfinished handling of a key has taken."""
        now = self._clock()
        return max((now - began for began in self._busy.values()), default=0.0)

    def __len__(self) -> int:
        """Keys that are due now or later, and those being handled."""
        return len(self._due.keys() | self._busy.keys())

    def _release(self, key: Key, delay: float | None) -> None:
        self._busy.pop(key, None)
        if key in self._dirty:
            self._dirty.discard(key)
            delay = 0.0 if delay is None else min(delay, 0.0)
        if delay is not None:
            self.add(key, delay)
        self._woken.set()

    def _next_delay(self) -> float | None:
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        due = next((due for due, key in self._heap[:1] if key not in self._busy), None)
        if due is None:  # the next one is being handled: look at all
            due = min((due for key, due in self._due.items() if key not in self._busy), default=None)
        return None if due is None else max(due - self._clock(), 0.001)
