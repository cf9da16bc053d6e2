"""`make proof-sim`: ten thousand seeded schedules, the mutants, and the rivals' table for docs/lossless.md.

python -m rljob_workload.core.simulation.proof [--schedules N] [--first SEED] [--no-publish]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rljob_workload.core.simulation import publish
from rljob_workload.core.simulation.mutants import MUTANTS
from rljob_workload.core.simulation.settings import SimSettings, random_schedule
from rljob_workload.core.simulation.world import Outcome, World

SCHEDULES = 10_000
#: Schedules that a mutant may survive before it counts as not caught.
MUTANT_SCHEDULES = 300


@dataclass(slots=True)
class Tally:
    """All schedules together."""

    schedules: int = 0
    prompts: int = 0
    crashes: int = 0
    operations: int = 0
    skipped: int = 0
    answered_again_after_crashes: int = 0
    withdrawn_tries: int = 0
    lost: int = 0
    trained_twice: int = 0
    invariant_violations: int = 0

    def add(self, outcome: Outcome) -> None:
        """One more schedule."""
        self.schedules += 1
        self.prompts += outcome.counts.handed_out
        self.crashes += outcome.crashes
        self.operations += outcome.operations
        self.skipped += outcome.counts.skipped
        self.answered_again_after_crashes += outcome.verdict.asked_again_after_crash
        self.withdrawn_tries += outcome.verdict.withdrawn
        self.lost += outcome.verdict.lost
        self.trained_twice += outcome.verdict.trained_twice
        self.invariant_violations += outcome.violations

    def merge(self, other: Tally) -> None:
        """Another worker's schedules."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def run_schedules(seeds: Iterable[int]) -> tuple[Tally, list[str]]:
    """Run schedules; the failing ones as commands, each with what was found."""
    tally, failing = Tally(), []
    for seed in seeds:
        settings = random_schedule(seed)
        outcome = World(settings).run()
        tally.add(outcome)
        if not outcome.clean:
            failing.append(settings.command())
    return tally, failing


def catch(number: int, schedules: int = MUTANT_SCHEDULES) -> dict[str, Any]:
    """The first schedule in which the auditor catches a mutant; `schedule` is None when it survives them all."""
    mutant = MUTANTS[number]
    for seed in range(schedules):
        settings = replace(random_schedule(seed), source=mutant.source)
        with mutant.applied():
            verdict = World(settings).run().verdict
        if verdict.lost or verdict.trained_twice or verdict.violations:
            found = {"lost": verdict.lost, "trained_twice": verdict.trained_twice, "violations": verdict.violations}
            return {"mutant": mutant.name, "schedule": settings.command(), **found, "example": (verdict.examples or [""])[0]}
    return {"mutant": mutant.name, "schedule": None}


#: The table's lines: its name there, the rule, and whether the buffer is restored. All but the first take groups in free order.
WAITING = "ledger, waiting"
RIVALS = (
    (WAITING, "ledger", True),
    ("ledger", "ledger", True),
    ("live-cursor", "live-cursor", False),
    ("live-cursor + buffer", "live-cursor", True),
    ("frontier + buffer", "frontier", True),
    ("low-water", "low-water", False),
    ("cut + buffer", "cut", True),
    ("consumed-set", "consumed-set", False),
)


def rival(task: tuple[tuple[str, str, bool], float]) -> dict[str, Any]:
    """One line of the table: one pass over 19,200 prompts, 17 crashes."""
    (name, rule, buffer), failure_rate = task
    settings = SimSettings(
        seed=1, prompts=19_200, rows=30_000, crashes=17, failure_rate=failure_rate, rule=rule, load_replay_buffer=buffer,
        withdrawal_rate=0.0, filter_rate=0.0, bad_rows=0.0, answer_timeout=1000.0, free_order=name != WAITING,
    )  # fmt: skip
    outcome = World(settings).run()
    verdict = outcome.verdict
    return {
        "rule": name,
        "failure_rate": failure_rate,
        "lost": verdict.lost,
        "trained_again": verdict.trained_twice,
        "extra_answers_percent": round(100 * verdict.extra_answers / 19_200, 1),
        "crashes": outcome.crashes,
        "command": settings.command(),
    }


def main() -> int:
    """Run everything; 0 when nothing was lost, nothing trained twice, and every mutant caught."""
    parser = argparse.ArgumentParser(prog="proof-sim", description=__doc__)
    parser.add_argument("--schedules", type=int, default=SCHEDULES)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--no-publish", action="store_true", help="leave docs/lossless.md as it is")
    options = parser.parse_args()
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        rivals = pool.map_async(rival, [(line, rate) for rate in (0.0, 0.01) for line in RIVALS], chunksize=1)
        seeds = range(options.first, options.first + options.schedules)
        tally, failing = Tally(), list[str]()
        chunks = [seeds[at : at + 50] for at in range(0, len(seeds), 50)]
        for part, commands in pool.imap_unordered(run_schedules, chunks):
            tally.merge(part)
            failing += commands
        caught = pool.map(catch, range(len(MUTANTS)), chunksize=1)
        table = rivals.get()
    survivors = [row["mutant"] for row in caught if row["schedule"] is None]
    result = {**asdict(tally), "failing": failing, "mutants": caught, "rules": table}
    path = Path("build/proof-sim.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    if not options.no_publish and options.schedules == SCHEDULES:
        publish.publish(Path("docs"), result)
    print(publish.summary(result))
    print(f"{time.monotonic() - began:.0f} s; {path}")
    for command in failing[:20]:
        print(f"FAILED: {command}", file=sys.stderr)
    for name in survivors:
        print(f"NOT CAUGHT: {name}", file=sys.stderr)
    return 1 if failing or survivors else 0


if __name__ == "__main__":
    sys.exit(main())
