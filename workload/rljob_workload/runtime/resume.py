"""Going on from a checkpoint: which one, how the actors take it over, and what the report says of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_api.names import run_directory
from rljob_api.preflight import Outcome, PreflightReport
from rljob_api.progress import CheckpointInfo, Resume, RolledBack
from rljob_workload.core.checkpoint import Checkpoint, CheckpointError, FencedError, RunDirectory, open_checkpoint
from rljob_workload.core.rollouts import RestoreReport
from rljob_workload.core.source import SourceError
from rljob_workload.core.weight_digest import WEIGHTS, WeightDigest, contradict
from rljob_workload.megatron.errors import WeightsError
from rljob_workload.preflight import Order, checkpoint_path, preflight
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


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a preflight decided for this attempt."""

    #: The fencing token that its checkpoints carry.
    token: int
    #: None: from scratch.
    checkpoint: Checkpoint | None


#: How an attempt ends that must not begin.
_REFUSALS: dict[Outcome, ExitCode] = {
    "OnExisting": ExitCode.REFUSED,
    "Foreign": ExitCode.REFUSED,
    "Incompatible": ExitCode.REFUSED,
    "Corrupt": ExitCode.CHECKPOINT_UNLOADABLE,
    "Unusable": ExitCode.ENVIRONMENT_MISSING,
}


def beginning(attempt: Attempt) -> Beginning:
    """Where the attempt goes on: exactly what its preflight said, or what one finds that is made here. Before anything starts.

    Raises RunError: REFUSED with what differs, CHECKPOINT_UNLOADABLE, ENVIRONMENT_MISSING, FENCED.
    """
    order = order_of(attempt)
    try:
        report = attempt.preflight or preflight(order)
        for one in report.passed_over:
            log.warning("passed over: %s: %s", one.name, one.why)
        if not report.may_start:
            more = "".join(f"; {line}" for line in report.differs if line not in report.message)
            raise RunError(_REFUSALS[report.outcome], f"{report.message}{more}{_named(report)}")
        directory = RunDirectory(attempt.directory)
        directory.create()
        directory.require(report.token)
        if report.checkpoint is None:
            return Beginning(report.token, None)
        return Beginning(report.token, _read(checkpoint_path(report.checkpoint, order), attempt))
    except FencedError as err:
        raise RunError(ExitCode.FENCED, str(err)) from err
    except CheckpointError as err:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, str(err)) from err


def order_of(attempt: Attempt) -> Order:
    """The preflight's order. Under `rljob local` the run's directory is the volume, and its parent that of checkpoint.from."""
    local = attempt.volume is None
    return Order(
        spec=attempt.spec,
        name=attempt.name,
        namespace=attempt.namespace,
        uid=attempt.uid,
        attempt=attempt.number,
        directory=attempt.directory,
        volume=attempt.volume or attempt.directory,
        source_volume=attempt.source_volume or (attempt.directory.parent if local else None),
        unloadable=attempt.unloadable,
        now=utc_now(),
    )


def _named(report: PreflightReport) -> str:
    """The checkpoints that were passed over, for the last word of an attempt that ends because of them."""
    if report.outcome != "Corrupt" or not report.passed_over:
        return ""
    return f": {'; '.join(f'{one.name}: {one.why}' for one in report.passed_over)}"


def _read(path: Path, attempt: Attempt) -> Checkpoint:
    """The chosen checkpoint's state; which one it is is not decided again. Raises RunError (CHECKPOINT_UNLOADABLE)."""
    try:
        # The ranks compare the digests of the shards where that is wanted; here the small files are.
        return open_checkpoint(path, buffer=attempt.spec.checkpoint.load_replay_buffer)
    except CheckpointError as err:
        raise RunError(ExitCode.CHECKPOINT_UNLOADABLE, f"cannot resume from {path}: {err}") from err


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
        what = f"cannot resume from {checkpoint.path}: {cause_line(why)}"
        if isinstance(cause, SourceError):
            raise RunError(ExitCode.BAD_DATA, what) from err
        raise RunError(ExitCode.CHECKPOINT_UNLOADABLE, f"{what}; the next attempt reads it wholly and passes it over") from err
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
    collector = checkpoint.state.get("collector")
    if collector is not None:
        collector = {"buffer": [], **collector}  # left out where it is not wanted
    restore = calls.collector.restore.remote(collector, checkpoint.step, totals.trained_prompts)
    report: RestoreReport = calls.get(restore, deadline, "the collector does not restore")
    for warning in report.warnings:
        log.warning("%s", warning)
    wanted = shard_digests(checkpoint) if attempt.spec.checkpoint.verify == "Full" else {}
    loaded: list[WeightDigest] = calls.ranks(
        "load", deadline, ExitCode.CHECKPOINT_UNLOADABLE, str(checkpoint.path), checkpoint.step, wanted
    )
    check_loaded(checkpoint, loaded)
    return report


def shard_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of the files that the ranks read, by path below the checkpoint, as far as the manifest has them."""
    if checkpoint.manifest is None:
        return {}
    files = checkpoint.manifest.files
    return {path: file.sha256 for path, file in files.items() if file.sha256 is not None and path.startswith(f"{WEIGHTS}/")}


def check_loaded(checkpoint: Checkpoint, loaded: Sequence[WeightDigest]) -> None:
    """The parameters of all ranks together are those that were saved, in whatever layout. Raises ValueError.

    (A layout that pads the vocabulary otherwise has other elements, and is not compared.)
    """
    wanted = checkpoint.manifest.weight_digest if checkpoint.manifest is not None else None
    found = str(sum(loaded, WeightDigest()))
    if wanted is not None and contradict(wanted, found):
        raise ValueError(f"the loaded weights have the digest {found}, the manifest says {wanted}")


def _rolled_back(steps: int, prompts: int) -> RolledBack:
    if steps or prompts:
        log.info("rolled back: %d steps, %d prompts; they are handed out again", steps, prompts)
    return RolledBack(steps=steps, prompts=prompts)
