"""`decide(World) -> Plan`: what an RLJob needs now. Pure: no I/O, no clock, no memory of earlier passes.

Three stages, read from the status' lasting fields: between attempts, in an attempt, finished. Conditions are output only.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace

from rljob_api import names, reasons
from rljob_api.findings import errors, render
from rljob_api.manifest import Verdict, judge
from rljob_api.reasons import ConditionType
from rljob_api.rules import check_access
from rljob_api.spec import Deadlines, FailurePolicy, RLJobSpec

from . import attempt, ending
from .draft import Draft
from .plan import Action, CreateCluster, DeleteCluster, PersistAttempt, Plan
from .render import TemplateError, ray_cluster
from .times import format_time, parse_time
from .world import Stage, World

WAIT_SECONDS = 15.0
"""How often something outside (a claim, KubeRay, a namesake) is looked for again."""

PENDING_SECONDS = 5.0
"""How often an attempt is looked at while its pods start."""


@dataclass(frozen=True)
class Terms:
    """The parts of the spec that may change while an attempt runs."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    max_skipped: int = 0
    ttl: int | None = None

    @classmethod
    def of(cls, spec: RLJobSpec | None) -> Terms:
        """The terms of a spec; the defaults where none can be read."""
        if spec is None:
            return cls()
        return cls(spec.deadlines, spec.failure_policy, spec.prompts.max_skipped, spec.ttl_seconds_after_finished)


@dataclass(frozen=True)
class Step:
    """What a stage answers: actions and when to look again."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None


def decide(world: World) -> Plan:
    """The plan for this moment."""
    job = world.job
    if job.deleting:  # the cluster goes by its owner reference, and nothing of ours holds the job back
        return Plan()
    draft = Draft(world)
    verdict = judge_job(world)
    spec = None if errors(verdict.findings) else verdict.spec
    match job.stage:
        case Stage.FINISHED:
            step = _finished(world, draft, spec)
        case Stage.ATTEMPT:
            _validated(draft, verdict)
            step = _in_attempt(world, draft, spec)
        case Stage.BETWEEN:
            _validated(draft, verdict)
            step = _between(world, draft, spec)
    patch, held = draft.patch()
    waits = [seconds for seconds in (step.requeue_after, held) if seconds is not None]
    return Plan(step.actions, patch, tuple(draft.events), min(waits, default=None))


def judge_job(world: World) -> Verdict:
    """The spec's rules, its pod template's shape, the volume of earlier attempts, and whether its pods can share the claim."""
    verdict = judge(world.job.name, world.job.spec)
    if verdict.spec is None or errors(verdict.findings):
        return verdict
    try:
        ray_cluster(world.job, verdict.spec, 1)
    except TemplateError as error:
        return attempt.template_refused(verdict, error)
    findings = verdict.findings + check_access(verdict.spec, world.claim_modes)
    if world.job.stage is not Stage.FINISHED:
        findings = findings + attempt.volume_changed(world.used_volume, verdict.spec)
    return replace(verdict, findings=findings)


def defect(world: World, error: Exception) -> Plan:
    """The plan where a pass ran into an error that nobody foresaw: say so, and leave alone what runs."""
    if world.job.deleting or world.job.stage is Stage.FINISHED:
        return Plan()
    draft = Draft(world)
    words = " ".join(str(error).split())[:500]
    draft.set(reasons.STATE_ERROR, detail=f"{type(error).__name__}: {words}")
    return Plan((), draft.patch()[0])


def _validated(draft: Draft, verdict: Verdict) -> None:
    wrong = errors(verdict.findings)
    if not wrong:
        warnings = [finding for finding in verdict.findings if finding.severity == "warning"]
        draft.set(reasons.VALID, warnings=f"; warnings: {render(warnings)}" if warnings else "")
        return
    reason = reasons.INVALID[wrong[0].reason]
    if draft.reason_of(ConditionType.VALIDATED) != reason.name:
        draft.event("Warning", reason.name, render(wrong))
    draft.set(reason, findings=render(wrong))


# ---- Between attempts ----


def _between(world: World, draft: Draft, spec: RLJobSpec | None) -> Step:
    leftovers = tuple(
        DeleteCluster(one.name, one.uid) for one in world.clusters if one.owner_uid == world.job.uid and not one.deleting
    )
    if waiting := _previous_attempt(world, draft, Terms.of(spec)):
        return Step(leftovers, waiting)
    if spec is None:
        draft.set(reasons.STATE_INVALID)
        # Another claim may take the place of one that can't be shared, without a change of the job.
        return Step(leftovers, WAIT_SECONDS if world.claim_modes else None)
    draft.update(total_steps=spec.algorithm.grpo.steps)
    if detail := _missing(world, draft, spec):
        draft.set(reasons.STATE_PENDING, detail=detail)
        return Step(leftovers, WAIT_SECONDS)
    return _start(world, draft)


def _previous_attempt(world: World, draft: Draft, terms: Terms) -> float | None:
    """Seconds to wait for the previous attempt's pods or for the backoff; None when the next one may start."""
    status = world.job.status
    left = sorted(pod.name for pod in world.pods if pod.job_uid == world.job.uid)
    left += sorted(f"RayCluster {one.name}" for one in world.clusters if one.owner_uid == world.job.uid)
    if left:
        draft.set(reasons.WAITING_FOR_PODS, attempt=status.attempt, pods=", ".join(left))
        draft.set(reasons.STATE_RESTARTING, detail=f"waiting for attempt {status.attempt} to end")
        return WAIT_SECONDS
    due = ending.next_start(status, terms.failure_policy, world.now)
    if due > world.now:
        draft.set(reasons.BACKING_OFF, attempt=status.attempt + 1, time=format_time(due))
        draft.set(reasons.STATE_RESTARTING, detail=f"attempt {status.attempt + 1} starts at {format_time(due)}")
        return max((due - world.now).total_seconds(), 0.1)
    return None


def _missing(world: World, draft: Draft, spec: RLJobSpec) -> str:
    """What outside the job has to come or go first; sets ClusterReady."""
    foreign = [f"RayCluster {one.name}" for one in world.clusters if one.owner_uid != world.job.uid]
    foreign += [f"pod {pod.name}" for pod in world.pods if pod.job_uid != world.job.uid]
    if foreign:
        draft.set(reasons.NAME_TAKEN, what=foreign[0])
        return f"waiting for {foreign[0]} to be gone"
    if world.claim_exists is False:
        return _volume_missing(world, draft, spec)
    if world.kuberay_present is False:
        draft.set(reasons.KUBERAY_MISSING)
        return "KubeRay is not installed"
    return ""


def _volume_missing(world: World, draft: Draft, spec: RLJobSpec) -> str:
    claim = spec.checkpoint.volume.claim_name
    draft.set(reasons.VOLUME_MISSING, claim=claim, namespace=world.job.namespace)
    return f"PersistentVolumeClaim {claim} does not exist"


def _start(world: World, draft: Draft) -> Step:
    number = world.job.status.attempt + 1
    draft.update(attempt=number, attempt_start_time=format_time(world.now), ray_cluster_name=None)
    for reason in (reasons.CLUSTER_NOT_CREATED, reasons.DRIVER_NOT_SUBMITTED, reasons.NOT_STARTED, reasons.NOT_RESTARTING):
        draft.set(reason)
    draft.set(reasons.STATE_PROVISIONING)
    cluster = names.cluster_name(world.job.name, number)
    draft.event("Normal", "AttemptStarted", f"attempt {number} started: RayCluster {cluster}")
    return Step((PersistAttempt(number),), 0.0)


# ---- In an attempt ----


def _in_attempt(world: World, draft: Draft, spec: RLJobSpec | None) -> Step:
    cluster = world.cluster
    terms = Terms.of(spec or (cluster.spec if cluster else None))
    if cluster is None:
        failure = attempt.without_cluster(world, draft, terms.deadlines)
        if failure is not None:
            return _failed(world, draft, failure, terms)
        if spec is None:
            draft.set(reasons.STATE_INVALID)
        elif world.claim_exists is False:
            draft.set(reasons.STATE_PENDING, detail=_volume_missing(world, draft, spec))
        if world.stranger or spec is None or world.claim_exists is False:
            return Step((), WAIT_SECONDS)
        retry = WAIT_SECONDS if world.refusal else 1.0
        return Step((CreateCluster(ray_cluster(world.job, spec, world.job.status.attempt)),), retry)
    attempt.observe(world, draft, cluster, terms.max_skipped)
    if attempt.has_succeeded(world, cluster):
        ending.succeed(world, draft)
        return _let_go(world, draft, terms.ttl)
    if failure := attempt.find_failure(world, cluster, terms.deadlines):
        return _failed(world, draft, failure, terms)
    attempt.describe(world, draft, cluster)
    submit = attempt.submission(world, cluster, spec)
    if submit is not None:
        draft.event("Normal", "DriverSubmitted", f"submitted {submit.submission_id} to RayCluster {cluster.name}")
        return Step((submit,), 0.5)
    # Until all pods are there only the deadline has to be watched: pods announce themselves.
    return Step((), world.poll_seconds if cluster.provisioned else PENDING_SECONDS)


def _failed(world: World, draft: Draft, failure: attempt.Failure, terms: Terms) -> Step:
    if ending.fail(world, draft, failure, terms.failure_policy):
        cluster = world.cluster
        gone = () if cluster is None or cluster.deleting else (DeleteCluster(cluster.name, cluster.uid),)
        return Step(gone, 0.5)
    return _let_go(world, draft, terms.ttl)


# ---- Finished ----


def _finished(world: World, draft: Draft, spec: RLJobSpec | None) -> Step:
    status = world.job.status
    newest = next((one for one in world.clusters if one.name == status.ray_cluster_name), None)
    terms = Terms.of(spec or (newest.spec if newest else None))
    finished = parse_time(status.finish_time) if status.finish_time else world.now
    return _let_go(world, draft, terms.ttl, finished)


def _let_go(world: World, draft: Draft, ttl: int | None, finished: datetime.datetime | None = None) -> Step:
    """Delete the job's clusters, at once or when the time to keep them is over."""
    ours = [one for one in world.clusters if one.owner_uid == world.job.uid and not one.deleting]
    until = (finished or world.now) + datetime.timedelta(seconds=ttl or 0)
    if ours and ttl and until > world.now:
        draft.set(reasons.CLUSTER_KEPT, until=format_time(until))
        return Step((), (until - world.now).total_seconds() + 0.1)
    if name := world.job.status.ray_cluster_name or (ours[0].name if ours else ""):
        draft.set(reasons.CLUSTER_DELETED, cluster=name)
    return Step(tuple(DeleteCluster(one.name, one.uid) for one in ours))
