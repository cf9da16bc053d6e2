"""How fast the trainer is under `rljob local`: steps/s, samples/s, and where a step's time goes.

    .venv/bin/python -m benchmarks.train [--job examples/copy.yaml] [--out build/bench/train.json]

Runs the job to its end in a fresh directory, reads its metrics.jsonl and prints a table. The first steps are left out of
the rates (imports, allocations); the time to the target counts everything from the first prompt on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WARM_UP = 10
#: Phases of metrics.jsonl in the order of a step.
PHASES = ("generate", "train", "handover", "commit", "save", "validate")


def main() -> int:
    """Run the job and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "copy.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "train.json")
    parser.add_argument("--set", metavar="spec.path=value", action="append", default=[], help="as in `rljob local`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as directory:
        wall = run(options.job, Path(directory), options.set)
        lines = [json.loads(text) for text in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
        report = json.loads((Path(directory) / "progress.json").read_text())
    rows = measures(lines, report, wall)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=2) + "\n")
    for row in rows:
        print(f"{row['measure']:28} {row['ours']:>10} {row['unit']:12} {row['note']}")
    print(f"written to {options.out}")
    return 0


def run(job: Path, directory: Path, changes: list[str]) -> float:
    """The job under `rljob local`; returns its wall-clock seconds."""
    command = [sys.executable, "-m", "rljob_cli.main", "local", str(job), "--dir", str(directory), "--quiet"]
    command += [part for change in changes for part in ("--set", change)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.monotonic()
    subprocess.run(command, check=True, env=environment)
    return time.monotonic() - began


def measures(lines: list[dict[str, Any]], report: dict[str, Any], wall: float) -> list[dict[str, Any]]:
    """The rows of train.json."""
    warm = lines[WARM_UP:]
    busy = {phase: sum(line["seconds"].get(phase, 0.0) for line in warm) for phase in PHASES}
    step_seconds = sum(busy[phase] for phase in ("generate", "train", "handover", "commit"))
    elapsed = warm[-1]["elapsed_seconds"] - lines[WARM_UP - 1]["elapsed_seconds"]
    samples = sum(line["samples"] for line in warm)
    finished = report["finished"]
    first = lines[0]
    rows = [
        row("steps per second", "steps/s", len(warm) / elapsed, "higher", "with saves and validations"),
        row("steps per second, bare", "steps/s", len(warm) / step_seconds, "higher", "without saves and validations"),
        row("samples per second", "samples/s", samples / elapsed, "higher", "with saves and validations"),
        row("time to the end", "s", lines[-1]["elapsed_seconds"], "lower", f"step {len(lines)}, {finished['message']}"),
        row("start", "s", wall - lines[-1]["elapsed_seconds"], "lower", "Ray, imports, model; and shutdown"),
        row("first step", "s", first["elapsed_seconds"], "lower", "first use of every code path"),
    ]
    for phase in PHASES:
        rows.append(row(f"share of {phase}", "%", 100 * busy[phase] / elapsed, "lower", per_step(warm, phase)))
    rest = elapsed - sum(busy.values())
    rows.append(row("share of the rest", "%", 100 * rest / elapsed, "lower", "metrics, progress, logs"))
    return rows


def per_step(lines: list[dict[str, Any]], phase: str) -> str:
    """The median of a phase over the steps that have it."""
    seconds = sorted(line["seconds"][phase] for line in lines if phase in line["seconds"])
    if not seconds:
        return "never"
    return f"median {1000 * seconds[len(seconds) // 2]:.1f} ms over {len(seconds)} steps"


def row(measure: str, unit: str, ours: float, better: str, note: str) -> dict[str, Any]:
    """One row of the common form of all benchmarks."""
    return {
        "measure": measure,
        "unit": unit,
        "ours": round(ours, 2),
        "peer": None,
        "ratio": None,
        "better": better,
        "note": note,
    }


if __name__ == "__main__":
    sys.exit(main())
