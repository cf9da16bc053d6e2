"""A small process that outlives `rljob local` by a moment and removes what a killed run leaves behind.

Ray stops its daemons when its driver dies, but not its agents, which go on for minutes. The guardian waits on a pipe whose
other end only the driver holds: when that end closes, in whichever way the driver ended, every process that still has a
file of the run's private Ray directory open is killed, and the directory is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

#: Killed processes are gone within milliseconds; this is for a machine that swaps.
DEADLINE_SECONDS = 10.0


class Guardian:
    """The driver's end: `start` before Ray, `release` after it has been shut down."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own file, an argument list
            [sys.executable, "-I", "-S", __file__, str(directory), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and killpg reach the driver's group, not the guardian
        )

    def release(self) -> None:
        """Let it clean up, and wait until it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_SECONDS + 5)


def users_of(directory: Path, *, spare: int) -> list[int]:
    """Processes that have a file below the directory open (their titles and environments are overwritten by Ray).

    `spare`: the driver, which lives on when it ends in order.
    """
    prefix = f"{directory}{os.sep}"
    spared = {str(spare), str(os.getpid())}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name not in spared and _has_open(entry, prefix):
            found.append(int(entry.name))
    return found


def sweep(directory: Path, *, spare: int) -> None:
    """Kill all users of the directory and remove it."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while directory.exists() and time.monotonic() < deadline:
        users = users_of(directory, spare=spare)
        for pid in users:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not users:
            # Again, where somebody has written meanwhile who had nothing open when the users were looked for.
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                return
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


def _has_open(entry: Path, prefix: str) -> bool:
    try:
        return any(os.readlink(link).startswith(prefix) for link in (entry / "fd").iterdir())  # noqa: PTH115
    except OSError:
        return False  # gone meanwhile, or somebody else's


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sweep(Path(sys.argv[1]), spare=int(sys.argv[2]))
