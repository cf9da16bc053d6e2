"""Part (a) of `benchmarks.train`: what the stack costs over its two working parts, on the copy task.

    python -m benchmarks.stack STEPS     the parts alone, in one process: prints one JSON object

The parts (the engine answering, the train step) are timed inside the loop of one process, so that both sides see the same
batches with the same lengths; the whole is the same job under `rljob local`: driver, collector and rank on Ray.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from benchmarks.local_run import Watched, watch
from benchmarks.loop import Loop, one_rank, spec_of
from benchmarks.results import Row, child, python

WARM_UP, STEPS = 10, 150
#: Phases of metrics.jsonl that every step has.
PHASES = ("generate", "train", "handover", "commit")
LIMIT = 1.25
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
    """Measure both sides."""
    alone = child("the parts alone", python("benchmarks.stack", str(STEPS)), 180)
    whole = watch(
        [f"spec.algorithm.grpo.steps={STEPS}", f"spec.checkpoint.everySteps={STEPS}", f"spec.validation.everySteps={STEPS}"],
        warm_up=WARM_UP,
        seconds=240,
    )
    return judged(alone, whole)


def judged(alone: dict[str, Any], whole: Watched) -> list[Row]:
    """The rows of part (a)."""
    lines = whole.lines[WARM_UP:-1]  # the last step saves and validates
    phases = {phase: statistics.median(line["seconds"].get(phase, 0.0) for line in lines) for phase in PHASES}
    filtered = statistics.fmean(len(line["filtered"]) for line in lines)
    engine = {kind: alone[kind]["engine"] + alone[kind]["submit"] for kind in ("cpu", "wall")}
    sums = {kind: 1000 * (engine[kind] + alone[kind]["train"]) for kind in ("cpu", "wall")}
    loop = {kind: 1000 * sum(alone[kind].values()) for kind in ("cpu", "wall")}
    same = f"per step of {alone['samples']:.0f} answers"
    load = f"{same}; {filtered:.1f} prompts a step were filtered, {alone['filtered']:.1f} in the parts' loop"
    cpu = {kind: 1000 * seconds / whole.steps for kind, seconds in whole.cpu.items()}
    ours = sum(seconds for kind, seconds in cpu.items() if kind != "ray")
    limit = f"limit {LIMIT:g} times"
    return [
        Row("engine alone, CPU", "ms", 1000 * engine["cpu"], None, "lower", f"{same}, submission included"),
        Row("train step alone, CPU", "ms", 1000 * alone["cpu"]["train"], None, "lower", same),
        Row("loop in one process, CPU", "ms", loop["cpu"], sums["cpu"], "lower", f"peer: the two parts alone; {limit}"),
        Row("loop in one process, wall", "ms", loop["wall"], sums["wall"], "lower", f"peer: the two parts alone; {limit}"),
        Row("whole job, CPU", "ms", ours, sums["cpu"], "lower", f"peer: the two parts; {limit}; {load}"),
        Row(
            "whole job, wall",
            "ms",
            1000 * sum(phases.values()),
            sums["wall"],
            "lower",
            f"medians; peer: the two parts; {limit}",
        ),
        *(Row(f"whole job's {kind}, CPU", "ms", cpu[kind], None, "lower", note) for kind, note in SHARES.items()),
        *(Row(f"phase {phase}, wall", "ms", 1000 * seconds, None, "lower", "median") for phase, seconds in phases.items()),
    ]


if __name__ == "__main__":
    print(json.dumps(parts(int(sys.argv[1]))))
