"""Part (a) of `benchmarks.train`: what the stack costs over its two working parts, on the copy task.

    python -m benchmarks.stack STEPS     the parts alone, in one process: prints one JSON object

The parts (the engine answering, the train step) are timed inside the loop of one process, so that both sides see the same
batches with the same lengths; the whole is the same job under `rljob local`: driver, collector and rank on Ray. The two
halves take turns, so that whatever else the machine does meets them alike, and are compared by the medians of the turns.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.local_run import Watched, watch
from benchmarks.loop import Loop, one_rank, spec_of
from benchmarks.results import Row, child, python

WARM_UP, STEPS = 10, 150
#: Times that each half runs.
TURNS = 3
#: Phases of metrics.jsonl that every step has.
PHASES = ("generate", "train", "handover", "commit")
LIMIT = 1.25
#: Steps over which the pace of a job is taken.
PACE_STEPS = 10
#: Processes of a job.
SHARES = {
    "rank": "per step: engine, train step, and being called",
    "collector": "per step: ledger, environment, calls",
    "driver": "per step: decisions, metrics, calls; the guardian with it",
    "ray": "per step, not counted above: raylet, GCS, agents, idle workers",
}


def parts(steps: int) -> dict[str, Any]:
    """Seconds per step of each part of the loop in this process, after the warm-up."""
    spec = spec_of({"algorithm.grpo": {"steps": 10_000}})
    one_rank(spec)
    loop = Loop(spec)
    for _ in range(WARM_UP):
        loop.step()
    loop.clock.reset()
    walls: list[dict[str, float]] = []
    before: dict[str, float] = {}
    for _ in range(steps - WARM_UP):
        loop.step()
        now = {part: cost.wall for part, cost in loop.clock.costs.items()}
        walls.append({part: now[part] - before.get(part, 0.0) for part in now})
        before = now
    count = steps - WARM_UP
    return {
        "cpu": {part: cost.cpu / count for part, cost in loop.clock.costs.items()},
        "wall": {part: statistics.median(wall.get(part, 0.0) for wall in walls) for part in before},
        "samples": sum(info.samples for info in loop.infos[WARM_UP:]) / count,
        "filtered": sum(len(info.filtered) for info in loop.infos[WARM_UP:]) / count,
    }


def rows() -> list[Row]:
    """Measure both halves, in turns."""
    alone, whole = [], []
    for _ in range(TURNS):
        alone.append(child("the parts alone", python("benchmarks.stack", str(STEPS)), 180))
        whole.append(_job())
    return judged(alone, whole)


def _job() -> Watched:
    only_at_the_end = ("algorithm.grpo.steps", "checkpoint.everySteps", "validation.everySteps")
    return watch([f"spec.{path}={STEPS}" for path in only_at_the_end], warm_up=WARM_UP, seconds=240)


@dataclass(frozen=True, slots=True)
class _Half:
    """One run of the parts alone: milliseconds per step of CPU and wall."""

    engine: dict[str, float]
    train: dict[str, float]
    loop: dict[str, float]

    @classmethod
    def of(cls, found: dict[str, Any]) -> _Half:
        parts = {kind: {part: 1000 * seconds for part, seconds in found[kind].items()} for kind in ("cpu", "wall")}
        return cls(
            engine={kind: parts[kind]["engine"] + parts[kind]["submit"] for kind in parts},
            train={kind: parts[kind]["train"] for kind in parts},
            loop={kind: sum(parts[kind].values()) for kind in parts},
        )


def judged(alone: Sequence[dict[str, Any]], whole: Sequence[Watched]) -> list[Row]:
    """The rows of part (a): medians over the turns."""
    halves = [_Half.of(found) for found in alone]
    engine, train, loop = ({kind: _median(getattr(half, name)[kind] for half in halves) for kind in ("cpu", "wall")}
                           for name in ("engine", "train", "loop"))  # fmt: skip
    sums = {kind: engine[kind] + train[kind] for kind in engine}
    cpu = {kind: _median(1000 * run.cpu[kind] / run.steps for run in whole) for kind in whole[0].cpu}
    ours = _median(sum(1000 * run.cpu[kind] / run.steps for kind in run.cpu if kind != "ray") for run in whole)
    lines = [line for run in whole for line in run.lines[WARM_UP:-1]]  # the last step saves and validates
    phases = {phase: 1000 * _median(line["seconds"].get(phase, 0.0) for line in lines) for phase in PHASES}
    same = f"per step of {alone[0]['samples']:.0f} answers"
    filtered = [statistics.fmean(len(line["filtered"]) for line in lines), statistics.fmean(one["filtered"] for one in alone)]
    peer = f"peer: the two parts alone; medians of {len(halves)} turns"
    load = f"{peer}; {filtered[0]:.1f} prompts a step were filtered, {filtered[1]:.1f} in the parts' loop"
    return [
        Row("engine alone, CPU", "ms", engine["cpu"], None, "lower", f"{same}, submission included"),
        Row("train step alone, CPU", "ms", train["cpu"], None, "lower", same),
        Row("loop in one process, CPU", "ms", loop["cpu"], sums["cpu"], "lower", peer, LIMIT),
        Row("loop in one process, wall", "ms", loop["wall"], sums["wall"], "lower", peer, LIMIT),
        Row("whole job, CPU", "ms", ours, sums["cpu"], "lower", load, LIMIT),
        Row(
            "whole job, wall",
            "ms",
            1000 * _median(map(_pace, whole)),
            sums["wall"],
            "lower",
            f"{peer}; from step to step",
            LIMIT,
        ),
        *(Row(f"whole job's {kind}, CPU", "ms", cpu[kind], None, "lower", note) for kind, note in SHARES.items()),
        *(Row(f"phase {phase}, wall", "ms", value, None, "lower", "median") for phase, value in phases.items()),
    ]


def _pace(run: Watched) -> float:
    """Seconds from one step to the next, as the run's own clock counts them (to the millisecond, hence over ten steps)."""
    at = [line["elapsed_seconds"] for line in run.lines[WARM_UP:-1]]
    return _median((later - earlier) / PACE_STEPS for earlier, later in zip(at, at[PACE_STEPS:], strict=False))


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    print(json.dumps(parts(int(sys.argv[1]))))
