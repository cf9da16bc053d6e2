"""The driver's report as fields and conditions of the status."""

from __future__ import annotations

import datetime
import math

from rljob_api import reasons
from rljob_api.progress import CheckpointInfo, ProgressReport, PromptCounts
from rljob_api.status import ValidationResult

from .draft import Draft, clip
from .times import format_time, parse_time
from .world import World

_UNSETTLED = (reasons.NOT_CHECKED.name, reasons.CHECKING.name, reasons.NONE_YET.name)


_LARGEST_PLAIN = 1e11
_LARGEST = 9.9999e99
"""The API's decimals have twelve digits before the point and two in the exponent."""


def decimal(value: float | None) -> str | None:
    """A number as the API writes it; what is no finite number, or has no place there, is left out."""
    if value is None or not math.isfinite(value) or abs(value) > _LARGEST:
        return None
    return f"{value:.4f}" if abs(value) < _LARGEST_PLAIN else f"{value:.4e}".replace("e+", "e")


def steps_of_attempt(report: ProgressReport | None) -> int:
    """Steps that this attempt itself has done."""
    if report is None:
        return 0
    return report.step - (report.resume.from_step if report.resume else 0)


def last_step(world: World) -> datetime.datetime | None:
    """When this attempt's last step was seen, by this clock; None before its first.

    The report's own time is never used: a pod's clock may be wrong by more than a deadline. A step that grew was just done.
    """
    status, report = world.job.status, world.report
    start = parse_time(status.attempt_start_time) if status.attempt_start_time else world.now
    known = parse_time(status.last_step_time) if status.last_step_time else None
    known = None if known is None or known < start else min(known, world.now)
    if report is None or steps_of_attempt(report) <= 0 or (known is not None and report.step == status.step):
        return known
    return world.now


def step_reached(world: World) -> int:
    """The step that this attempt has come to, as far as it is known: a status may still hold an earlier attempt's."""
    if world.report is not None:
        return world.report.step
    return world.job.status.step if last_step(world) is not None else 0


def take_report(world: World, draft: Draft, max_skipped: int) -> None:
    """Copy the report into the status, once the driver knows where it stands: before that its zeros say nothing."""
    report = world.report
    if report is None or (report.step == 0 and report.resume is None):
        return
    seen = last_step(world)
    report = _bounded(report)
    validation = world.job.status.validation
    reward = decimal(report.validation_reward)
    if report.validation_step is not None and reward is not None:
        validation = ValidationResult(step=report.validation_step, reward=reward)
    draft.update(
        step=report.step,
        total_steps=report.total_steps,
        reward=decimal(report.reward) or world.job.status.reward,
        validation=validation,
        prompts=report.prompts,
        rolled_back=report.rolled_back,
        in_flight_prompts=report.in_flight_prompts,
        checkpoint=report.checkpoint or world.job.status.checkpoint,
        resume=report.resume or world.job.status.resume,
        last_step_time=format_time(seen) if seen else world.job.status.last_step_time,
    )
    _skipped(draft, report.prompts, max_skipped)
    _checkpoint(world, draft, report)


def _bounded(report: ProgressReport) -> ProgressReport:
    """The report without what would fill the status: words within the schema's bounds may have six bytes a character."""
    prompts, cap, checkpoint = report.prompts, report.in_flight_prompts, report.checkpoint
    causes = {clip(cause, 64): ordinals for cause, ordinals in prompts.skipped_by.items()}
    fits = checkpoint is not None and clip(checkpoint.path, 1024) == checkpoint.path
    return report.model_copy(
        update={
            "prompts": prompts.model_copy(update={"skipped_by": causes}),
            "in_flight_prompts": cap.model_copy(update={"reason": clip(cap.reason, 256)}),
            "checkpoint": checkpoint if fits else None,
        }
    )


def _checkpoint(world: World, draft: Draft, report: ProgressReport) -> None:
    """The newest checkpoint, once it is another than the one that the attempt started from."""
    known, found = world.job.status.checkpoint, report.checkpoint
    reason = draft.reason_so_far(reasons.NOT_CHECKED.condition)
    if found is not None and (known is None or known.path != found.path or reason in ("", *_UNSETTLED)):
        draft.set(reasons.AVAILABLE, step=found.step, path=found.path)
    elif found is None and known is None:
        draft.set(reasons.NONE_YET)


def take_saved(world: World, draft: Draft, saved: CheckpointInfo | None) -> None:
    """The checkpoint that a save on request ended with: the report of the same moment may be of the one before."""
    if saved is None or len(clip(saved.path, 1024)) != len(saved.path):
        return
    told = world.report.checkpoint if world.report is not None else None
    known = told or world.job.status.checkpoint
    if known is None or saved.step > known.step:
        draft.update(step=max(step_reached(world), saved.step), checkpoint=saved)
        draft.set(reasons.AVAILABLE, step=saved.step, path=saved.path)


def _skipped(draft: Draft, prompts: PromptCounts, budget: int) -> None:
    if prompts.skipped == 0:
        draft.set(reasons.SKIPPED_NONE, handed_out=prompts.handed_out)
        return
    causes = "; ".join(f"{cause}: {', '.join(map(str, ordinals[:10]))}" for cause, ordinals in prompts.skipped_by.items())
    values = {"skipped": prompts.skipped, "handed_out": prompts.handed_out, "causes": causes or "cause not reported"}
    if prompts.skipped <= budget:
        draft.set(reasons.SKIPPED_WITHIN, **values)
        return
    if draft.reason_of(reasons.SKIPPED_EXCEEDED.condition) != reasons.SKIPPED_EXCEEDED.name:
        draft.event(reasons.BUDGET_EXCEEDED, reasons.SKIPPED_EXCEEDED.message(budget=budget, **values))
    draft.set(reasons.SKIPPED_EXCEEDED, budget=budget, **values)


def summary(report: ProgressReport | None, *, with_reward: bool) -> str:
    """One line about how far the run came."""
    if report is None:
        return "the driver's last report was not received"
    parts = [f"step {report.step} of {report.total_steps}"]
    if with_reward and (reward := decimal(report.validation_reward)) is not None:
        parts.append(f"validation reward {reward} at step {report.validation_step}")
    parts.append(f"{report.prompts.skipped} of {report.prompts.handed_out} prompts skipped")
    return ", ".join(parts)
