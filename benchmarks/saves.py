"""Part (d) of `benchmarks.train`: what a save and a hand-over cost a run, under `rljob local`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.local_run import watch
from benchmarks.results import BenchError, Row, child, python

STEPS, EVERY = 120, 10
#: Hand-overs measured in each mode of the cache.
CYCLES = 100
#: Milliseconds that a save may stop the engines, at the median, after the first.
LIMIT = 200


def rows() -> list[Row]:
    """Run a job that saves often; then hand-overs by themselves, with answers in flight, in each mode of the cache."""
    changes = [f"steps={STEPS}", "promptsPerStep=8", "microBatchSize=64"]
    whole = watch(
        [f"spec.algorithm.grpo.{change}" for change in changes]
        + [f"spec.checkpoint.everySteps={EVERY}", f"spec.validation.everySteps={STEPS}"],
        warm_up=1,
        seconds=240,
    )
    handovers = child("the hand-overs", python("benchmarks.handover", "--cycles", str(CYCLES), "--json"), 150)
    return judged(whole.lines) + [row for row in (Row(**found) for found in handovers) if row.measure.endswith("p50")]


def judged(lines: list[dict[str, Any]]) -> list[Row]:
    """The rows of part (d)."""
    saves = [1000 * line["seconds"]["save"] for line in lines if "save" in line["seconds"]]
    if len(saves) < 3:
        raise BenchError(f"the run saved {len(saves)} times")
    handovers = [1000 * line["seconds"]["handover"] for line in lines if "save" not in line["seconds"]]
    made = [
        Row("save, engine stopped, first", "ms", saves[0], None, "lower", "first use of Megatron's writer"),
        Row(
            "save, engine stopped, median", "ms", statistics.median(saves[1:]), None, "lower",
            f"{len(saves) - 1} saves after the first", LIMIT,
        ),
        Row("hand-over, both directions", "ms", statistics.median(handovers), None, "lower", "wall, median per step"),
    ]  # fmt: skip
    for key, name in (("handover/suspend_seconds", "to train"), ("handover/wake_seconds", "to decode")):
        times = [1000 * line[key] for line in lines if line.get(key) is not None]
        if times:
            made.append(Row(f"hand-over {name}", "ms", statistics.median(times), None, "lower", "wall, median"))
    return made


if __name__ == "__main__":
    from benchmarks.results import table

    print(table(rows()))
