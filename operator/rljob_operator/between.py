"""Between attempts: what is left of the last one goes, what the next one needs is looked for, and its number is counted."""

from __future__ import annotations

import math

from rljob_api import names, reasons
from rljob_api.spec import RLJobSpec

from . import attempt, ending, preflight, suspension
from .classify import Failure
from .deadlines import active_overdue
from .draft import Draft
from .plan import Action, DeleteCluster, DeletePod, PersistAttempt
from .terms import WAIT_SECONDS, Step, Terms
from .times import format_time, parse_time
from .world import World, listed

_UNOWNED = ", which has no owner that would end it (kubectl delete raycluster does),"
"""Deleted with `--cascade=orphan`, a job leaves its RayCluster running for ever."""
_COLLECTED_SECONDS = 60.0
"""By then Kubernetes' garbage collector has ended the pods of a RayCluster that is gone: it looks for new kinds every 30 s."""


def decide_between(world: World, draft: Draft, spec: RLJobSpec | None) -> Step | Failure:
    """The next step, or the failure that ends the job."""
    leftovers, left = _leftovers(world), world.remains
    if world.job.wants_suspension:
        return suspension.rest(world, draft, left, leftovers)
    suspension.lift(world, draft)
    terms = Terms.of(spec)
    if overdue := active_overdue(world, terms.deadlines):
        return overdue
    if waiting := _previous_attempt(world, draft, left, terms):
        return Step(leftovers, waiting)
    draft.set(reasons.NOT_RESTARTING)
    draft.set(reasons.CLUSTER_NOT_CREATED)  # what was missing before may be there by now
    if spec is None:
        draft.set(reasons.STATE_INVALID)
        # Another claim may take the place of one that can't be shared, without a change of the job.
        return Step(leftovers, WAIT_SECONDS if world.claim_modes else None)
    draft.update(total_steps=spec.algorithm.grpo.steps)
    if detail := _missing(world, draft, spec):
        draft.set(reasons.STATE_PENDING, detail=detail)
        return Step(leftovers, WAIT_SECONDS)
    return _start(world, draft, spec)


def _leftovers(world: World, but: str = "") -> tuple[Action, ...]:
    """What ends the rest of earlier attempts. Pods go with their RayCluster, which takes Kubernetes a moment; those that it
    does not end (somebody has cut them loose, KubeRay made them too late) would stay for ever."""
    pods, clusters = world.strays(but)
    there = {"", *(one.name for one in world.clusters)}
    late = _seconds_between_attempts(world) >= _COLLECTED_SECONDS
    gone = [one for one in pods if not one.deleting and (one.preflight or (late and one.cluster not in there))]
    ends = [DeleteCluster(one.name, one.uid) for one in clusters if not one.deleting]
    return (*ends, *(DeletePod(one.name, one.uid) for one in gone))


def _seconds_between_attempts(world: World) -> float:
    """Seconds since the last attempt ended, or since the one that is counted was; endless where the status does not say."""
    status = world.job.status
    since = status.attempt_end_time or status.attempt_start_time
    passed = (world.now - parse_time(since)).total_seconds() if since else math.inf
    return passed if passed >= 0 else math.inf  # the clock was set back


def earlier_attempt(world: World, draft: Draft) -> tuple[str, tuple[Action, ...]]:
    """What of an earlier attempt is there although this one is counted, and what ends it; empty as a rule.

    KubeRay may make one more pod of a RayCluster that is gone, and a halted process that wakes up, or somebody's hand in the
    status, may bring back more.
    """
    mine = world.job.cluster_name
    left = listed(*world.strays(mine))
    if left:
        draft.set(reasons.WAITING_FOR_PODS, attempt="an earlier attempt", pods=left)
    return left, _leftovers(world, mine)


def _previous_attempt(world: World, draft: Draft, left: str, terms: Terms) -> float | None:
    """Seconds to wait for the previous attempt's pods or for the backoff; None when the next one may start."""
    status = world.job.status
    if left:
        draft.set(reasons.WAITING_FOR_PODS, attempt=f"attempt {status.attempt}", pods=left)
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
    foreign = [
        f"RayCluster {one.name}{'' if one.owner_uid else _UNOWNED}" for one in world.clusters if one.owner_uid != world.job.uid
    ]
    foreign += [f"pod {pod.name}" for pod in world.pods if pod.job_uid != world.job.uid]
    if foreign:
        draft.set(reasons.NAME_TAKEN, what=foreign[0])
        return f"waiting for {foreign[0]} to be gone"
    if detail := volume_missing(world, draft, spec):
        return detail
    if world.kuberay_present is False:
        draft.set(reasons.KUBERAY_MISSING)
        return "KubeRay is not installed"
    return ""


def volume_missing(world: World, draft: Draft, spec: RLJobSpec) -> str:
    """Why the checkpoint volume can't be mounted yet, which ClusterReady then says; empty where it can."""
    claim = spec.checkpoint.volume.claim_name
    if world.claim_exists is False:
        draft.set(reasons.VOLUME_MISSING, claim=claim, namespace=world.job.namespace)
        return f"PersistentVolumeClaim {claim} does not exist"
    if world.claim_wait:
        draft.set(reasons.VOLUME_UNBOUND, claim=claim, detail=world.claim_wait)
        return f"PersistentVolumeClaim {claim} has no volume yet"
    return ""


def _start(world: World, draft: Draft, spec: RLJobSpec) -> Step:
    number, now = world.job.status.attempt + 1, format_time(world.now)
    draft.update(
        attempt=number,
        attempt_start_time=now,
        attempt_end_time=None,
        start_time=world.job.status.start_time or now,
        ray_cluster_name=None,
        resume=None,
    )
    if not preflight.looks(world):  # the cluster comes next: one write for both
        draft.update(checkpoint_volume=spec.checkpoint.volume)
    attempt.has_nothing(draft)
    draft.set(reasons.STATE_PROVISIONING, detail="")
    cluster = f"RayCluster {names.cluster_name(world.job.name, number)}"
    follows = f"the volume is looked at, then comes {cluster}" if preflight.looks(world) else f"{cluster} comes next"
    draft.event(reasons.ATTEMPT_STARTED, f"attempt {number} is counted; {follows}")
    return Step((PersistAttempt(number),), 0.0)
