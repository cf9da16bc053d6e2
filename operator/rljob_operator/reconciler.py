"""Observe, decide, act: one pass over one job. All I/O of a pass is here, all judgement is in `decide`."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rljob_api import names, reasons
from rljob_api.findings import errors
from rljob_api.progress import ProgressReport

from .access import Access
from .act import Actor, Outcome
from .api import KubeApi, Object, RayApi
from .decide import decide, defect
from .judging import judge_job
from .plan import PersistAttempt, Plan
from .reading import read_cluster, read_pod
from .settings import Settings
from .store import Store
from .times import parse_time
from .world import Claim, Cluster, Driver, DriverUnknown, Job, Key, Pod, Stage, Unreachable, World

log = logging.getLogger("rljob.reconciler")

_EVENT_SECONDS = 10.0
_GAP_SECONDS = 60.0
_STARTUP_SECONDS = 60.0
_NOT_SCHEDULED = "FailedScheduling"
_NOT_READY = "Unhealthy"
_WAITS_FOR_POD = "WaitForFirstConsumer"
_TELLING = frozenset({"DeletedHeadPod", "DeletedWorkerPod"})


@dataclass
class Notes:
    """What one attempt's passes remember in this process. Losing it costs requests, never correctness."""

    uid: str
    attempt: int
    outcome: Outcome = field(default_factory=Outcome)
    report: ProgressReport | None = None
    heard: datetime.datetime | None = None
    driver_seen: bool = False
    ended_since: datetime.datetime | None = None
    looked: datetime.datetime | None = None
    watched_since: datetime.datetime | None = None
    incomplete_since: datetime.datetime | None = None
    members: frozenset[str] = frozenset()
    warning: str = ""
    warning_read: datetime.datetime | None = None

    def look(self, now: datetime.datetime, longest_gap: float) -> None:
        """Note a look at the attempt. After a gap (a new process, one that was halted, a clock set back) the watch is new."""
        if self.looked is None or not 0 <= (now - self.looked).total_seconds() <= longest_gap:
            self.watched_since = now
        self.looked = now


def utc_now() -> datetime.datetime:
    """The clock."""
    return datetime.datetime.now(datetime.UTC)


class Reconciler:
    """Passes over jobs; one at a time per job, many jobs at once."""

    def __init__(
        self,
        *,
        kube: KubeApi,
        ray: RayApi,
        store: Store,
        settings: Settings,
        access: Access,
        clock: Callable[[], datetime.datetime] = utc_now,
        kuberay_present: bool = False,
        on_kuberay: Callable[[], None] = lambda: None,
    ) -> None:
        self._kube = kube
        self._ray = ray
        self._store = store
        self._settings = settings
        self._clock = clock
        self.kuberay_present = kuberay_present
        """Whether KubeRay was seen; found out again while it was not."""
        self._on_kuberay = on_kuberay
        self._actor = Actor(kube, ray, store, access)
        self._notes: dict[Key, Notes] = {}
        self._written: dict[Key, datetime.datetime] = {}
        self._longest_gap = max(_GAP_SECONDS, 4 * settings.poll_seconds)

    async def reconcile(self, key: Key) -> float | None:
        """One pass; returns in how many seconds the next is due. Raises ApiError, ApiUnreachableError, RayError."""
        job = self._store.jobs.get(key)
        if job is None:
            self._notes.pop(key, None)
            self._written.pop(key, None)
            return None
        notes = self._notes_of(job)
        world = await self.observe(job, notes)
        plan = decide(world)
        again = await self._act(world, plan, notes)
        counted = any(isinstance(action, PersistAttempt) for action in plan.actions)
        return await self._begin_attempt(world) if counted and again is None else _next_pass(plan, again)

    async def _act(self, world: World, plan: Plan, notes: Notes, *, newest: bool = False) -> float | None:
        again = await self._actor.act(world, plan, notes.outcome, newest=newest)
        if plan.status_patch is not None and again is None:
            self._written[world.job.key] = world.now
        return again

    async def _begin_attempt(self, looked: World) -> float | None:
        """An attempt was counted: make what it needs first, in the same pass and by the same look.

        The look still holds: the write that counted would have been refused on another version of the job, and nothing bears
        the new attempt's names but what somebody else made, which a create finds out. That saves a third of the requests
        before the first child; and of many jobs that come at once, the first ones have their children first.
        """
        job = self._store.jobs.get(looked.job.key)
        if job is None or job.generation != looked.job.generation:  # edited since: what it needs now is looked for anew
            return 0.0
        notes = self._notes_of(job)
        notes.look(looked.now, self._longest_gap)
        world = replace(
            self._world(job, notes),
            clusters=looked.clusters,
            pods=looked.pods,
            claim_exists=looked.claim_exists,
            claim_modes=looked.claim_modes,
            claim_wait=looked.claim_wait,
            claim_unused=looked.claim_unused,
            kuberay_present=looked.kuberay_present,
            watched_since=notes.watched_since,
        )
        plan = decide(world)
        return _next_pass(plan, await self._act(world, plan, notes, newest=True))

    async def tell_defect(self, key: Key, error: Exception) -> None:
        """Write into the status that this job's pass ran into a defect. Raises what requests raise."""
        job = self._store.jobs.get(key)
        if job is not None:
            world = World(now=self._clock(), job=job)
            await self._actor.act(world, defect(world, error), Outcome())

    def _notes_of(self, job: Job) -> Notes:
        notes = self._notes.get(job.key)
        if notes is None or (notes.uid, notes.attempt) != (job.uid, job.status.attempt):
            notes = self._notes[job.key] = Notes(job.uid, job.status.attempt)
        return notes

    # ---- Observing ----

    def _world(self, job: Job, notes: Notes) -> World:
        """What is known without asking anybody."""
        return World(
            now=self._clock(),
            job=job,
            clusters=tuple(self._store.clusters.owned_by(job.key)),
            pods=tuple(self._store.pods.owned_by(job.key)),
            departed=tuple(self._store.departed(job.key)),
            stranger=notes.outcome.stranger,
            refusal=notes.outcome.refusal,
            submit_error=notes.outcome.submit_error,
            save=notes.outcome.save,
            preflight_image=self._settings.preflight_image,
            report=notes.report,
            heard=notes.heard,
            ended_since=notes.ended_since,
            driver_seen=notes.driver_seen,
            warning=notes.warning,
            written=self._written.get(job.key),
            status_seconds=self._settings.status_seconds,
            poll_seconds=self._settings.poll_seconds,
        )

    async def observe(self, job: Job, notes: Notes) -> World:
        """Everything that this stage's decision needs, and no more."""
        world = self._world(job, notes)
        if not job.wants_suspension:
            notes.outcome.save = None  # the next suspension needs a save of its own
        if job.deleting:
            return world
        match job.stage:
            case Stage.FINISHED:
                return await self._observe_finished(world)
            case Stage.BETWEEN:
                return await self._observe_between(world)
            case Stage.ATTEMPT:
                notes.look(world.now, self._longest_gap)
                return await self._observe_attempt(replace(world, watched_since=notes.watched_since), notes)

    async def _observe_finished(self, world: World) -> World:
        """Nothing to ask, but where the status says that a cluster is kept and the cache has none: it may be new and empty."""
        job, name = world.job, world.job.status.ray_cluster_name
        kept = any(one.reason == reasons.CLUSTER_KEPT.name for one in job.status.conditions)
        if not kept or not name or any(one.owner_uid == job.uid for one in world.clusters):
            return world
        obj = await self._kube.get_cluster(job.namespace, name)
        if obj is None or stranger(obj, job.uid):
            return world
        return replace(world, clusters=(*world.clusters, read_cluster(obj)))

    async def _observe_between(self, world: World) -> World:
        job = world.job
        verdict = judge_job(world)
        valid = verdict.spec is not None and not errors(verdict.findings)
        if not valid and job.status.attempt == 0:
            return world
        world = replace(world, clusters=await self._clusters(job), pods=await self._pods(job))
        return await self._observe_claim(world) if valid else world

    async def _observe_claim(self, world: World) -> World:
        """What has to be there before a cluster is made, where the spec is one to make it from."""
        verdict = judge_job(world)
        if verdict.spec is None or errors(verdict.findings):
            return world
        name = verdict.spec.checkpoint.volume.claim_name
        claim = await self._kube.claim(world.job.namespace, name)
        world = replace(
            world,
            claim_exists=claim is not None,
            claim_modes=claim.modes if claim else (),
            kuberay_present=await self._kuberay_present(),
        )
        if claim is None or claim.bound or not world.preflight_image:
            return world
        return await self._observe_unbound(world, claim)

    async def _observe_unbound(self, world: World, claim: Claim) -> World:
        """Why a claim has no volume yet. Its class is not read (that right would be for the whole cluster): events tell."""
        events = await self._kube.events_of(world.job.namespace, "PersistentVolumeClaim", claim.uid)
        newest = max(events, key=_event_time, default={})
        if newest.get("reason") == _WAITS_FOR_POD:
            return replace(world, claim_unused=True)
        return replace(world, claim_wait=newest_warning(events) or "it is not bound to a volume yet")

    async def _clusters(self, job: Job) -> tuple[Cluster, ...]:
        """RayClusters from the server, for the same reason as pods; the last attempt's also where its label was taken off."""
        objects = list(await self._kube.list_clusters(job.namespace, f"{names.LABEL_JOB}={job.name}"))
        if job.status.attempt and all(obj["metadata"]["name"] != job.cluster_name for obj in objects):
            last = await self._kube.get_cluster(job.namespace, job.cluster_name)
            objects += [] if last is None or stranger(last, job.uid) else [last]  # a stranger's name is not asked for again
        return tuple(read_cluster(obj) for obj in objects)

    async def _kuberay_present(self) -> bool:
        if not self.kuberay_present and await self._kube.kuberay_present():
            self.kuberay_present = True
            self._on_kuberay()
        return self.kuberay_present

    async def _pods(self, job: Job) -> tuple[Pod, ...]:
        """Pods from the server: that there is none is never concluded from a cache."""
        objects = await self._kube.list_pods(job.namespace, f"{names.LABEL_JOB}={job.name}")
        return tuple(read_pod(obj) for obj in objects)

    async def _observe_attempt(self, world: World, notes: Notes) -> World:
        job, cluster = world.job, world.cluster
        if cluster is None or (cluster.provisioned is None and notes.watched_since == world.now):
            world = await self._look_up(world, notes)
            cluster = world.cluster
        if cluster is None or cluster.deleting:
            return world
        if cluster.provisioned and not _complete(world, cluster):
            world = replace(world, pods=await self._pods(job))
        if cluster.provisioned and not _complete(world, cluster):
            notes.incomplete_since = notes.incomplete_since or world.now
        elif cluster.provisioned:
            notes.incomplete_since = None
            notes.members = notes.members or frozenset(pod.name for pod in world.pods_of(cluster.name))
        world = replace(world, incomplete_since=notes.incomplete_since, members=notes.members)
        world = await self._observe_trouble(world, cluster, notes)
        if cluster.provisioned and any(pod.head and not pod.ended for pod in world.pods_of(cluster.name)):
            return await self._observe_driver(world, cluster, notes)
        return world

    async def _look_up(self, world: World, notes: Notes) -> World:
        """The attempt's cluster from the server: that there is none, or none with ready pods, is not taken from a cache."""
        job = world.job
        obj = await self._kube.get_cluster(job.namespace, job.cluster_name)
        notes.outcome.stranger = "" if obj is None else stranger(obj, job.uid)
        others = tuple(one for one in world.clusters if one.name != job.cluster_name)
        world = replace(world, clusters=others, stranger=notes.outcome.stranger)
        if obj is None:  # pods without it tell that it was there
            world = await self._observe_preflight(replace(world, pods=await self._pods(job)), notes)
            return world if job.status.ray_cluster_name == job.cluster_name else await self._observe_claim(world)
        self._store.take("rayclusters", obj)  # passes over one whose label was taken off, so it is read here too
        return replace(world, clusters=(*others, read_cluster(obj)))

    async def _observe_trouble(self, world: World, cluster: Cluster, notes: Notes) -> World:
        """The newest event that tells of trouble, while something is missing; asked for now and then."""
        if _complete(world, cluster):
            return world
        young = _is_recent(world, cluster.created, _EVENT_SECONDS)
        recently = _is_recent(world, notes.warning_read, _EVENT_SECONDS)
        if young or (recently and cluster.provisioned is None):
            return world
        events = [*await self._kube.events_of(world.job.namespace, "RayCluster", cluster.uid)]
        silent = next((one for one in world.pods_of(cluster.name) if not one.ready and not one.trouble), None)
        if silent is not None and not any(one.trouble for one in world.pods_of(cluster.name)):
            told = await self._kube.events_of(world.job.namespace, "Pod", silent.uid)  # a volume that can't be mounted
            over = {_NOT_SCHEDULED}  # it was, or the pod would say so
            if _is_recent(world, cluster.created, _STARTUP_SECONDS):
                over.add(_NOT_READY)  # every pod is asked before it can answer
            events += [one for one in told if one.get("reason") not in over]
        return self._warned(world, notes, events)

    async def _observe_preflight(self, world: World, notes: Notes) -> World:
        """The newest event that tells why the preflight's pod does not start, where the pod itself says nothing."""
        pod = world.preflight
        if pod is None or pod.ended or pod.trouble or _is_recent(world, pod.created, _EVENT_SECONDS):
            return world
        if _is_recent(world, notes.warning_read, _EVENT_SECONDS):
            return world
        return self._warned(world, notes, await self._kube.events_of(world.job.namespace, "Pod", pod.uid))

    def _warned(self, world: World, notes: Notes, events: Iterable[Object]) -> World:
        notes.warning_read = world.now
        notes.warning = newest_warning(events)
        return replace(world, warning=notes.warning)

    async def _observe_driver(self, world: World, cluster: Cluster, notes: Notes) -> World:
        job = world.job
        driver = await self._ray.driver(job)
        world = replace(world, driver=driver)
        if isinstance(driver, DriverUnknown):
            return world
        if isinstance(driver, Unreachable):  # Ray's dashboard may be gone while the driver trains on and says so
            await self._observe_report(world, None, notes)
            if notes.ended_since is None and _is_final(notes.report):
                notes.ended_since = world.now
            return replace(world, report=notes.report, heard=notes.heard, ended_since=notes.ended_since)
        notes.driver_seen = True
        if driver.ended and notes.ended_since is None:
            notes.ended_since = world.now
        if driver.status != "PENDING":
            await self._observe_report(world, driver, notes)
        return replace(world, report=notes.report, heard=notes.heard, driver_seen=True, ended_since=notes.ended_since)

    async def _observe_report(self, world: World, driver: Driver | None, notes: Notes) -> None:
        job, ended = world.job, driver is not None and driver.ended
        known = notes.report is not None and (notes.report.finished or notes.report.failed)
        if ended and known:
            return
        report = await self._ray.report(job)
        if ended and not _is_final(report):
            logged = await self._ray.last_report_in_logs(job)
            report = logged if isinstance(logged, ProgressReport) else report
        if isinstance(report, Unreachable):
            log.debug("%s/%s: no report: %s", job.namespace, job.name, report.detail)
        elif (report.uid, report.attempt) == (job.uid, job.status.attempt):
            notes.report, notes.heard = report, world.now
        else:
            log.warning("%s/%s: a report of uid %s, attempt %s is passed over", *job.key, report.uid, report.attempt)


def _next_pass(plan: Plan, again: float | None) -> float | None:
    """When the next pass is due: as planned, unless acting found that the plan no longer holds."""
    return plan.requeue_after if again is None else again


def _is_recent(world: World, moment: datetime.datetime | None, seconds: float) -> bool:
    """Whether it is less than that ago; never a moment in the future, which a clock that was set back leaves behind."""
    return moment is not None and 0 <= (world.now - moment).total_seconds() < seconds


def _is_final(report: ProgressReport | Unreachable | None) -> bool:
    return isinstance(report, ProgressReport) and bool(report.finished or report.failed)


def _complete(world: World, cluster: Cluster) -> bool:
    """Whether the cache shows every pod of the attempt alive and ready."""
    pods = [pod for pod in world.pods_of(cluster.name) if pod.serves]
    return len(pods) >= cluster.wanted and any(pod.head for pod in pods)


def stranger(cluster: Object, uid: str) -> str:
    """Who owns a RayCluster, when it is not the job with this uid; empty when it is."""
    owners = cluster["metadata"].get("ownerReferences") or []
    if any(one.get("controller") and one.get("uid") == uid for one in owners):
        return ""
    return f"{owners[0]['kind']} {owners[0]['name']} (uid {owners[0]['uid']})" if owners else "no owner that is known"


def newest_warning(events: Iterable[Object]) -> str:
    """Reason and message of the newest event that tells of trouble."""
    telling = [one for one in events if one.get("type") == "Warning" or one.get("reason") in _TELLING]
    if not telling:
        return ""
    newest = max(telling, key=_event_time)
    return f"{newest.get('reason', '')}: {' '.join((newest.get('message') or '').split())}"[:1000]


def _event_time(event: Object) -> datetime.datetime:
    text = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return parse_time(text)
