"""What HTTP costs: samples a second of the copy task, played by an agent in one turn, beside the same job in process.

`make bench-http` writes build/bench/http.json, `make bench-http-page` docs/agents.md too. Both jobs train 64 answers a step
on the same data with the same model; the agent keeps 64 requests in flight. The two run one after the other, each several
times, and the best run of each counts: on a machine that does other work too the best is the least disturbed. CPU seconds are
told beside it, by kind of process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from benchmarks.local_run import KINDS, Watched, watch
from benchmarks.results import ROOT, Row, table, write, write_block

#: Steps of a run, and those at its beginning that are not counted.
STEPS, WARM_UP = 120, 20
#: Seconds that a run may take.
LONGEST = 300.0
PAGE = ROOT / "docs/agents.md"
BEGIN, END = "<!-- http: written by `make bench-http-page` -->", "<!-- end of http -->"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2, help="runs of each side")
    parser.add_argument("--page", action="store_true", help="write the table into docs/agents.md too")
    options = parser.parse_args()
    http, inside = [], []
    for _ in range(options.runs):
        http.append(_run({"agent": {"command": ["python", "-m", "rljob_workload.agents.hints", "--turns", "1"]}}, server=True))
        inside.append(_run({"builtin": "exactMatch"}, server=False))
    rows = _rows(http, inside)
    print(table(rows))
    print(f"written to {write('http', rows)}")
    if options.page:
        write_block(PAGE, BEGIN, END, rows)


def _run(environment: Mapping[str, Any], *, server: bool) -> Watched:
    manifest = yaml.safe_load((ROOT / "examples" / "http-agent.yaml").read_text())
    spec = manifest["spec"]
    spec["environment"] = dict(environment)
    spec["generation"]["server"] = {"enabled": server}
    spec["algorithm"]["grpo"]["steps"] = STEPS
    spec["checkpoint"]["everySteps"] = STEPS
    del spec["validation"]
    with tempfile.TemporaryDirectory(prefix="rljob-bench-") as directory:
        job = Path(directory) / "job.yaml"
        job.write_text(yaml.safe_dump(manifest))
        return watch([], warm_up=WARM_UP, seconds=LONGEST, job=job)


def _rate(run: Watched) -> float:
    """Samples a second, of those steps that count; the last one saves."""
    lines = [line for line in run.lines if WARM_UP <= line["step"] < STEPS]
    return float(sum(line["samples"] for line in lines[1:]) / (lines[-1]["elapsed_seconds"] - lines[0]["elapsed_seconds"]))


def _cpu(run: Watched) -> float:
    """CPU milliseconds of a step, all processes."""
    return sum(run.cpu.values()) / run.steps * 1000


def _switch(run: Watched) -> float:
    """Milliseconds that a step spends between generation and training, both ways."""
    lines = [line for line in run.lines if WARM_UP <= line["step"] < STEPS]
    seconds = sum(line["handover/suspend_seconds"] + line["handover/wake_seconds"] for line in lines)
    return float(seconds) / len(lines) * 1000


def _rows(http: list[Watched], inside: list[Watched]) -> list[Row]:
    best, peer = max(http, key=_rate), max(inside, key=_rate)
    note = "peer: in process, same job; 64 parallel requests"
    return [
        Row("HTTP: samples a second", "samples/s", _rate(best), _rate(peer), "higher", note, aim=0.5),
        Row("HTTP: CPU a step", "ms", min(map(_cpu, http)), min(map(_cpu, inside)), "lower", f"{note}; all processes"),
        *(_row_of(kind, http, inside) for kind in KINDS),
        Row("HTTP: pause and resume a step", "ms", min(map(_switch, http)), None, "lower", "between two steps", aim=50.0),
    ]


def _row_of(kind: str, http: list[Watched], inside: list[Watched]) -> Row:
    """One kind of process, of the run of each side that took the least in all."""
    ours, peers = (min(runs, key=_cpu) for runs in (http, inside))
    of_peer = peers.cpu[kind] / peers.steps * 1000
    return Row(
        f"HTTP: CPU a step, {kind}", "ms", ours.cpu[kind] / ours.steps * 1000, of_peer or None, "lower", "peer: in process"
    )


if __name__ == "__main__":
    main()
