"""Observe, decide, act: one pass over one job. All I/O of a pass is here, all judgement is in `decide`."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rljob_api import names
from rljob_api.findings import errors
from rljob_api.progress import ProgressReport

from .act import Actor, Outcome
from .api import KubeApi, Object, RayApi
from .decide import decide, judge_job
from .plan import Plan
from .settings import Settings
from .store import Store
from .times import parse_time
from .world import Cluster, Driver, DriverUnknown, Job, Key, Pod, Stage, Unreachable, World, read_pod

log = logging.getLogger("rljob.reconciler")

_EVENT_SECONDS = 10.0
_TELLING = frozenset({"DeletedHeadPod", "DeletedWorkerPod"})


@dataclass
class Notes:
    """What one attempt's passes remember in this process. Losing it costs requests, never correctness."""

    uid: str
    attempt: int
    outcome: Outcome = field(default_factory=Outcome)
    report: ProgressReport | None = None
    driver_seen: bool = False
    incomplete_since: datetime.datetime | None = None
    members: frozenset[str] = frozenset()
    warning: str = ""
    warning_read: datetime.datetime | None = None


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
        clock: Callable[[], datetime.datetime] = utc_now,
        kuberay_present: bool = False,
        on_kuberay: Callable[[], None] = lambda: None,
    ) -> None:
        self._kube = kube
        self._ray = ray
        self._store = store
        self._settings = settings
        self._clock = clock
        self._kuberay = kuberay_present
        self._on_kuberay = on_kuberay
        self._actor = Actor(kube, ray, store)
        self._notes: dict[Key, Notes] = {}
        self._written: dict[Key, datetime.datetime] = {}

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
        self._log(job, plan)
        again = await self._actor.act(world, plan, notes.outcome)
        if plan.status_patch is not None and again is None:
            self._written[key] = world.now
        return plan.requeue_after if again is None else again

    def _notes_of(self, job: Job) -> Notes:
        notes = self._notes.get(job.key)
        if notes is None or (notes.uid, notes.attempt) != (job.uid, job.status.attempt):
            notes = self._notes[job.key] = Notes(job.uid, job.status.attempt)
        return notes

    def _log(self, job: Job, plan: Plan) -> None:
        for action in plan.actions:
            log.info("%s/%s: %s", job.namespace, job.name, type(action).__name__)
        for note in plan.events:
            level = logging.WARNING if note.type == "Warning" else logging.INFO
            log.log(level, "%s/%s: %s: %s", job.namespace, job.name, note.reason, note.message)

    # ---- Observing ----

    async def observe(self, job: Job, notes: Notes) -> World:
        """Everything that this stage's decision needs, and no more."""
        world = World(
            now=self._clock(),
            job=job,
            clusters=tuple(self._store.clusters.owned_by(job.key)),
            pods=tuple(self._store.pods.owned_by(job.key)),
            departed=tuple(self._store.departed(job.key)),
            stranger=notes.outcome.stranger,
            refusal=notes.outcome.refusal,
            submit_error=notes.outcome.submit_error,
            report=notes.report,
            driver_seen=notes.driver_seen,
            warning=notes.warning,
            written=self._written.get(job.key),
            status_seconds=self._settings.status_seconds,
            poll_seconds=self._settings.poll_seconds,
        )
        if job.deleting or job.stage is Stage.FINISHED:
            return world
        if job.stage is Stage.BETWEEN:
            return await self._observe_between(world)
        return await self._observe_attempt(world, notes)

    async def _observe_between(self, world: World) -> World:
        job = world.job
        verdict = judge_job(world)
        valid = verdict.spec is not None and not errors(verdict.findings)
        if not valid and job.status.attempt == 0:
            return world
        world = replace(world, pods=await self._pods(job))
        if verdict.spec is None or not valid:
            return world
        claim = verdict.spec.checkpoint.volume.claim_name
        return replace(
            world,
            claim_exists=await self._kube.claim_exists(job.namespace, claim),
            kuberay_present=await self._kuberay_present(),
        )

    async def _kuberay_present(self) -> bool:
        if not self._kuberay and await self._kube.kuberay_present():
            self._kuberay = True
            self._on_kuberay()
        return self._kuberay

    async def _pods(self, job: Job) -> tuple[Pod, ...]:
        """Pods from the server: that there is none is never concluded from a cache."""
        objects = await self._kube.list_pods(job.namespace, f"{names.LABEL_JOB}={job.name}")
        return tuple(read_pod(obj) for obj in objects)

    async def _observe_attempt(self, world: World, notes: Notes) -> World:
        job = world.job
        if world.cluster is None:
            obj = await self._kube.get_cluster(job.namespace, job.cluster_name)
            if obj is None:  # pods without it tell that it was there
                return replace(world, pods=await self._pods(job))
            notes.outcome.stranger = stranger(obj, job.uid)
            if notes.outcome.stranger:
                return replace(world, stranger=notes.outcome.stranger)
            self._store.take("rayclusters", obj)
            world = replace(world, clusters=tuple(self._store.clusters.owned_by(job.key)), stranger="")
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

    async def _observe_trouble(self, world: World, cluster: Cluster, notes: Notes) -> World:
        """The newest event that tells of trouble, while something is missing; asked for now and then."""
        if _complete(world, cluster):
            return world
        age = (world.now - cluster.created).total_seconds()
        recently = notes.warning_read and (world.now - notes.warning_read).total_seconds() < _EVENT_SECONDS
        if age < _EVENT_SECONDS or (recently and cluster.provisioned is None):
            return world
        notes.warning_read = world.now
        notes.warning = newest_warning(await self._kube.events_of(world.job.namespace, cluster.name, "RayCluster"))
        return replace(world, warning=notes.warning)

    async def _observe_driver(self, world: World, cluster: Cluster, notes: Notes) -> World:
        job = world.job
        driver = await self._ray.driver(job.namespace, cluster.name, job.submission_id)
        world = replace(world, driver=driver)
        if isinstance(driver, (DriverUnknown, Unreachable)):
            return world
        notes.driver_seen = True
        if driver.status != "PENDING":
            await self._observe_report(world, cluster, driver, notes)
        return replace(world, report=notes.report, driver_seen=True)

    async def _observe_report(self, world: World, cluster: Cluster, driver: Driver, notes: Notes) -> None:
        job = world.job
        known = notes.report is not None and (notes.report.finished or notes.report.failed)
        if driver.ended and known:
            return
        report = await self._ray.report(job.namespace, cluster.name)
        if driver.ended and not _is_final(report):
            logged = await self._ray.last_report_in_logs(job.namespace, cluster.name, job.submission_id)
            report = logged if isinstance(logged, ProgressReport) else report
        if isinstance(report, Unreachable):
            log.debug("%s/%s: no report: %s", job.namespace, job.name, report.detail)
        elif (report.uid, report.attempt) == (job.uid, job.status.attempt):
            notes.report = report
        else:
            log.warning("%s/%s: a report of uid %s, attempt %s is passed over", *job.key, report.uid, report.attempt)


def _is_final(report: ProgressReport | Unreachable) -> bool:
    return isinstance(report, ProgressReport) and bool(report.finished or report.failed)


def _complete(world: World, cluster: Cluster) -> bool:
    """Whether the cache shows every pod of the attempt alive and ready."""
    pods = [pod for pod in world.pods_of(cluster.name) if pod.ready and not pod.ended and not pod.deleting]
    return len(pods) == cluster.wanted and any(pod.head for pod in pods)


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
