"""A simulated run in numbers, for scripts and for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rljob_workload.core.simulation.world import Outcome


def report(outcome: Outcome) -> dict[str, Any]:
    """The keys of `rljob simulate -o json`. `lost` and `trained_twice` are the auditor's, the counters the ledger's."""
    verdict = outcome.verdict
    counts = asdict(outcome.counts)
    return {
        **{name: counts[name] for name in ("handed_out", "trained", "filtered", "training", "buffered", "in_flight")},
        **{name: counts[name] for name in ("pending", "retryable", "skipped", "skipped_by")},
        "skipped_names": outcome.skipped_names,
        "lost": verdict.lost,
        "lost_ordinals": verdict.lost_ordinals[:100],
        "trained_twice": verdict.trained_twice,
        "rolled_back_prompts": verdict.rolled_back_prompts,
        "extra_answers": verdict.extra_answers,
        "answered_again_after_crashes": verdict.asked_again_after_crash,
        "withdrawn_tries": verdict.withdrawn,
        "invariant_violations": outcome.violations,
        "violations": [*verdict.examples, *outcome.refused],
        "crashes": outcome.crashes,
        "steps": outcome.steps,
        "operations": outcome.operations,
        "command": outcome.settings.command(),
    }


def text_of(outcome: Outcome) -> str:
    """A summary in a few lines."""
    counts, verdict = outcome.counts, outcome.verdict
    by_cause = ", ".join(f"{cause}: {_some(names)}" for cause, names in outcome.skipped_names.items())
    lines = [
        f"rule {outcome.settings.rule}, {outcome.settings.source} source: {outcome.steps} steps, {outcome.crashes} crashes, "
        f"{outcome.operations} operations",
        f"handed out {counts.handed_out} = trained {counts.trained} + filtered {counts.filtered} + training {counts.training} "
        f"+ buffered {counts.buffered} + in flight {counts.in_flight} + pending {counts.pending} "
        f"+ retryable {counts.retryable} + skipped {counts.skipped}",
        f"skipped: {by_cause or 'none'}",
        f"rolled back {verdict.rolled_back_prompts} prompts, {verdict.extra_answers} extra answers, "
        f"{verdict.withdrawn} tries withdrawn",
        f"LOST {verdict.lost}  TRAINED TWICE {verdict.trained_twice}  INVARIANT VIOLATIONS {outcome.violations}",
        *(f"  {text}" for text in (*verdict.examples, *outcome.refused)),
    ]
    return "\n".join(lines)


def _some(names: list[int]) -> str:
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
