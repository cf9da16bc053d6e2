"""A job under `rljob local`, watched from outside: its metrics, and the CPU of all its processes between two steps."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from benchmarks.results import ROOT, BenchError, environment

#: Seconds between two looks at the run.
LOOK = 0.2
#: Kinds of processes: ours by the beginning of their command lines, and Ray's daemons.
OURS = {"rank": "ray::Rank", "collector": "ray::Collector"}
AGENTS = ("rljob_workload.agents.", "agent_guard.py")
KINDS = (*OURS, "agent", "driver", "ray")


@dataclass(frozen=True, slots=True)
class Watched:
    """What a run showed."""

    #: metrics.jsonl
    lines: list[dict[str, Any]]
    #: Seconds from the command to its end.
    wall: float
    #: CPU seconds from the first line at or after `warm_up` to the last, by kind of process (`KINDS`).
    cpu: dict[str, float]
    #: Steps between the two looks.
    steps: int


def watch(changes: Sequence[str], *, warm_up: int, seconds: float, job: Path = ROOT / "examples" / "copy.yaml") -> Watched:
    """Run the job with changed fields (`spec.path=value`) to its end. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as directory:
        command = [sys.executable, "-m", "rljob_cli.main", "local", str(job), "--dir", directory, "--quiet"]
        command += [part for change in changes for part in ("--set", change)]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        looks = _looks(psutil.Process(process.pid), process, Path(directory) / "metrics.jsonl", began + seconds)
        _, errors = process.communicate()
        wall = time.monotonic() - began
        if process.returncode:
            raise BenchError(f"rljob local ended with {process.returncode}: {errors.strip()[-1500:]}")
        lines = [json.loads(text) for text in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    warm = [(step, cpu) for step, cpu in looks if step >= warm_up]
    if len(warm) < 2:
        raise BenchError(f"the run was over before it was looked at twice after step {warm_up}")
    (first, before), (last, after) = warm[0], warm[-1]
    spent = {kind: after[kind] - before[kind] for kind in after}
    return Watched(lines, wall, spent, last - first)


def _looks(
    root: psutil.Process, process: subprocess.Popen[str], metrics: Path, deadline: float
) -> list[tuple[int, dict[str, float]]]:
    """Pairs of (last step, CPU so far) until the run ends."""
    found: list[tuple[int, dict[str, float]]] = []
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.terminate()
            raise BenchError("rljob local does not end")
        step = metrics.read_text().count("\n") if metrics.exists() else 0
        if step and (not found or step > found[-1][0]):
            cpu = _cpu(root)
            # The end of a run takes processes away, and their time with them.
            if cpu is not None and (not found or all(cpu[kind] >= found[-1][1][kind] for kind in KINDS)):
                found.append((step, cpu))
        time.sleep(LOOK)
    return found


def _cpu(root: psutil.Process) -> dict[str, float] | None:
    """CPU seconds of the process tree; None while it falls apart."""
    sums = dict.fromkeys(KINDS, 0.0)
    try:
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            line = " ".join(process.cmdline())
            kind = next((kind for kind, title in OURS.items() if line.startswith(title)), _other(line))
            sums[kind] += times.user + times.system
    except psutil.NoSuchProcess:
        return None
    return sums


def _other(line: str) -> str:
    if any(name in line for name in AGENTS):
        return "agent"
    return "driver" if "rljob_" in line else "ray"
