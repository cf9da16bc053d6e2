"""How an attempt and a job end: success, restart with backoff, or failure with its evidence."""

from __future__ import annotations

import datetime
import posixpath

from rljob_api import reasons
from rljob_api.exitcodes import ExitCode
from rljob_api.progress import CheckpointInfo
from rljob_api.spec import FailurePolicy
from rljob_api.status import LastFailure, RLJobStatus

from .classify import Decision, Failure, classify
from .draft import LAST_FAILURE_BYTES, Draft, clip
from .failure import describe_end
from .report import summary
from .terms import Terms
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
    draft.set(reasons.DRIVER_EXITED, submission=world.job.submission_id, how=describe_end(0))
    draft.set(reasons.PROGRESS_ENDED)
    draft.set(reasons.NOT_RESTARTING)
    draft.set(reasons.NOT_SUSPENDED)  # it may have been asked to save first
    draft.update(finish_time=format_time(world.now), attempt_end_time=format_time(world.now))
    draft.event(reason, detail)


def fail(world: World, draft: Draft, failure: Failure, terms: Terms) -> bool:
    """Record the failure; True when another attempt follows."""
    status, policy = world.job.status, terms.failure_policy
    decision = classify(failure, policy, terms.deadlines)
    since = restarts_since_progress(world, policy)
    counted = decision.action == "Restart"
    again = decision.action == "RestartUncounted" or (counted and since < policy.max_restarts)
    detail = f"attempt {status.attempt}: {failure.detail}"
    draft.update(
        last_failure=_evidence(world, failure, decision if again else Decision("Fail", decision.rule), policy),
        attempt_end_time=format_time(world.now),
        unloadable=_unloadable(world, failure, policy),
        restarts=status.restarts + (again and counted),
        restarts_since_progress=since + (again and counted),
    )
    _ended_conditions(world, draft, failure)
    by_rule = f" (rule {decision.rule})" if decision.rule else ""
    if again:
        number = f"restart {since + 1} of {policy.max_restarts}" if counted else "a restart that is not counted"
        draft.set(reasons.STATE_RESTARTING, detail=detail + failure.logs)
        rest = world.remains or "none is known"
        draft.set(reasons.WAITING_FOR_PODS, attempt=f"attempt {status.attempt}", pods=rest)
        draft.event(reasons.ATTEMPT_FAILED, f"{failure.reason}: {detail}; {number} follows{by_rule}")
        return True
    draft.update(finish_time=format_time(world.now))
    draft.set(reasons.NOT_RESTARTING)
    if failure.reason != "StallDeadlineExceeded":
        draft.set(reasons.PROGRESS_ENDED)
    why = f" (failurePolicy.maxRestarts {policy.max_restarts} allows no other attempt)" if counted else by_rule
    draft.set(
        reasons.FAILURES[failure.reason], attempt=status.attempt, detail=failure.detail + why + reasons.GO_ON + failure.logs
    )
    draft.event(reasons.FAILURES[failure.reason], detail + why)
    return False


def _evidence(world: World, failure: Failure, decision: Decision, policy: FailurePolicy) -> LastFailure:
    status = world.job.status
    checkpoint = newest_checkpoint(world)
    before = status.last_failure.in_a_row if status.last_failure and not _progressed(world, policy) else 0
    return LastFailure(
        attempt=status.attempt,
        reason=failure.reason,
        exit_code=failure.exit_code,
        checkpoint_step=checkpoint.step if checkpoint else None,
        action=decision.action,
        rule=decision.rule,
        in_a_row=before + 1,
        message=clip(failure.detail + failure.logs, LAST_FAILURE_BYTES),
        time=format_time(world.now),
    )


def _unloadable(world: World, failure: Failure, policy: FailurePolicy) -> list[str]:
    """Checkpoints that could not be loaded since the last progress: going from one to the other would never end."""
    known = [] if _progressed(world, policy) else list(world.job.status.unloadable)
    report = world.cluster.preflight if world.cluster else None
    if failure.exit_code != ExitCode.CHECKPOINT_UNLOADABLE or report is None or report.checkpoint is None:
        return known
    name = posixpath.basename(report.checkpoint.path)
    return [*(one for one in known if one != name), name][-8:]


def _ended_conditions(world: World, draft: Draft, failure: Failure) -> None:
    if failure.lost == "head":
        draft.set(reasons.HEAD_LOST, detail=failure.detail)
    elif failure.lost == "worker":
        draft.set(reasons.WORKER_LOST, detail=failure.detail)
    elif world.cluster is not None:
        draft.set(reasons.CLUSTER_DELETED, cluster=world.job.cluster_name)
    elif failure.reason != "ClusterRejected":  # that condition says already what was refused
        draft.set(reasons.CLUSTER_NOT_CREATED)
    if world.driver_seen or isinstance(world.driver, Driver):
        draft.set(reasons.DRIVER_EXITED, submission=world.job.submission_id, how=describe_end(failure.exit_code))
    else:
        draft.set(reasons.DRIVER_NOT_SUBMITTED)
    if failure.reason == "StallDeadlineExceeded":
        draft.set(reasons.STALLED, detail=failure.detail)
    else:
        draft.set(reasons.NOT_STARTED)


def newest_checkpoint(world: World) -> CheckpointInfo | None:
    """The newest checkpoint that is known."""
    return world.report.checkpoint if world.report and world.report.checkpoint else world.job.status.checkpoint


def _progressed(world: World, policy: FailurePolicy) -> bool:
    """Whether there is a newer checkpoint than at the last failure, where the policy asks."""
    failure, now = world.job.status.last_failure, newest_checkpoint(world)
    if not policy.reset_after_progress or failure is None:
        return False
    return now is not None and now.step > (failure.checkpoint_step or 0)


def restarts_since_progress(world: World, policy: FailurePolicy) -> int:
    """Restarts that are compared with maxRestarts: none after progress, where the policy says so."""
    return 0 if _progressed(world, policy) else world.job.status.restarts_since_progress


def next_start(status: RLJobStatus, policy: FailurePolicy, now: datetime.datetime) -> datetime.datetime:
    """When the next attempt may start: backoffSeconds after the failure, doubled with each failure in a row, capped.

    At once where the failure lies in the future: the clock was set back.
    """
    failed = status.last_failure is not None and status.last_failure.attempt == status.attempt
    if status.last_failure is None or not failed or parse_time(status.last_failure.time) > now:
        return now
    doublings = min(status.last_failure.in_a_row - 1, 30)
    seconds = min(policy.backoff_seconds * 2**doublings, policy.max_backoff_seconds)
    return parse_time(status.last_failure.time) + datetime.timedelta(seconds=seconds)
