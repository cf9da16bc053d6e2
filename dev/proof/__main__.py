"""`make proof`, `make proof-slow`: kill the real trainer, and count what was lost.

python -m dev.proof [--seed N] [--steps N] [--kills N] [--each N] [--no-publish]
python -m dev.proof --slow [--seed N] [--kills N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dev.proof.job import ROOT, Sizes
from dev.proof.run import Outcome, ProofRun


def main() -> int:
    """0: nothing lost, nothing trained twice, every skipped prompt has a cause that holds."""
    parser = argparse.ArgumentParser(prog="proof", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--each", type=int, default=4, help="kills at each of the wanted moments, at least")
    parser.add_argument("--no-publish", action="store_true", help="leave docs/proof and the README as they are")
    parser.add_argument("--judge", type=Path, help="no new run: judge and publish the one that --keep has left here")
    parser.add_argument("--keep", type=Path, help="keep the run's directory here")
    options = parser.parse_args()
    base = options.keep or Path(tempfile.mkdtemp(prefix="rljob-proof-"))
    shutil.rmtree(base, ignore_errors=True)
    try:
        outcome = ProofRun(base, Sizes(options.steps), options.seed).run(options.kills, options.each)
        result = summary(outcome)
        path = ROOT / "build" / "proof.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps({k: v for k, v in result.items() if k != "kills"}, indent=2))
    finally:
        if options.keep is None:
            shutil.rmtree(base, ignore_errors=True)
    return 0 if outcome.audit.clean else 1


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of a run."""
    found = outcome.audit
    return {
        "seed": outcome.seed,
        "steps": outcome.sizes.steps,
        "kills": [asdict(kill) for kill in outcome.kills],
        "hits": outcome.hits,
        "lives": outcome.lives,
        "seconds": outcome.seconds,
        "lost": len(found.lost),
        "trained_twice": found.trained_twice,
        "violations": found.violation_count,
        "examples": found.violations,
        "handed_out": found.handed_out,
        "trained": found.trained,
        "filtered": found.filtered,
        "skipped": len(found.skipped),
        "skipped_by": found.skipped_by,
        "skipped_poisoned": found.skipped_poisoned,
        "answered_again": found.answered_again,
        "extra_answers": found.extra_answers,
        "rolled_back": {"steps": found.rolled_back_steps, "prompts": found.rolled_back_prompts},
        "resumes": found.resumes,
        "live_cursor_lost": found.live_cursor,
    }


if __name__ == "__main__":
    sys.exit(main())
