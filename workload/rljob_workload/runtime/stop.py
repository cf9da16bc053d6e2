"""SIGTERM, Ctrl-C and their like over HTTP: save what is there and leave; at once where there is nothing to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: What a person's interrupt (SIGINT) is called in messages.
CTRL_C = "Ctrl-C"
#: The status that a shell expects of an interrupted command.
INTERRUPTED_STATUS = 130


class StoppedError(BaseException):
    """A signal arrived where nothing is under way. Not an Exception: nothing in between may handle it."""


def stop_behind(err: BaseException) -> StoppedError | None:
    """The signal that `err` comes of, if one does.

    Ray's compiled code runs our handler in the middle of its work and may wrap what the handler raises in an error of its
    own (`SystemError: ... returned a result with an exception set`), the signal being its cause.
    """
    seen: set[int] = set()
    link: BaseException | None = err
    while link is not None and id(link) not in seen:
        if isinstance(link, StoppedError):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


class StopSignal:
    """Whether the attempt was asked to end.

    `at_once` is called when it shall end without finishing what is under way, `budget` when it was asked to save and end:
    from then on it has so much time, and no more. Both are told by what. `told` answers a person's Ctrl-C, in the handler.
    """

    def __init__(
        self,
        at_once: Callable[[str], None] | None = None,
        budget: Callable[[str], None] | None = None,
        told: Callable[[], None] | None = None,
    ) -> None:
        self._by = ""
        self._over = False
        self._listening = False
        self._at_once = at_once
        self._budget = budget
        self._told = told
        self._interrupted = False
        self._ask: Callable[[], None] | None = None

    @property
    def asked(self) -> bool:
        """Somebody wants the attempt to save and end."""
        return bool(self._by)

    @property
    def by(self) -> str:
        """What asked first: `SIGTERM`, `Ctrl-C` or `a control request`."""
        return self._by

    @property
    def interrupted(self) -> bool:
        """Whether it is a Ctrl-C that the attempt ends by."""
        return self._interrupted

    @contextmanager
    def while_training(self, ask: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal only calls `ask` (also from within a signal handler): the driver saves and ends."""
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen to SIGTERM and Ctrl-C (in the main thread only; elsewhere Python allows no handlers)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.listen()
        try:
            yield
        finally:
            self._listening = False
            for number, handler in previous.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Take SIGTERM and Ctrl-C over from whoever has them."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._arrived)
            # A shell without job control starts a background command deaf to Ctrl-C, which is meant for another one.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._arrived)
            self._listening = True

    def over(self) -> None:
        """The attempt has ended: a signal during the clearing up changes nothing any more."""
        self._over = True

    def request(self) -> bool:
        """A control request for what SIGTERM means, from any thread. False: nothing here can be stopped (any more)."""
        if self._over:
            return False
        if self._by:
            return True
        if self._asks("a control request"):
            return True
        if self._listening:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._listening

    def _asks(self, by: str) -> bool:
        ask = self._ask
        if ask is None:
            return False
        self._by = by
        if self._budget is not None:
            self._budget(by)
        ask()
        return True

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        name = CTRL_C if number == signal.SIGINT else signal.Signals(number).name
        if self._over:
            return
        self._interrupted = name == CTRL_C
        if not self._by and self._asks(name):
            if self._interrupted and self._told is not None:
                self._told()
            return
        if self._at_once is not None:
            self._at_once(name)
        raise StoppedError(name)
