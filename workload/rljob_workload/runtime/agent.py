"""The agent's process: started by the collector, started again when it ends, and what ends the attempt when that is no use.

What it needs to know it gets by environment: the servers' URLs and the file with the token. Nothing secret stands in its
arguments. Its output goes to a log of its own in the run's directory, the newest 32 to 64 MiB of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from rljob_api import names
from rljob_workload.runtime import agent_guard

log = logging.getLogger("rljob.collector")

#: Times in a row that the agent may end without having reported a rollout in between.
MOST_USELESS_STARTS = 3
#: Bytes of its log that are searched for its last words.
_TAIL_BYTES = 4096
#: Exit codes of a process that somebody else ended, seen by its parent or told by a shell: SIGKILL and SIGTERM.
_ENDED_FROM_OUTSIDE = frozenset(code for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number))


def agent_log(directory: Path, attempt: int) -> Path:
    """Where what an attempt's agent prints is, in the run's directory."""
    return directory / "logs" / f"agent-attempt-{attempt:06d}.log"


class AgentError(Exception):
    """The agent's process ends whenever it is started; the message has its last words."""


class AgentProcess:
    """The process and its successors. Callbacks come from a thread of this class."""

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path,
        urls: Sequence[str],
        token_file: str,
        *,
        reports: Callable[[], int],
        ended: Callable[[str, bool], None],
        failed: Callable[[AgentError], None],
    ) -> None:
        """`reports`: rollouts reported so far; `ended` (why, and whether by itself): it will be started again;
        `failed`: it will not."""
        # The very interpreter that the trainer runs in, where a name of it is asked for.
        self._command = [sys.executable if command[0] in ("python", "python3") else command[0], *command[1:]]
        self._log_file = log_file
        self._environment = {
            **os.environ,
            names.ENV_SERVER_URLS: ",".join(urls),
            names.ENV_CONTROL_TOKEN_FILE: token_file,
            "PYTHONUNBUFFERED": "1",
        }
        self._reports, self._ended, self._failed = reports, ended, failed
        self._lock = threading.Lock()
        self._guard: subprocess.Popen[str] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="agent", daemon=True)

    def start(self) -> None:
        """Start it and keep it."""
        self._thread.start()

    def expect_end(self) -> None:
        """It may end now, and is not started again."""
        with self._lock:
            self._closing = True

    def close(self, seconds: float = agent_guard.GRACE_SECONDS + 1.0) -> None:
        """End it: SIGTERM to its group, SIGKILL a moment later."""
        self.expect_end()
        guard = self._guard
        if guard is None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        self._thread.join(seconds)
        if self._thread.is_alive():
            guard.send_signal(signal.SIGKILL)

    def _keep(self) -> None:
        try:
            self._keep_running()
        except (OSError, ValueError) as err:
            self._failed(AgentError(f"the agent cannot be started: {err} (environment.agent.command {self._command})"))
        except Exception as err:  # the thread's end would be nobody's: an agent is waited for that is not there
            log.exception("the agent cannot be kept")
            self._failed(AgentError(f"the agent cannot be kept: {type(err).__name__}: {err}"))

    def _keep_running(self) -> None:
        useless = 0
        while True:
            before = self._reports()
            with self._log_file.open("ab") as output:
                end = self._run(output, self._environment)
            if end is None:
                return
            useless = useless + 1 if self._reports() == before else 0
            what, by_itself = end
            why = f"the agent ended with {what}"
            if useless == MOST_USELESS_STARTS:
                self._failed(AgentError(f"{why}, {useless} times without having reported a rollout; {self._last_words()}"))
                return
            log.warning("%s; it is started again", why)
            self._ended(why, by_itself)

    def _run(self, output: IO[bytes], environment: Mapping[str, str]) -> tuple[str, bool] | None:
        """One life of it; how it ended and whether by itself, or None where it was to end."""
        with self._lock:
            if self._closing:
                return None
            self._guard = guard = subprocess.Popen(  # noqa: S603 - our own file, an argument list
                [sys.executable, "-I", "-S", agent_guard.__file__, str(self._log_file), *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                text=True,
                start_new_session=True,
            )
        assert guard.stdout is not None
        said: dict[str, object] = {}
        for line in guard.stdout:
            said |= json.loads(line)
            if "pid" in said and "exit" not in said:
                log.info("the agent runs as process %s: %s", said["pid"], self._command)
        guard.wait()
        with self._lock:
            if self._closing:
                return None
        if "exit" not in said and "error" not in said:
            self._end_what_is_left()
        if "error" in said:
            return f"no start ({said['error']})", True
        if "exit" not in said:
            return "its guard", False
        return f"exit code {said['exit']}", said["exit"] not in _ENDED_FROM_OUTSIDE

    def _end_what_is_left(self) -> None:
        """The guard was killed, so nobody else ends what the agent had started: it is known by the environment it inherited."""
        mark = f"\0{names.ENV_SERVER_URLS}={self._environment[names.ENV_SERVER_URLS]}\0".encode()
        deadline = time.monotonic() + 1.0
        while (left := _with_environment(mark)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.005)  # they end, or had just started others

    def _last_words(self) -> str:
        with self._log_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return f"its last line in {self._log_file}: {lines[-1][:300]}" if lines else f"{self._log_file} is empty"


def _with_environment(mark: bytes) -> list[int]:
    """Processes that were started with a variable; not those that only wait to be waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it ended, or is somebody else's
                if mark in b"\0" + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found
