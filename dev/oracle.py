"""Asks the real Megatron and our rules the same questions: `make oracle SEED=1 N=500`.

Writes build/oracle.json: `{checked, disagreements: [{layout, ours, megatron, reason}], unexplained, ...}`. A disagreement is
explained when each rule that refuses the layout says in docs/validation.md why it differs from Megatron; there is no excuse
for the other way round.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from rljob_api.findings import Finding, errors, render
from rljob_api.manifest import judge
from rljob_api.rules import RULES
from rljob_api.spec import RLJobSpec

from . import layouts, megatron_truth

DEVIATIONS = {rule.id: rule.deviation for rule in RULES}


def ours(spec: dict[str, Any]) -> tuple[RLJobSpec, list[Finding]]:
    """The parsed spec, and what the rule table (not the table of what is not supported yet) refuses."""
    verdict = judge("oracle", spec)
    if verdict.spec is None:
        raise ValueError(f"the generator made a spec that does not fit the schema: {render(verdict.findings)}")
    return verdict.spec, [finding for finding in errors(verdict.findings) if finding.rule in DEVIATIONS]


def compare(spec: dict[str, Any]) -> dict[str, Any] | None:
    """One row for a layout on which the two judges differ."""
    parsed, findings = ours(spec)
    megatron = megatron_truth.refusal(parsed)
    if bool(findings) == bool(megatron):
        return None
    reasons = [DEVIATIONS[finding.rule] for finding in findings]
    return {
        "layout": {key: spec[key] for key in ("trainer", "model", "parallelism", "generation", "algorithm")},
        "ours": render(findings) or "accepted",
        "megatron": megatron or "accepted",
        "reason": " ".join(dict.fromkeys(reasons)) if reasons and all(reasons) else "",
    }


def main() -> int:
    """Entry point; 0 when every disagreement is explained."""
    parser = argparse.ArgumentParser(prog="python -m dev.oracle", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", type=int, default=500, help="layouts to check")
    parser.add_argument("--world", type=int, default=64, help="largest world size")
    parser.add_argument("--out", type=Path, default=Path("build/oracle.json"))
    options = parser.parse_args()
    began = time.monotonic()
    megatron_truth.prepare()
    rng = random.Random(options.seed)  # noqa: S311 - a test's choice, no secret
    rows, told, accepted = [], collections.Counter[str](), 0
    for number in range(1, options.n + 1):
        spec = layouts.layout(rng, options.world)
        if row := compare(spec):
            rows.append(row)
        _, findings = ours(spec)
        told.update({finding.rule for finding in findings})
        accepted += not findings
        if number % 200 == 0:
            print(
                f"  {number} of {options.n} layouts, {len(rows)} disagreements, {time.monotonic() - began:.0f} s",
                file=sys.stderr,
            )
    unexplained = [row for row in rows if not row["reason"]]
    result = {
        "seed": options.seed,
        "checked": options.n,
        "accepted": accepted,
        "refused_by": dict(sorted(told.items())),
        "unexplained": len(unexplained),
        "disagreements": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in unexplained[:10]:
        print(json.dumps(row, indent=1))
    print(
        f"{options.n} layouts (seed {options.seed}): {accepted} accepted, {len(rows)} disagreements, {len(unexplained)} "
        f"unexplained disagreements "
        f"in {time.monotonic() - began:.0f} s; {options.out}"
    )
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
