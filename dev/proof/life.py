"""One life of the trainer: `rljob local` as a process that is watched from outside, and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

#: Seconds from the start of a process to its first prompt, at most; a loaded machine takes its time.
READY_SECONDS = 240.0
#: Seconds until killed processes must be gone.
GONE_SECONDS = 30.0
JOURNAL = "journal.jsonl"
TRAINED = Path("trained") / "rank-00000.jsonl"


class HarnessError(Exception):
    """The proof cannot go on: the trainer did something else than train."""


class EndedError(HarnessError):
    """A life ended by itself, before it was killed and before the run was finished."""

    def __init__(self, life: Life) -> None:
        super().__init__(f"life {life.number} ended with exit code {life.process.returncode}:\n{life.last_words()}")
        self.exit_code = life.process.returncode


@dataclass
class Life:
    """A running `rljob local`. Its process group is its own, and Ray's daemons are its descendants."""

    directory: Path
    number: int
    process: subprocess.Popen[bytes]
    #: Sizes of the journal and of rank 0's record when it began.
    journal_before: int
    trained_before: int
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, job: Path, directory: Path, number: int) -> Life:
        """Start the next attempt in that directory."""
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "rljob_cli.main", "local", str(job), "--dir", str(directory), "--quiet"]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"RLJOB_JOURNAL": "1"}
        before = size(directory / JOURNAL), size(directory / TRAINED)
        with (directory / "stderr.txt").open("ab") as errors:
            process = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment, start_new_session=True)
        return cls(directory, number, process, *before)

    def wait_until(self, condition: Callable[[], bool], what: str, *, seconds: float, every: float = 0.02) -> bool:
        """Wait for something outside the process; False when the process ended in order before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                if self.process.returncode == 0:
                    return False
                raise EndedError(self)
            if time.monotonic() > deadline:
                self.kill()
                raise HarnessError(f"life {self.number}: not within {seconds:g} s: {what}\n{self.last_words()}")
            time.sleep(every)
        return True

    def wait_until_ready(self) -> bool:
        """Its first prompt has gone out."""
        return self.wait_until(self._asks, "the first prompt goes out", seconds=READY_SECONDS, every=0.1)

    def _asks(self) -> bool:
        return any("asked" in event for event in self.events())

    def events(self) -> list[dict[str, Any]]:
        """This life's part of the journal."""
        return list(read_lines(self.directory / JOURNAL, self.journal_before))

    def trained(self) -> list[int]:
        """Steps that rank 0 says it took in this life."""
        return [line["step"] for line in read_lines(self.directory / TRAINED, self.trained_before)]

    def collector(self) -> psutil.Process | None:
        """The collector, which commits the steps; None while there is none."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        return next((child for child in family if " ".join(_command(child)).startswith("ray::Collector")), None)

    def kill(self) -> None:
        """SIGKILL to the driver's process group, the ranks, the collector and Ray's daemons, all at once.

        Held processes go first: the kernel has a stopped process go on when the death of its parent orphans its process group,
        with a SIGHUP that ends it only where nobody (nohup) has it ignored.
        """
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        # The guardian lives on: sweeping up behind a killed driver is what it is for.
        doomed = [child for child in family if "guardian.py" not in " ".join(_command(child))]
        for child in filter(_is_held, doomed):
            _kill(child)
        with suppress(ProcessLookupError):  # it had ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in doomed:
            _kill(child)
        self.process.wait()
        _, alive = psutil.wait_procs(family, timeout=GONE_SECONDS)
        left = [child.name() for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        if left:
            raise HarnessError(f"life {self.number}: {', '.join(left)} outlived the driver by {GONE_SECONDS:g} s")

    def last_words(self) -> str:
        """The end of what it said."""
        return (self.directory / "stderr.txt").read_text(errors="replace")[-3000:]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_held(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def size(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def read_lines(path: Path, offset: int = 0) -> Iterator[dict[str, Any]]:
    """The complete lines of a JSONL file from a byte on. A killed writer may leave half a line, which is nobody's word."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    for text in data.split(b"\n")[:-1]:
        try:
            yield json.loads(text)
        except ValueError:
            continue
