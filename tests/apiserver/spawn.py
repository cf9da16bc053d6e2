"""Operators by the hundred: processes of their own that are forked from one which has everything imported.

What such a process runs is the operator's own entry point with the arguments and environment of `python -m rljob_operator`; it
is killed and waited for like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

# pytest: the main module of the tests, which multiprocessing imports in each child.
_PRELOADED = ["pytest", "rljob_operator.main", "rljob_operator.service", "rljob_operator.shell", __name__]


class Spawned:
    """A started operator, with the part of Popen that tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        # Not daemonic: those are ended by a signal that an operator takes for the end of its service.
        self._process: BaseProcess = context.Process(target=_run, args=(list(arguments), dict(environment), str(log)))
        self._process.start()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, waited for."""
        self._process.join(timeout)
        return self._process.exitcode


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with Path(log).open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    from rljob_operator.main import main

    sys.exit(main(arguments))
