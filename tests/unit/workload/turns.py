"""Threads that run one at a time, in an order drawn from a seed: concurrency that can be repeated."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class StuckError(AssertionError):
    """Every thread waits for something that cannot happen any more."""


class _OverError(BaseException):
    """Thrown into the threads that are left when the run ends early."""


class _Thread:
    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.turn = threading.Semaphore(0)
        self.waits_for: Callable[[], bool] | None = None
        self.thread: threading.Thread | None = None


class Turns:
    """Threads take turns at `pause` and `wait_for`; `events` happen in between."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        #: Things that may happen beside the threads, as long as there are any.
        self.events: Callable[[], list[Callable[[], None]]] = list
        self._threads: list[_Thread] = []
        self._back = threading.Semaphore(0)
        self._current: _Thread | None = None
        self._over = False
        self._error: BaseException | None = None

    def spawn(self, work: Callable[[], None]) -> None:
        """Add a thread."""
        self._threads.append(_Thread(work))

    def pause(self) -> None:
        """Let somebody else go on."""
        self.wait_for(lambda: True)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Go on only when the condition holds."""
        me = self._current
        assert me is not None
        me.waits_for = condition
        self._back.release()
        me.turn.acquire()
        if self._over:
            raise _OverError

    def run(self) -> None:
        """Run all threads to their ends, or to the first error, which is raised."""
        for thread in self._threads:
            thread.thread = threading.Thread(target=self._body, args=(thread,), daemon=True)
            thread.thread.start()
        try:
            while self._threads and self._error is None:
                self._one_turn()
        finally:
            self._over = True
            for thread in self._threads:
                thread.turn.release()
                if thread.thread:
                    thread.thread.join(5)
        if self._error is not None:
            raise self._error

    def _one_turn(self) -> None:
        ready = [thread for thread in self._threads if thread.waits_for is None or thread.waits_for()]
        choices: list[_Thread | Callable[[], None]] = [*ready, *self.events()]
        if not choices:
            raise StuckError("all threads wait")
        chosen = self.random.choice(choices)
        if not isinstance(chosen, _Thread):
            chosen()
            return
        self._current = chosen
        chosen.turn.release()
        self._back.acquire()

    def _body(self, me: _Thread) -> None:
        me.turn.acquire()
        try:
            if not self._over:
                me.work()
        except _OverError:
            return
        except BaseException as err:  # noqa: BLE001 - raised again by run()
            self._error = self._error or err
        self._threads.remove(me)
        self._back.release()
