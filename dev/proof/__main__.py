"""`make proof`, `make proof-slow`: kill the real trainer, and count what was lost.

python -m dev.proof [--seed N] [--steps N] [--kills N] [--each N] [--keep DIR] [--judge DIR] [--no-publish]
python -m dev.proof --slow [--seed N] [--kills N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from dev.proof.job import ROOT, Sizes
from dev.proof.publish import publish, summary
from dev.proof.run import Outcome, ProofRun, judged

STEPS, KILLS, EACH = 2000, 24, 4
#: The slow form: so many kills, in short runs of so many kills and steps each.
SLOW_KILLS, SHORT_KILLS, SHORT_STEPS = 200, 10, 150


def main() -> int:
    """0: nothing lost, nothing trained twice, every skipped prompt has a cause that holds."""
    parser = argparse.ArgumentParser(prog="proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--each", type=int, default=EACH, help="kills at each of the wanted moments, at least")
    parser.add_argument("--slow", action="store_true", help=f"{SLOW_KILLS} kills in short runs; writes build/proof-slow.json")
    parser.add_argument("--judge", type=Path, help="no new run: judge and publish the one that --keep has left here")
    parser.add_argument("--keep", type=Path, help="leave the run here")
    parser.add_argument("--no-publish", action="store_true", help="leave docs/proof and the README as they are")
    options = parser.parse_args()
    if options.slow:
        return slow(options.seed, options.kills or SLOW_KILLS)
    kills = options.kills or KILLS
    if options.judge:
        outcome = judged(options.judge)
    else:
        outcome = one_run(Sizes(options.steps), options.seed, kills, options.each, options.keep)
    result = summary(outcome)
    write("proof.json", result)
    if outcome.audit.clean and not options.no_publish and (outcome.sizes.steps, len(outcome.kills) >= KILLS) == (STEPS, True):
        publish(outcome, ROOT)
    print(json.dumps({name: value for name, value in result.items() if name not in ("table", "skipped_ordinals")}, indent=2))
    return 0 if outcome.audit.clean else 1


def one_run(sizes: Sizes, seed: int, kills: int, each: int, keep: Path | None) -> Outcome:
    """A run in a directory of its own, which stays where `keep` says, and where the run was not clean."""
    base = keep or Path(tempfile.mkdtemp(prefix="rljob-proof-"))
    shutil.rmtree(base, ignore_errors=True)
    outcome = ProofRun(base, sizes, seed).run(kills, each)
    if not outcome.audit.clean:
        print(f"the run is left in {base}", file=sys.stderr)
    elif keep is None:
        shutil.rmtree(base)
    return outcome


def slow(seed: int, kills: int) -> int:
    """Many short runs: resumes from young checkpoints, and kills that follow each other closely."""
    total: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    examples: list[str] = []
    runs = 0
    while sum(hits.values()) < kills:
        outcome = one_run(Sizes(SHORT_STEPS, every_steps=5), seed + runs, SHORT_KILLS, 2, None)
        result = summary(outcome)
        total.update(
            {name: result[name] for name in ("lost", "trained_twice", "violations", "handed_out", "skipped", "resumes")}
        )
        hits.update(outcome.hits)
        examples += outcome.audit.violations
        runs += 1
        print(f"run {runs}: {sum(hits.values())} kills, lost {total['lost']}, trained twice {total['trained_twice']}")
    command = f"make proof-slow SEED={seed}"
    write("proof-slow.json", {"command": command, "runs": runs, "kills": sum(hits.values()), "hits": dict(hits), **total,
                              "examples": examples[:10]})  # fmt: skip
    return 1 if total["lost"] or total["trained_twice"] or total["violations"] else 0


def write(name: str, result: dict[str, Any]) -> None:
    """One file of build/."""
    path = ROOT / "build" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
