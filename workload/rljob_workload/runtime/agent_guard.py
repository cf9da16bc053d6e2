"""A small process between the collector and the agent's: the agent lives no longer than either.

It starts the agent in a process group of its own and waits for two things: the agent's end, which it reports on its standard
output, and the end of its standard input, which only the collector holds. When that closes, in whichever way the collector
ended, the whole group is killed. Should this process be killed itself, the kernel kills the agent (and the collector notices).
Python's standard library only: it is run as a file, without site-packages.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

#: Seconds between SIGTERM and SIGKILL where the end is in order.
GRACE_SECONDS = 1.5
_PR_SET_PDEATHSIG = 1


def main(command: Sequence[str]) -> int:
    """Run the command; see above."""
    try:
        agent = subprocess.Popen(  # noqa: S603 - an argument list, no shell
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0, preexec_fn=_die_with_parent
        )
    except (OSError, ValueError) as err:
        print(json.dumps({"error": str(err)}), flush=True)
        return 1
    print(json.dumps({"pid": agent.pid}), flush=True)
    ended = os.pidfd_open(agent.pid)
    ready, _, _ = select.select([sys.stdin, ended], [], [])
    if ended not in ready:
        _signal(agent, signal.SIGTERM)
        select.select([ended], [], [], GRACE_SECONDS)
    code = agent.poll()
    _signal(agent, signal.SIGKILL)  # what it started ends with it
    agent.wait()
    try:
        print(json.dumps({"exit": code if code is not None else agent.returncode}), flush=True)
    except BrokenPipeError:
        return 1  # nobody is left who would read it
    return 0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    sys.exit(main(sys.argv[1:]))
