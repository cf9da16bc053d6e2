"""What the driver reads off the collector's counters: too many skipped prompts, the cap, and what a checkpoint counted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rljob_api.progress import InFlightPrompts
from rljob_api.spec import RLJobSpec
from rljob_workload.core.checkpoint import Checkpoint
from rljob_workload.runtime.step import Totals

log = logging.getLogger("rljob.driver")


def too_many_skipped(spec: RLJobSpec, counters: Mapping[str, Any]) -> str | None:
    """Why `prompts.onExceeded: Fail` ends the run; None while it goes on."""
    skipped, allowed = counters["counts"]["skipped"], spec.prompts.max_skipped
    if spec.prompts.on_exceeded != "Fail" or skipped <= allowed:
        return None
    named = "; ".join(f"{cause}: {', '.join(map(str, names[:8]))}" for cause, names in counters["skipped_names"].items())
    return (
        f"{skipped} prompts skipped, prompts.maxSkipped allows {allowed} and prompts.onExceeded is Fail ({named}); "
        "raise maxSkipped to go on from the newest checkpoint"
    )


def cap_report(cap: Mapping[str, Any]) -> InFlightPrompts:
    """The cap on prompts in flight for the report; a lowered one is logged (once: at the attempt's start)."""
    if cap["reason"]:
        log.warning("at most %d prompts in flight instead of %d: %s", cap["effective"], cap["configured"], cap["reason"])
    if cap["warning"]:
        log.warning("%s", cap["warning"])
    return InFlightPrompts(configured=cap["configured"], effective=cap["effective"], reason=cap["reason"])


def resume_totals(totals: Totals, checkpoint: Checkpoint, spec: RLJobSpec) -> None:
    """Take over a checkpoint's totals. One that kept none has trained `step` times today's sizes."""
    grpo = spec.algorithm.grpo
    saved = checkpoint.state.get("totals")
    if saved is None:
        totals.trained_prompts = checkpoint.step * grpo.prompts_per_step
        totals.consumed_samples = totals.trained_prompts * grpo.generations_per_prompt
    else:
        totals.restore(saved)
    totals.elapsed_before = max(totals.elapsed_before, float(checkpoint.state.get("elapsed_seconds", 0.0)))
