"""Deadlines: the whole run, an attempt's provisioning, its first step, and the time between two steps.

What this process did not watch proves nothing: a deadline counts from a report, or from when this process began to look.
"""

from __future__ import annotations

import datetime

from rljob_api.spec import Deadlines
from rljob_api.status import RLJobStatus

from .classify import Failure
from .report import last_step
from .times import parse_time
from .world import Cluster, Unreachable, World

_SILENT_SECONDS = 30.0
"""After so long without a report its age is told: what it says of the driver may be over."""


def overdue(world: World, cluster: Cluster, deadlines: Deadlines) -> Failure | None:
    """What of this attempt should have happened by now."""
    there = sum(pod.ready and pod.runs for pod in world.pods_of(cluster.name))
    if cluster.provisioned is None or (there < cluster.wanted and not world.begun):
        return provisioning_overdue(world, deadlines, pods_detail(world, cluster))
    step = last_step(world)
    if step is None:
        waited = _waited(world, cluster.provisioned)
        if waited > deadlines.first_step_seconds:
            allowed = f"(firstStepSeconds {deadlines.first_step_seconds})"
            detail = f"no step {waited:.0f} s after all pods were ready {allowed}; {stall_words(world)}"
            return Failure("FirstStepDeadlineExceeded", detail)
    else:
        waited = _waited(world, step)
        if waited > deadlines.stall_seconds:
            detail = f"no step for {waited:.0f} s (stallSeconds {deadlines.stall_seconds}); {stall_words(world)}"
            return Failure("StallDeadlineExceeded", detail)
    return None


def _waited(world: World, since: datetime.datetime) -> float:
    """Seconds that a deadline may count: a report must have told of them, or this process must have watched them."""
    watched = world.watched_since or since
    if since > world.now:  # the clock was set back
        since = watched
    told = world.heard is not None and world.heard >= watched
    return (world.now - (since if told else max(since, watched))).total_seconds()


def stall_words(world: World) -> str:
    """Where the driver stands, and what it waits for, as its last report told; how old that is, where it reports no more.

    And why Ray can't be asked, where it can't: after the attempt nothing else tells.
    """
    silent = f"; Ray does not answer as it should: {world.driver.detail}" if isinstance(world.driver, Unreachable) else ""
    return f"{_last_report(world)}{silent}"


def _last_report(world: World) -> str:
    report, heard = world.report, world.heard
    if report is None:
        return "the driver never reported"
    silent = 0.0 if heard is None else (world.now - heard).total_seconds()
    ago = f", as reported {silent:.0f} s ago; no report since" if silent > _SILENT_SECONDS else ""
    parts = [f"last known phase {report.phase}{ago}"]
    if report.oldest:
        oldest = report.oldest[0]
        tried = f", {oldest.attempt} tries failed before" if oldest.attempt else ""
        parts.append(
            f"oldest prompt in flight {oldest.ordinal}, for {oldest.age_seconds:.0f} s "
            f"({oldest.tokens} tokens, {oldest.answers} answers complete{tried})"
        )
    if report.handover is not None:
        absent = report.handover.absent_ranks
        ranks = f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))}"
        whom = f", {ranks} did not arrive" if absent else ""
        parts.append(f"hand-over in {report.handover.phase} for {report.handover.seconds:.0f} s{whom}")
    if report.collector_state:
        parts.append(f"collector {report.collector_state}")
    return "; ".join(parts)


def provisioning_overdue(world: World, deadlines: Deadlines, detail: str) -> Failure | None:
    """Whether the attempt's pods took too long: since it began, or since its newest part was made, where that came later."""
    start = world.job.status.attempt_start_time
    begun = [parse_time(start)] if start else []
    begun += [world.cluster.created] if world.cluster else []
    if (pod := world.preflight) is not None and world.cluster is None:
        begun += [pod.created, *([pod.due_gone] if pod.due_gone else [])]
    if not begun or (world.now - max(begun)).total_seconds() <= deadlines.provisioning_seconds:
        return None
    words = f"pods were not ready within {deadlines.provisioning_seconds} s (provisioningSeconds)"
    return Failure("ProvisioningDeadlineExceeded", f"{words}{detail}")


def pods_detail(world: World, cluster: Cluster) -> str:
    """The newest problem of pods that are not ready, for messages."""
    if cluster.suspended:
        return f"; RayCluster {cluster.name} is suspended by someone else (its spec.suspend)"
    for pod in world.pods_of(cluster.name):
        if not pod.ready and (pod.trouble or pod.last_words):
            return f"; {pod.name}: {pod.trouble or pod.last_words}"
    return f"; {world.warning}" if world.warning else ""


def active_left(status: RLJobStatus, deadlines: Deadlines, now: datetime.datetime) -> float | None:
    """Seconds of deadlines.activeSeconds that are left; None without that deadline. Suspensions do not count."""
    if deadlines.active_seconds is None:
        return None
    if status.start_time is None:
        return float(deadlines.active_seconds)
    end = min(now, parse_time(status.suspend_time)) if status.suspend_time else now
    used = (end - parse_time(status.start_time)).total_seconds() - status.suspended_seconds
    return deadlines.active_seconds - max(used, 0.0)


def active_overdue(world: World, deadlines: Deadlines) -> Failure | None:
    """Whether the whole run took too long. A new attempt must have the time for one save left."""
    left = active_left(world.job.status, deadlines, world.now)
    spare = deadlines.save_seconds if world.job.between_attempts else 0
    if left is None or left > spare:
        return None
    words = f"the run took its {deadlines.active_seconds} s (activeSeconds)"
    if left > 0:
        words = f"{left:.0f} s of activeSeconds {deadlines.active_seconds} are left, too little for another attempt"
    last = world.job.status.last_failure
    before = f"; the last attempt had ended: {last.message[:500]}" if world.job.between_attempts and last else ""
    return Failure("ActiveDeadlineExceeded", words + before, final=True)
