"""`make bench-train`: the trainer's speed, in four parts; about ten minutes, one torch thread per process.

    python -m benchmarks.train [--only a b c d] [--page]

a  what the stack costs over its two working parts, the engine and the train step
b  TRL's GRPOTrainer at the same model size, batch and task
c  async against sync of the same code on answers of very uneven length
d  how long a save and a hand-over stop the engines

Writes build/bench/train.json and prints its table; `--page` writes the table into docs/trainer.md too. Each part runs in
processes of its own. A part that cannot be measured ends the bench with exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import rival, saves, stack
from benchmarks.results import ROOT, BenchError, Row, child, python, table, write, write_block
from benchmarks.uneven import CONTEXT, MEDIAN, P99_OVER_MEDIAN, PROMPTS, SLOTS, STEPS_PER_ROUND

PAGE = ROOT / "docs" / "trainer.md"
BEGIN, END = "<!-- speed: written by `make bench-train-page` -->", "<!-- end of speed -->"
ROUNDS = 4
ASYNC_AIM = 1.5


def uneven_rows() -> list[Row]:
    """Part (c)."""
    found = child("async against sync", python("benchmarks.uneven", "--rounds", str(ROUNDS)), 420)
    arms, facts = found["arms"], found["lengths"]
    sync = arms["0"]
    same = (
        f"log-normal lengths, median {MEDIAN}, p99 {P99_OVER_MEDIAN} times that "
        f"(drawn: {facts['median']:g}, {facts['p99']:g}), "
        f"context {CONTEXT}, {PROMPTS} prompts a step, {SLOTS} engine slots, {ROUNDS * STEPS_PER_ROUND} steps each, in turns"
    )
    rows: list[Row] = []
    for age in ("1", "2"):
        arm = arms[age]
        for kind, unit in (("wall", "samples/s"), ("cpu", "samples/CPU s")):
            rate, base = (side["samples"] / side[kind] for side in (arm, sync))
            rows.append(Row(f"async, age {age}: {unit}", unit, rate, base, "higher", f"peer: sync; {same}", ASYNC_AIM))
        steps = ROUNDS * STEPS_PER_ROUND
        rows.append(
            Row(f"async, age {age}: engine iterations", "per step", arm["iterations"] / steps, sync["iterations"] / steps,
                "lower", f"peer: sync; oldest answer trained {arm['oldest_age']:g} versions after its first token")
        )  # fmt: skip
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {"a": stack.rows, "b": rival.rows, "c": uneven_rows, "d": saves.rows}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), default=sorted(PARTS), help="these parts only")
    parser.add_argument("--page", action="store_true", help="write the table into docs/trainer.md")
    options = parser.parse_args()
    rows: list[Row] = []
    try:
        for part in options.only:
            print(f"part {part} ...", file=sys.stderr, flush=True)
            rows += PARTS[part]()
    except BenchError as err:
        print(f"bench-train: {err}", file=sys.stderr)
        return 1
    print(table(rows))
    print(f"written to {write('train', rows).relative_to(ROOT)}")
    if options.page:
        write_page(PAGE, rows)
    return 0


def write_page(path: Path, rows: list[Row]) -> None:
    """Replace the page's generated block."""
    write_block(path, BEGIN, END, rows)


if __name__ == "__main__":
    sys.exit(main())
