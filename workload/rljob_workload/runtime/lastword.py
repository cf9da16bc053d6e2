"""The way out when the usual one is blocked: the report is written, and the process ends with its exit code.

A driver whose Ray has gone hangs for a minute in whichever call it makes next, and Ray then aborts the process without a
word. Two things therefore end it by themselves: the death of one of Ray's daemons, and an end that takes too long.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rljob_api.exitcodes import ExitCode

log = logging.getLogger("rljob.driver")

#: Ending in order takes about two seconds.
GRACE_SECONDS = 8.0


class LastWord:
    """Ends the process, at once or when `GRACE_SECONDS` have not been enough. `report` writes the last report."""

    def __init__(self, report: Callable[[ExitCode, str], int], leave: Callable[[int], None] = os._exit) -> None:
        self._report = report
        self._leave = leave
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def overdue(self, code: ExitCode, message: str, seconds: float = GRACE_SECONDS) -> None:
        """From now on there are so many seconds to end in order."""
        self._start(seconds, lambda: self.now(code, message))

    def exit_overdue(self, status: int, seconds: float = GRACE_SECONDS) -> None:
        """The same where the last report has been written."""
        self._start(seconds, lambda: self._exit(status))

    def cancel(self) -> None:
        """The end has come in order."""
        if self._timer is not None:
            self._timer.cancel()

    def now(self, code: ExitCode, message: str) -> None:
        """Report and exit."""
        with self._lock:
            self._exit(self._report(code, message))

    def _start(self, seconds: float, action: Callable[[], None]) -> None:
        self.cancel()
        self._timer = threading.Timer(seconds, action)
        self._timer.daemon = True
        self._timer.start()

    def _exit(self, status: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave(status)


@contextmanager
def watched(daemons: Mapping[str, int], died: Callable[[str], None]) -> Iterator[None]:
    """Call `died` when one of these processes (name: pid) ends inside the block. Waits, does not poll."""
    handles: dict[int, str] = {}
    stop, wake = os.pipe()
    poll = select.poll()
    poll.register(stop, select.POLLHUP)
    for name, pid in daemons.items():
        handle = os.pidfd_open(pid)
        handles[handle] = f"{name} (process {pid})"
        poll.register(handle, select.POLLIN)

    def wait() -> None:
        ready = [handles[fd] for fd, _ in poll.poll() if fd in handles]
        if ready:
            died(" and ".join(ready))

    thread = threading.Thread(target=wait, name="daemons", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(wake)
        thread.join(GRACE_SECONDS)
        for handle in (stop, *handles):
            os.close(handle)
