"""The look at the checkpoint volume before any pod that costs something: what it found, and whether the attempt may go on.

Its pod keeps the report until the RayCluster carries it, so an operator that restarts loses nothing. A refusal is looked at
again when the spec changes, and now and then, since somebody may have mended the volume.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from rljob_api import names, reasons
from rljob_api.preflight import Chosen, PreflightReport
from rljob_api.progress import CheckpointInfo, Resume
from rljob_api.reasons import Event, Reason
from rljob_api.spec import RLJobSpec
from rljob_api.transitions import how_to_edit

from .classify import Failure
from .deadlines import provisioning_overdue
from .draft import Draft, clip
from .plan import CreatePreflight, DeletePod
from .render import spec_text
from .render_preflight import preflight_pod
from .terms import PENDING_SECONDS, WAIT_SECONDS, Step
from .times import format_time
from .world import Job, Pod, World

LOOK_AGAIN_SECONDS = 120.0
"""How long a refusal stands before the volume is looked at again."""


@dataclass(frozen=True)
class Go:
    """The RayCluster may be made; the driver is told what was found, or looks itself where there is no report."""

    report: PreflightReport | None = None


def looks(world: World) -> bool:
    """Whether a pod looks at the volume first. A claim that waits for its first pod holds nothing, and that pod chooses its
    node: it has to be one of the run's own."""
    return bool(world.preflight_image) and not world.claim_unused


def judge(world: World, draft: Draft, spec: RLJobSpec) -> Step | Failure | Go:
    """Go on, wait, or give the attempt up."""
    if not looks(world):
        return Go()
    pod = world.preflight
    if pod is None:
        _checking(world, draft, "")
        again = WAIT_SECONDS if world.refused else 1.0
        return Step((CreatePreflight(preflight_pod(world.job, spec, world.preflight_image)),), again)
    if pod.deleting:
        return _leaving(world, draft, pod, spec)
    if pod.spec_text != spec_text(spec):  # it would judge a spec that is not the one to run
        return Step((DeletePod(pod.name, pod.uid),), 0.5)
    if not pod.ended:
        return _running(world, draft, pod, spec)
    report = _read(pod)
    if report is None:
        return _ended_without_report(pod)
    if gone := _gone(world.job, spec, report):
        found = f"the preflight found: {report.message or report.outcome}"
        return _blocked(world, draft, pod, reasons.CHECKPOINT_GONE, path=gone, found=found)
    if not report.may_start:
        _know(world.job, draft, spec, report, format_time(world.now))
        return _blocked(world, draft, pod, reasons.BLOCKED_BY[report.outcome], detail=describe(world.job, report))
    take(world.job, draft, spec, report, format_time(world.now))
    return Go(report)


def _running(world: World, draft: Draft, pod: Pod, spec: RLJobSpec) -> Step | Failure:
    detail = f"; {pod.name}: {pod.trouble}" if pod.trouble else f"; {world.warning}" if world.warning else ""
    if late := provisioning_overdue(world, spec.deadlines, detail):
        return late
    _checking(world, draft, detail)
    return Step((), PENDING_SECONDS)


def _leaving(world: World, draft: Draft, pod: Pod, spec: RLJobSpec) -> Step | Failure:
    """The pod is on its way out, and the next one has its name. Its node may be lost, or somebody's finalizer holds it."""
    detail = f"; waiting for pod {pod.name} to be gone"
    if late := provisioning_overdue(world, spec.deadlines, detail):
        return late
    _checking(world, draft, detail)
    return Step((), PENDING_SECONDS)


def _checking(world: World, draft: Draft, detail: str) -> None:
    """Say that it is looked at; while a refusal is looked at again, the refusal stays what is said."""
    pod = names.preflight_pod(world.job.name, world.job.status.attempt)
    if draft.reason_of(reasons.STATE_BLOCKED.condition) == reasons.STATE_BLOCKED.name:
        return
    draft.set(reasons.STATE_CHECKING, detail=detail)
    if world.job.status.checkpoint is None:
        draft.set(reasons.CHECKING, pod=pod, detail=detail)


def _read(pod: Pod) -> PreflightReport | None:
    """The report of an ended pod: whatever exit code it came with, it is the program's last word."""
    try:
        return PreflightReport.model_validate_json(pod.message)
    except ValueError:
        return None


def _ended_without_report(pod: Pod) -> Step | Failure:
    if pod.disruption:  # Kubernetes ended it, not the volume: the same attempt looks again
        return Step((DeletePod(pod.name, pod.uid),), 0.5)
    if pod.end_reason == "OOMKilled":
        return Failure("OutOfMemory", f"the preflight's pod {pod.name} went over its memory limit", pod.exit_code)
    said = pod.message.strip() or pod.last_words
    words = f"the preflight's pod {pod.name} ended without a report{f': {clip(said, 1500)}' if said else ''}"
    return Failure("PreflightFailed", words, pod.exit_code)


def _blocked(world: World, draft: Draft, pod: Pod, why: Reason, **values: object) -> Step:
    draft.set(why, **values)
    draft.set(reasons.STATE_BLOCKED, detail=why.message(**values), seconds=f"{LOOK_AGAIN_SECONDS:.0f}")
    if draft.reason_of(why.condition) != why.name:
        draft.event(why, why.message(**values))
    left = LOOK_AGAIN_SECONDS - (world.now - (pod.ended_at or pod.created)).total_seconds()
    if 0 < left <= LOOK_AGAIN_SECONDS:
        return Step((), left)
    return Step((DeletePod(pod.name, pod.uid),), 0.5)


def _gone(job: Job, spec: RLJobSpec, report: PreflightReport) -> str:
    """The job's own checkpoint that its status knows and the volume no longer has; empty where all is well."""
    known = job.status.checkpoint
    own = names.run_directory(job.namespace, job.name)
    if known is None or not report.may_start or not known.path.startswith(f"{own}/"):
        return ""
    found = report.checkpoint is not None and own_path(job, spec, report.checkpoint) is not None
    return "" if found else known.path


def own_path(job: Job, spec: RLJobSpec, chosen: Chosen) -> str | None:
    """A chosen checkpoint's path below subPath, as status names it; None for another job's."""
    root = posixpath.normpath(posixpath.join(spec.checkpoint.volume.sub_path, names.run_directory(job.namespace, job.name)))
    path = posixpath.normpath(chosen.path)
    if not path.startswith(f"{root}/"):
        return None
    return f"{names.run_directory(job.namespace, job.name)}/{path.removeprefix(f'{root}/')}"


def take(job: Job, draft: Draft, spec: RLJobSpec, report: PreflightReport, now: str) -> None:
    """What was found, as status and condition."""
    chosen = report.checkpoint
    if chosen is None:
        draft.set(reasons.NONE_YET)
        draft.update(step=0, resume=Resume(from_step=0))
        _tell(job, draft, reasons.STARTS_FROM_SCRATCH, f"attempt {job.status.attempt} starts at step 0, token {report.token}")
        return
    draft.update(step=chosen.step, resume=Resume(from_step=chosen.step, handed_out_before=chosen.handed_out))
    _know(job, draft, spec, report, now)
    if report.passed_over:
        passed = "; ".join(f"{one.name}: {one.why}" for one in report.passed_over)
        draft.set(reasons.PASSED_OVER, step=chosen.step, path=chosen.path, passed=passed)
        _tell(job, draft, reasons.CHECKPOINT_PASSED_OVER, passed)
    elif not chosen.ledger:
        draft.set(reasons.WITHOUT_LEDGER, step=chosen.step, path=chosen.path, at_risk=chosen.at_risk)
        words = f"up to {chosen.at_risk} prompts may have been lost before {chosen.path}"
        _tell(job, draft, reasons.CHECKPOINT_WITHOUT_LEDGER, words)
    else:
        draft.set(reasons.AVAILABLE, step=chosen.step, path=chosen.path)
    reshard = ", resharded" if chosen.reshard else ""
    _tell(
        job,
        draft,
        reasons.RESUMES,
        f"attempt {job.status.attempt} resumes from step {chosen.step} ({chosen.path}, verified {chosen.verified}{reshard}), "
        f"{chosen.handed_out} prompts handed out before, token {report.token}",
    )


def _know(job: Job, draft: Draft, spec: RLJobSpec, report: PreflightReport, now: str) -> None:
    """The volume's word on the run's own newest checkpoint: later than any driver's, and right where it does not fit too."""
    chosen = report.checkpoint
    if chosen is not None and (path := own_path(job, spec, chosen)) is not None:
        draft.update(step=chosen.step, checkpoint=CheckpointInfo(step=chosen.step, path=path, verified_time=now))


def _tell(job: Job, draft: Draft, what: Event, message: str) -> None:
    """An event, once in an attempt: the status names what it resumes from afterwards."""
    if job.status.resume is None:
        draft.event(what, message)


def describe(job: Job, report: PreflightReport) -> str:
    """A refusal in words: what differs, or what is damaged, and what of the advice takes more than an edit."""
    parts = [report.message, *report.differs, *(f"{one.name}: {one.why}" for one in report.passed_over)]
    if report.outcome == "Incompatible":
        parts += how_to_edit(line.partition(":")[0] for line in report.differs)
    if report.outcome == "Corrupt" and job.status.checkpoint is not None:
        parts.append(
            "a start from scratch takes a new RLJob too, since this one knows its checkpoint: delete it, create it again"
        )
    return "; ".join(dict.fromkeys(part for part in parts if part)) or report.outcome
