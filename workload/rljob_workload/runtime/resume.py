"""Going on from a checkpoint: which one, how the actors take it over, and what the report says of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_api.names import run_directory
from rljob_api.progress import CheckpointInfo, Resume, RolledBack
from rljob_workload.core.checkpoint import Checkpoint, RunDirectory
from rljob_workload.core.rollouts import RestoreReport
from rljob_workload.core.source import SourceError
from rljob_workload.megatron.errors import WeightsError
from rljob_workload.runtime import preflight
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.errors import RunError, cause_line
from rljob_workload.runtime.metrics import LastMetrics
from rljob_workload.runtime.progress import utc_now
from rljob_workload.runtime.prompts import resume_totals
from rljob_workload.runtime.settings import Attempt
from rljob_workload.runtime.step import Totals

log = logging.getLogger("rljob.driver")


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where the attempt goes on."""

    #: Policy version, which is the number of steps behind it.
    version: int
    #: What the progress report says of it.
    report: dict[str, Any]


def newest_checkpoint(directory: RunDirectory, steps: int) -> Checkpoint | None:
    """The checkpoint to go on from, found before anything is started; None only where there has never been one."""
    found, passed_over = directory.newest()
    for why in passed_over:
        log.warning("passed over: %s", why)
    preflight.check_resumable(found, passed_over, directory.root, steps)
    return found


def checkpoint_info(attempt: Attempt, checkpoint: Checkpoint) -> CheckpointInfo:
    """A checkpoint as the report names it."""
    path = f"{run_directory(attempt.namespace, attempt.name)}/{checkpoint.name}"
    return CheckpointInfo(step=checkpoint.step, path=path, verified_time=utc_now())


def resume(calls: Calls, checkpoint: Checkpoint | None, attempt: Attempt, totals: Totals, before: LastMetrics) -> Resumed:
    """Have the actors take over a checkpoint, if there is one. `before`: how far the attempts before got; fills `totals`.

    Raises RunError: BAD_DATA where the data is not the checkpoint's, CHECKPOINT_UNLOADABLE for everything else in it.
    """
    totals.elapsed_before = before.elapsed_seconds
    if checkpoint is None:
        log.info("no checkpoint in %s: starting from scratch", attempt.directory)
        return Resumed(0, {"resume": Resume(from_step=0), "rolled_back": _rolled_back(before.step, before.trained_prompts)})
    try:
        report = _load(calls, checkpoint, attempt, totals)
    except (KeyError, TypeError, ValueError, RayTaskError) as err:
        cause = err.cause if isinstance(err, RayTaskError) else err
        why = str(cause) if isinstance(cause, WeightsError) else f"{type(cause).__name__}: {cause}"
        raise RunError(
            ExitCode.BAD_DATA if isinstance(cause, SourceError) else ExitCode.CHECKPOINT_UNLOADABLE,
            f"cannot resume from {checkpoint.path}: {cause_line(why)}",
        ) from err
    log.info(
        "resumed from %s: %d prompts handed out before, %d finished groups restored, %d handed out again (first: %s)",
        checkpoint.name, report.handed_out, report.restored_groups, len(report.rehanded), report.rehanded[:8],
    )  # fmt: skip
    rolled_back = _rolled_back(max(0, before.step - checkpoint.step), max(0, before.trained_prompts - totals.trained_prompts))
    fields = {
        "step": checkpoint.step,
        "checkpoint": checkpoint_info(attempt, checkpoint),
        "consumed_samples": totals.consumed_samples,
        "rolled_back": rolled_back,
        "resume": Resume(
            from_step=checkpoint.step,
            handed_out_before=report.handed_out,
            restored_groups=report.restored_groups,
            rehanded=len(report.rehanded),
        ),
    }
    return Resumed(checkpoint.step, fields)


def _load(calls: Calls, checkpoint: Checkpoint, attempt: Attempt, totals: Totals) -> RestoreReport:
    deadline = attempt.spec.deadlines.first_step_seconds
    resume_totals(totals, checkpoint, attempt.spec)
    restore = calls.collector.restore.remote(checkpoint.state.get("collector"), checkpoint.step, totals.trained_prompts)
    report: RestoreReport = calls.get(restore, deadline, "the collector does not restore")
    for warning in report.warnings:
        log.warning("%s", warning)
    calls.ranks("load", deadline, ExitCode.CHECKPOINT_UNLOADABLE, str(checkpoint.path), checkpoint.step)
    return report


def _rolled_back(steps: int, prompts: int) -> RolledBack:
    if steps or prompts:
        log.info("rolled back: %d steps, %d prompts; they are handed out again", steps, prompts)
    return RolledBack(steps=steps, prompts=prompts)
