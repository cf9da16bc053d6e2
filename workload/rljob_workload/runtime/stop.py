"""SIGTERM: save the step under way and leave; at once where there is nothing to save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StoppedError(BaseException):
    """SIGTERM arrived where nothing is under way. Not an Exception: nothing in between may handle it."""


class StopSignal:
    """Whether the attempt was asked to end. `at_once` is called when it shall end without finishing its step."""

    def __init__(self, at_once: Callable[[], None] | None = None) -> None:
        self._asked = False
        self._soft = False
        self._over = False
        self._at_once = at_once

    @property
    def asked(self) -> bool:
        """SIGTERM has arrived; the driver looks after each step."""
        return self._asked

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Inside, the driver looks at `asked` after every step, and the first signal only asks."""
        self._soft = True
        try:
            yield
        finally:
            self._soft = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to SIGTERM (in the main thread only; elsewhere Python allows no handlers)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGTERM)
        self.listen()
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def listen(self) -> None:
        """Take SIGTERM over from whoever has it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._arrived)

    def over(self) -> None:
        """The attempt has ended: a signal during the clearing up changes nothing any more."""
        self._over = True

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        if not self._soft or self._asked:
            if self._at_once is not None:
                self._at_once()
            raise StoppedError(signal.Signals(number).name)
        self._asked = True
