"""A small process between the collector and the agent's: the agent lives no longer than either.

It starts the agent in a process group of its own and waits for two things: the agent's end, which it reports on its standard
output, and the end of its standard input, which only the collector holds. When that closes, in whichever way the collector
ended, the agent and all that it started are killed, also what has a session of its own or has lost its parent: the kernel gives
us such orphans. Should this process be killed itself, the kernel kills the agent, and the collector what the agent started.
What the agent prints goes through here into a log of bounded size, which lies on the checkpoints' volume.
Python's standard library only: it is run as a file, without site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: Seconds between SIGTERM and SIGKILL where the end is in order.
GRACE_SECONDS = 1.5
#: Bytes of the agent's log; when it is full it becomes the earlier one, whose name ends with `.1`, and a new one begins.
LOG_BYTES = 32 * 2**20
_READ_BYTES = 65536
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Log:
    """The newest output: at most `LOG_BYTES`, and as much again of what was before."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)

    def write(self, data: bytes) -> None:
        """Keep it, unless there is no room for it on the disk: the agent goes on."""
        with contextlib.suppress(OSError):
            if self._size and self._size + len(data) > LOG_BYTES:
                self._path.replace(f"{self._path}.1")
                self._file.close()
                self._file = self._path.open("ab", buffering=0)
                self._size = 0
            self._size += self._file.write(data)


def main(log_file: str, command: Sequence[str]) -> int:
    """Run the command; see above."""
    # Ray ignores SIGCHLD in its processes. Inherited, that would hide every exit status: from us, and from the agent.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log = Log(log_file)
    try:
        agent = subprocess.Popen(  # noqa: S603 - an argument list, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_as_an_agent,
        )
    except (OSError, ValueError) as err:
        print(json.dumps({"error": str(err)}), flush=True)
        return 1
    print(json.dumps({"pid": agent.pid}), flush=True)
    assert agent.stdout is not None
    output, ended = agent.stdout.fileno(), os.pidfd_open(agent.pid)
    os.set_blocking(output, False)
    signal.signal(signal.SIGCHLD, lambda *_: _reap(agent.pid))
    _reap(agent.pid)
    if not _until({ended, sys.stdin.fileno()}, output, log, None) & {ended}:
        _signal(agent, signal.SIGTERM)
        _until({ended}, output, log, GRACE_SECONDS)
    code = agent.poll()
    _signal(agent, signal.SIGKILL)  # what it started ends with it
    agent.wait()
    _end_orphans()
    _copy(output, log, LOG_BYTES)
    try:
        print(json.dumps({"exit": code if code is not None else agent.returncode}), flush=True)
    except BrokenPipeError:
        return 1  # nobody is left who would read it
    return 0


def _until(events: set[int], output: int, log: Log, seconds: float | None) -> set[int]:
    """Copy output until one of the events is there, or so many seconds have passed. Returns those that are."""
    deadline = None if seconds is None else time.monotonic() + seconds
    watched = {*events, output}
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = set(select.select(watched, [], [], left)[0])
        if output in ready and not _copy(output, log, _READ_BYTES):
            watched.discard(output)  # it has closed its output
        if ready & events or left == 0.0:
            return ready & events


def _copy(output: int, log: Log, most: int) -> bool:
    """Copy what is there, about `most` bytes of it. Returns whether more may come."""
    while most > 0:
        try:
            data = os.read(output, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        log.write(data)
        most -= len(data)
    return True


def _reap(spared: int) -> None:
    """Orphans that have ended are not kept; the agent's own end is waited for elsewhere."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != spared:
            os.waitpid(ended.si_pid, 0)


def _end_orphans() -> None:
    """The agent has ended and was waited for: every child that there is was left to us by something that it started."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they need no waiting for
    deadline = time.monotonic() + 1.0
    while (children := _children()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)  # theirs are ours next


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
                found += [int(entry.name)] if int(parent) == os.getpid() else []
    return found


def _as_an_agent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in signal.valid_signals():  # whatever the processes above it ignore or block is nothing to the agent
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _signal(agent: subprocess.Popen[bytes], number: int) -> None:
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            os.killpg(agent.pid, number)
        except ProcessLookupError:
            return  # the group is empty
        except PermissionError:
            time.sleep(0.01)  # a member is changing its identity
            continue
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
