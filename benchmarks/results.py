"""The form of every bench's result: a table on the terminal and build/bench/NAME.json."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]


class BenchError(Exception):
    """A part of a bench could not be measured; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measure. `peer` is what it is compared with, named in the note; `ratio` is ours divided by it.

    `aim`: what `ratio` (where there is a peer, else `ours`) should reach; the note then says whether it does.
    """

    measure: str
    unit: str
    ours: float
    peer: float | None
    better: Literal["higher", "lower"]
    note: str
    aim: float | None = None

    @property
    def reached(self) -> bool:
        """Whether the aim is reached; True without one."""
        if self.aim is None:
            return True
        value = self.ours / self.peer if self.peer else self.ours
        return value >= self.aim if self.better == "higher" else value <= self.aim

    def as_json(self) -> dict[str, Any]:
        """The documented form, figures cut to four digits."""
        values = (
            asdict(self)
            | {"note": self.note + self._verdict()}
            | {"ours": _cut(self.ours), "peer": None if self.peer is None else _cut(self.peer)}
        )
        order = ("measure", "unit", "ours", "peer", "ratio", "better", "note")
        values["ratio"] = None if not self.peer else _cut(self.ours / self.peer)
        return {name: values[name] for name in order}

    def _verdict(self) -> str:
        if self.aim is None:
            return ""
        bound = "at least" if self.better == "higher" else "at most"
        unit = " times" if self.peer else f" {self.unit}"
        return f"; aim: {bound} {self.aim:g}{unit}, {'reached' if self.reached else 'NOT reached'}"


def _cut(value: float) -> float:
    return float(f"{value:.4g}")


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [f"{'measure':46} {'ours':>9} {'peer':>9} {'ratio':>6}  unit, note"]
    for row in rows:
        found = row.as_json()
        peer, ratio = ("-" if found[name] is None else f"{found[name]:g}" for name in ("peer", "ratio"))
        lines.append(f"{row.measure:46} {found['ours']:9g} {peer:>9} {ratio:>6}  {row.unit}; {found['note']}")
    return "\n".join(lines)


def write(name: str, rows: Sequence[Row]) -> Path:
    """Write build/bench/NAME.json."""
    path = ROOT / "build" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")
    return path


def write_block(path: Path, begin: str, end: str, rows: Sequence[Row]) -> None:
    """Replace what a page has between two marks with the rows as a table. Raises BenchError where the marks are missing."""
    text = path.read_text()
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise BenchError(f"{path} has no block between {begin!r} and {end!r}")
    path.write_text(before + begin + "\n" + _markdown([row.as_json() for row in rows]) + end + after)


def _markdown(rows: list[dict[str, Any]]) -> str:
    where = f"{os.cpu_count()} CPUs, Python {platform.python_version()}"
    lines = [f"Measured on a machine with {where}.", "", "| measure | ours | peer | ratio | note |", "|---|---|---|---|---|"]
    for row in rows:
        peer, ratio = ("" if row[name] is None else f"{row[name]:g}" for name in ("peer", "ratio"))
        lines.append(f"| {row['measure']} | {row['ours']:g} {row['unit']} | {peer} | {ratio} | {row['note']} |")
    return "\n".join(lines) + "\n"


def environment() -> dict[str, str]:
    """One torch thread per process, our packages importable, compiled modules kept."""
    values = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(ROOT), str(ROOT / "operator"), str(ROOT / "workload"), values.get("PYTHONPATH", "")]
    return values | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def child(what: str, command: Sequence[str], seconds: float) -> Any:
    """Run a part in a process of its own and read the JSON of its last line. Raises BenchError."""
    try:
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise BenchError(f"{what} took more than {seconds:g} s") from err
    if done.returncode:
        raise BenchError(f"{what} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError) as err:
        raise BenchError(f"{what} printed no result: {done.stdout[-500:]!r}") from err


def python(module: str, *arguments: str) -> list[str]:
    """The command of one of our own parts."""
    return [sys.executable, "-W", "ignore", "-m", module, *arguments]
