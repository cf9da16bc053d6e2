"""A running attempt: what its pods and its driver come to, in conditions, and when the driver is submitted."""

from __future__ import annotations

from rljob_api import names, reasons
from rljob_api.spec import Deadlines, RLJobSpec

from .classify import Failure
from .deadlines import active_left, pods_detail, provisioning_overdue
from .draft import Draft
from .failure import describe_end, told_its_end
from .plan import SubmitDriver
from .render import driver_environment
from .report import last_step, step_reached, steps_of_attempt, take_report
from .times import format_time, parse_time
from .world import Cluster, Driver, DriverUnknown, Unreachable, World


def without_cluster(world: World, draft: Draft, deadlines: Deadlines) -> Failure | None:
    """The attempt is counted but has no RayCluster: not yet, refused, in the way of a namesake, or no longer."""
    name = world.job.cluster_name
    if world.job.status.ray_cluster_name == name or world.pods_of(name):
        return Failure("HeadLost", f"RayCluster {name} was deleted by someone else", lost="head")
    mend_start(world, draft)
    if world.stranger:
        draft.set(reasons.NAME_TAKEN, what=f"RayCluster {name} of {world.stranger}")
        return provisioning_overdue(world, deadlines, f"; RayCluster {name} belongs to {world.stranger}")
    if (refusal := world.refused) is not None:
        what = refusal.what or f"RayCluster {name}"
        draft.set(reasons.CLUSTER_REJECTED, what=what, detail=refusal.detail)
        if refusal.final:
            return Failure("ClusterRejected", f"{what} is refused: {refusal.detail}", final=True)
        # A quota, for example: it may have room later.
        return provisioning_overdue(world, deadlines, f"; {what} is refused: {refusal.detail}")
    return None


def has_nothing(draft: Draft) -> None:
    """What holds of an attempt from when it is counted until its RayCluster is made, where nothing else is said."""
    for reason in (reasons.CLUSTER_NOT_CREATED, reasons.DRIVER_NOT_SUBMITTED, reasons.NOT_STARTED, reasons.NOT_RESTARTING):
        draft.set(reason)


def observe(world: World, draft: Draft, cluster: Cluster, max_skipped: int) -> None:
    """Facts that hold however the attempt goes on."""
    draft.update(ray_cluster_name=cluster.name)
    mend_start(world, draft)
    if cluster.spec is not None:
        draft.update(total_steps=cluster.spec.algorithm.grpo.steps)
    take_report(world, draft, max_skipped)


def has_succeeded(world: World, cluster: Cluster) -> bool:
    """Exit code 0 and a last report that says so; all steps done where the last report was missed, the report alone where Ray
    can't be asked."""
    if told_its_end(world):
        return world.report is not None and world.report.failed is None
    if not isinstance(world.driver, Driver) or world.driver.status != "SUCCEEDED":
        return False
    report, status = world.report, world.job.status
    if report is not None and (report.finished is not None or report.failed is not None):
        return report.failed is None
    total = cluster.spec.algorithm.grpo.steps if cluster.spec else status.total_steps
    return 0 < total <= step_reached(world)


def mend_start(world: World, draft: Draft) -> None:
    """An attempt that began in the future began before the clock was set back; deadlines must not wait for that time."""
    start = world.job.status.attempt_start_time
    if start is not None and parse_time(start) > world.now:
        draft.update(attempt_start_time=format_time(world.now))


def all_pods_ready(world: World, cluster: Cluster) -> bool:
    """Whether head and workers are all there and ready now."""
    pods = [pod for pod in world.pods_of(cluster.name) if pod.serves]
    return len(pods) >= cluster.wanted and any(pod.head for pod in pods)


def describe(world: World, draft: Draft, cluster: Cluster, stalled: Failure | None = None) -> None:
    """Conditions of an attempt that lives, stalled or not."""
    ready = sum(pod.serves for pod in world.pods_of(cluster.name))
    if all_pods_ready(world, cluster):
        draft.set(reasons.PODS_READY, wanted=cluster.wanted)
    else:
        draft.set(reasons.PODS_PENDING, ready=ready, wanted=cluster.wanted, detail=pods_detail(world, cluster))
    draft.set(reasons.NOT_RESTARTING)
    _describe_driver(world, draft)
    _describe_progress(world, draft, cluster)
    if stalled is not None:
        if draft.reason_of(reasons.STALLED.condition) != reasons.STALLED.name:
            draft.event(reasons.STALLED, stalled.detail)
        draft.set(reasons.STALLED, detail=stalled.detail)


def _describe_driver(world: World, draft: Draft) -> None:
    submission = world.job.submission_id
    match world.driver:
        case Driver(status="RUNNING"):
            draft.set(reasons.DRIVER_RUNNING, submission=submission)
        case Driver(ended=True, exit_code=code):
            how = describe_end(0 if world.driver.status == "SUCCEEDED" else code)
            draft.set(reasons.DRIVER_EXITED, submission=submission, how=how)
        case Driver():
            draft.set(reasons.DRIVER_SUBMITTED, submission=submission)
        case Unreachable(detail):
            draft.set(reasons.DRIVER_UNREACHABLE, detail=f"Ray's dashboard does not answer as it should: {detail}")
        case DriverUnknown() if world.submit_error:
            draft.set(reasons.DRIVER_UNREACHABLE, detail=f"{world.submit_error}; it is submitted again")
        case DriverUnknown() | None:
            draft.set(reasons.DRIVER_NOT_SUBMITTED)


def _describe_progress(world: World, draft: Draft, cluster: Cluster) -> None:
    report = world.report
    if report is None and cluster.provisioned is not None and last_step(world) is not None:
        # An operator that has just started has no report yet; what an earlier one saw holds until there is one.
        draft.set(reasons.STATE_RUNNING, step=step_reached(world), total=world.job.status.total_steps)
        return
    if cluster.provisioned is None or not (world.begun or all_pods_ready(world, cluster)):
        draft.set(reasons.STATE_PROVISIONING, detail=pods_detail(world, cluster))
    elif report is None or steps_of_attempt(report) <= 0:
        draft.set(reasons.STATE_STARTING)
    else:
        draft.set(reasons.STATE_RUNNING, step=report.step, total=report.total_steps)
    if report is not None and steps_of_attempt(report) > 0:
        draft.set(reasons.STEP_ADVANCED, phase=report.phase)
    elif isinstance(world.driver, Driver) or report is not None:
        draft.set(reasons.WAITING_FOR_FIRST_STEP, phase=report.phase if report else "Starting")
    else:
        draft.set(reasons.NOT_STARTED)


def submission(world: World, cluster: Cluster, current: RLJobSpec | None) -> SubmitDriver | None:
    """The driver's submission, when it is due: once, on a complete cluster that does not know it."""
    spec = cluster.spec or current
    if spec is None or not isinstance(world.driver, DriverUnknown) or not all_pods_ready(world, cluster):
        return None
    job = world.job
    return SubmitDriver(
        cluster=cluster.name,
        submission_id=job.submission_id,
        entrypoint=names.DRIVER_ENTRYPOINT,
        environment=_environment(world, cluster, spec),
        metadata={
            "rljob": f"{job.namespace}/{job.name}",
            "rljob_uid": job.uid,
            "rljob_attempt": str(job.status.attempt),
        },
    )


def _environment(world: World, cluster: Cluster, spec: RLJobSpec) -> dict[str, str]:
    environment = driver_environment(world.job, spec)
    if cluster.preflight is not None:
        environment[names.ENV_PREFLIGHT] = cluster.preflight.model_dump_json(by_alias=True, exclude_none=True)
    if (left := active_left(world.job.status, spec.deadlines, world.now)) is not None:
        environment[names.ENV_ACTIVE_SECONDS_LEFT] = f"{max(left, 0):.0f}"
    return environment
