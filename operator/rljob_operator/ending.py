"""How an attempt and a job end: success, restart with backoff, or failure with its evidence."""

from __future__ import annotations

import datetime

from rljob_api import reasons
from rljob_api.spec import FailurePolicy
from rljob_api.status import LastFailure, RLJobStatus

from .draft import Draft, clip
from .failure import Failure, describe_code
from .report import summary
from .times import format_time, parse_time
from .world import Driver, World


def succeed(world: World, draft: Draft) -> None:
    """The run is done; the last report's numbers stay."""
    report = world.report
    finished = report.finished if report is not None else None
    reason = reasons.TARGET_REACHED if finished and finished.reason == "TargetReached" else reasons.COMPLETED
    detail = summary(report, with_reward=finished is None)
    said = finished.message if finished else "the driver ended with exit code 0"
    draft.set(reason, detail=f"{said}; {detail}")
    draft.set(reasons.DRIVER_EXITED, submission=world.job.submission_id, code=0)
    draft.set(reasons.PROGRESS_ENDED)
    draft.set(reasons.NOT_RESTARTING)
    draft.update(finish_time=format_time(world.now))
    draft.event("Normal", reason.name, detail)


def fail(world: World, draft: Draft, failure: Failure, policy: FailurePolicy) -> bool:
    """Record the failure; True when another attempt follows."""
    status = world.job.status
    restarts = restarts_so_far(world, policy)
    checkpoint = world.report.checkpoint if world.report and world.report.checkpoint else status.checkpoint
    detail = f"attempt {status.attempt}: {failure.detail}"
    draft.update(
        last_failure=LastFailure(
            attempt=status.attempt,
            reason=failure.reason,
            exit_code=failure.exit_code,
            checkpoint_step=checkpoint.step if checkpoint else None,
            message=clip(failure.detail + failure.logs, 4000),
            time=format_time(world.now),
        )
    )
    _ended_conditions(world, draft, failure)
    again = not failure.final and restarts < policy.max_restarts
    draft.update(restarts=restarts + 1 if again else restarts)
    if again:
        draft.set(reasons.STATE_RESTARTING, detail=detail + failure.logs)
        draft.set(reasons.WAITING_FOR_PODS, attempt=status.attempt, pods=f"RayCluster {world.job.cluster_name}")
        draft.event("Warning", "AttemptFailed", f"{detail}; restart {restarts + 1} of {policy.max_restarts} follows")
        return True
    draft.update(finish_time=format_time(world.now))
    draft.set(reasons.NOT_RESTARTING)
    if failure.reason != "StallDeadlineExceeded":
        draft.set(reasons.PROGRESS_ENDED)
    used_up = "" if failure.final else f" (failurePolicy.maxRestarts {policy.max_restarts} allows no other attempt)"
    draft.set(reasons.FAILURES[failure.reason], attempt=status.attempt, detail=failure.detail + used_up + failure.logs)
    draft.event("Warning", failure.reason, detail + used_up)
    return False


def _ended_conditions(world: World, draft: Draft, failure: Failure) -> None:
    match failure.reason:
        case "HeadLost":
            draft.set(reasons.HEAD_LOST, detail=failure.detail)
        case "WorkerLost":
            draft.set(reasons.WORKER_LOST, detail=failure.detail)
        case "ClusterRejected":
            draft.set(reasons.CLUSTER_REJECTED, cluster=world.job.cluster_name, detail=failure.detail)
        case _:
            draft.set(reasons.CLUSTER_DELETED, cluster=world.job.cluster_name)
    if world.driver_seen or isinstance(world.driver, Driver):
        code = "unknown" if failure.exit_code is None else describe_code(failure.exit_code)
        draft.set(reasons.DRIVER_EXITED, submission=world.job.submission_id, code=code)
    else:
        draft.set(reasons.DRIVER_NOT_SUBMITTED)
    if failure.reason == "StallDeadlineExceeded":
        draft.set(reasons.STALLED, detail=failure.detail)
    else:
        draft.set(reasons.NOT_STARTED)


def restarts_so_far(world: World, policy: FailurePolicy) -> int:
    """Restarts that count: none after progress, where the policy says so."""
    status = world.job.status
    if not policy.reset_after_progress or status.last_failure is None:
        return status.restarts
    now = world.report.checkpoint if world.report and world.report.checkpoint else status.checkpoint
    before = status.last_failure.checkpoint_step
    progressed = now is not None and now.step > (before or 0)
    return 0 if progressed else status.restarts


def next_start(status: RLJobStatus, policy: FailurePolicy) -> datetime.datetime:
    """When the next attempt may start: backoffSeconds after the failure, doubled with each restart, capped."""
    if status.last_failure is None:
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)
    doublings = min(max(status.restarts - 1, 0), 30)
    seconds = min(policy.backoff_seconds * 2**doublings, policy.max_backoff_seconds)
    return parse_time(status.last_failure.time) + datetime.timedelta(seconds=seconds)
