"""`decide(World) -> Plan`: what an RLJob needs now. Pure: no I/O, no clock, no memory of earlier passes.

Three stages, read from the status' lasting fields: between attempts, in an attempt, finished. Conditions are output only.
"""

from __future__ import annotations

import datetime

from rljob_api import reasons
from rljob_api.findings import errors, render
from rljob_api.manifest import Verdict
from rljob_api.reasons import ConditionType
from rljob_api.spec import RLJobSpec

from . import attempt, ending, preflight, suspension
from .between import decide_between, earlier_attempt, volume_missing
from .classify import Failure
from .deadlines import active_overdue, provisioning_overdue
from .draft import Draft
from .failure import find_failure
from .judging import judge_job
from .plan import Action, CreateCluster, DeleteCluster, DeletePod, DropSecret, Plan, ReleaseWorkers
from .render import ray_cluster
from .terms import PENDING_SECONDS, WAIT_SECONDS, Step, Terms, waits_for_next_attempt
from .times import format_time, parse_time
from .world import Cluster, Stage, World


def decide(world: World) -> Plan:
    """The plan for this moment."""
    job = world.job
    if job.deleting:  # the cluster goes by its owner reference, and nothing of ours holds the job back
        return Plan()
    draft = Draft(world)
    verdict = judge_job(world)
    spec = None if errors(verdict.findings) else verdict.spec
    if draft.reason_of(reasons.CHECKING.condition) == reasons.CHECKING.name:
        draft.set(reasons.NOT_CHECKED)  # who still looks says so again
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
        draft.event(reason, render(wrong))
    draft.set(reason, findings=render(wrong))


def _between(world: World, draft: Draft, spec: RLJobSpec | None) -> Step:
    answer = decide_between(world, draft, spec)
    return answer if isinstance(answer, Step) else _failed(world, draft, answer, Terms.of(spec))


# ---- In an attempt ----


def _in_attempt(world: World, draft: Draft, spec: RLJobSpec | None) -> Step:
    cluster = world.cluster
    terms = Terms.of(spec or (cluster.spec if cluster else None))
    if cluster is not None:
        attempt.observe(world, draft, cluster, terms.max_skipped)
        if attempt.has_succeeded(world, cluster):
            ending.succeed(world, draft)
            return _let_go(world, draft, terms.ttl)
    if world.job.wants_suspension:
        return suspension.end_attempt(world, draft, terms.deadlines)
    suspension.lift(world, draft)
    if failure := active_overdue(world, terms.deadlines):
        return _failed(world, draft, failure, terms)
    if cluster is None:
        return _without_cluster(world, draft, spec, terms)
    if cluster.provisioned is None and spec and cluster.spec and waits_for_next_attempt(cluster.spec, spec):
        return _renewed(world, draft)
    step = _with_cluster(world, draft, cluster, spec, terms)
    stray = (DeleteCluster(one.name, one.uid) for one in world.strays(cluster.name)[1] if not one.deleting)
    actions: list[Action] = [*stray, *step.actions]
    done = world.preflight  # its report is on the cluster now
    if done is not None and not done.deleting:
        actions.insert(0, DeletePod(done.name, done.uid))
    return Step(tuple(actions), step.requeue_after)


def _renewed(world: World, draft: Draft) -> Step:
    """The spec was edited before there was a driver: nobody would wait out a wrong image, and nothing is lost."""
    number = world.job.status.attempt
    detail = f"the spec was edited before the pods of attempt {number} were ready; attempt {number + 1} begins with it"
    draft.update(attempt_end_time=format_time(world.now))
    attempt.has_nothing(draft)
    draft.set(reasons.CLUSTER_DELETED, cluster=world.job.cluster_name)
    draft.set(reasons.WAITING_FOR_PODS, attempt=f"attempt {number}", pods=world.remains)
    draft.set(reasons.STATE_RESTARTING, detail=detail)
    draft.event(reasons.ATTEMPT_RENEWED, detail)
    return Step((*_clusters(world), *_preflights(world)), 0.5)


def _without_cluster(world: World, draft: Draft, spec: RLJobSpec | None, terms: Terms) -> Step:
    """The attempt is counted: look at the volume, then make its cluster."""
    attempt.has_nothing(draft)
    failure = attempt.without_cluster(world, draft, terms.deadlines)
    if failure is not None:
        return _failed(world, draft, failure, terms)
    if spec is None:
        draft.set(reasons.STATE_INVALID)
        return Step((), WAIT_SECONDS)
    if detail := volume_missing(world, draft, spec):
        draft.set(reasons.STATE_PENDING, detail=detail)
        return Step((), WAIT_SECONDS)
    if world.stranger:
        draft.set(reasons.STATE_PROVISIONING, detail="")
        return Step((), WAIT_SECONDS)
    left, actions = earlier_attempt(world, draft)
    if left:
        draft.set(reasons.STATE_PROVISIONING, detail="")
        late = provisioning_overdue(world, terms.deadlines, f"; waiting for {left} of an earlier attempt to be gone")
        return _failed(world, draft, late, terms) if late else Step(actions, WAIT_SECONDS)
    match preflight.judge(world, draft, spec):
        case Failure() as failure:
            return _failed(world, draft, failure, terms)
        case Step() as step:
            return step
        case preflight.Go(report):
            draft.set(reasons.STATE_PROVISIONING, detail="")
            draft.update(checkpoint_volume=spec.checkpoint.volume)
            manifest = ray_cluster(world.job, spec, world.job.status.attempt, report)
            return Step((CreateCluster(manifest),), WAIT_SECONDS if world.refused else 1.0)


def _with_cluster(world: World, draft: Draft, cluster: Cluster, spec: RLJobSpec | None, terms: Terms) -> Step:
    failure = find_failure(world, cluster, terms.deadlines)
    stalled = failure is not None and failure.reason == "StallDeadlineExceeded" and terms.deadlines.on_stall == "Warn"
    if failure is not None and not stalled:
        return _failed(world, draft, failure, terms)
    attempt.describe(world, draft, cluster, failure)
    submit = attempt.submission(world, cluster, spec)
    if submit is not None:
        draft.event(reasons.SUBMITTED, f"submitted {submit.submission_id} to RayCluster {cluster.name}")
        return Step((submit,), 0.5)
    # Until all pods are there only the deadline has to be watched: pods announce themselves.
    return Step((), world.poll_seconds if cluster.provisioned else PENDING_SECONDS)


def _failed(world: World, draft: Draft, failure: Failure, terms: Terms) -> Step:
    secret = (DropSecret(world.job.cluster_name),) if world.has_bare_secret else ()
    if not ending.fail(world, draft, failure, terms):
        step = _let_go(world, draft, terms.ttl)
        return Step((*secret, *step.actions), step.requeue_after)
    return Step((*_clusters(world), *secret, *_preflights(world)), 0.5)


def _clusters(world: World) -> tuple[DeleteCluster, ...]:
    """The deletion of the attempt's cluster, where there is one to delete."""
    one = world.cluster
    return () if one is None or one.deleting else (DeleteCluster(one.name, one.uid),)


def _preflights(world: World) -> tuple[DeletePod, ...]:
    pods = (one for one in world.pods if one.preflight and one.job_uid == world.job.uid and not one.deleting)
    return tuple(DeletePod(one.name, one.uid) for one in pods)


# ---- Finished ----


def _finished(world: World, draft: Draft, spec: RLJobSpec | None) -> Step:
    status = world.job.status
    newest = next((one for one in world.clusters if one.name == status.ray_cluster_name), None)
    terms = Terms.of(spec or (newest.spec if newest else None))
    if (status.observed_generation or world.job.generation) < world.job.generation:
        draft.event(reasons.EDIT_IGNORED, reasons.EDITED_AFTER_END)
    # A moment in the future was before the clock was set back.
    finished = min(parse_time(status.finish_time), world.now) if status.finish_time else world.now
    return _let_go(world, draft, terms.ttl, finished)


def _let_go(world: World, draft: Draft, ttl: int | None, finished: datetime.datetime | None = None) -> Step:
    """Let the job's pods go: workers at once, the head (logs, dashboard) at once or when the time to keep it is over."""
    ours = [one for one in world.clusters if one.owner_uid == world.job.uid and not one.deleting]
    until = (finished or world.now) + datetime.timedelta(seconds=ttl or 0)
    if ours and ttl and until > world.now:
        draft.set(reasons.CLUSTER_KEPT, until=format_time(until))
        released = tuple(ReleaseWorkers(one.name, one.uid) for one in ours if one.workers)
        return Step((*released, *_preflights(world)), (until - world.now).total_seconds() + 0.1)
    if name := world.job.status.ray_cluster_name or (ours[0].name if ours else ""):
        draft.set(reasons.CLUSTER_DELETED, cluster=name)
    return Step((*(DeleteCluster(one.name, one.uid) for one in ours), *_preflights(world)))
