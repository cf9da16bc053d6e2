"""The running operator: watches feed the store, the queue feeds the reconciler, a slow resync mends what the watches missed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack

from aiohttp import web

from rljob_api import names

from . import health as health_module
from .access import Access
from .api import ApiError, ApiUnreachableError, NotFoundError, Object, RayError
from .kube import Kube
from .logs import about
from .metrics import Process, render
from .ray import DirectTransport, Ray
from .reconciler import Reconciler
from .settings import API_SERVER_PROXY, DIRECT, Settings
from .shell import watch
from .store import Store
from .workqueue import WorkQueue
from .world import Key

log = logging.getLogger("rljob.operator")

# What the operator does to objects of other people; the chart's roles grant exactly this.
NEEDED = (
    *((verb, names.GROUP, names.PLURAL) for verb in ("get", "list", "watch")),
    ("patch", names.GROUP, f"{names.PLURAL}/status"),
    *((verb, "ray.io", "rayclusters") for verb in ("get", "list", "watch", "create", "patch", "delete")),
    *((verb, "", "pods") for verb in ("list", "watch", "create", "delete")),
    ("get", "", "persistentvolumeclaims"),
    *((verb, "", "events") for verb in ("list", "create")),
    *((verb, "", "secrets") for verb in ("create", "delete")),
    ("create", "networking.k8s.io", "networkpolicies"),
)
NEEDED_BY_PROXY = (("get", "", "services/proxy"), ("create", "", "services/proxy"))

_RESYNC_RETRY_SECONDS = 15.0
_START_RETRY_SECONDS = 3.0


class StartError(Exception):
    """The operator can't start; the message says what is missing and what would do."""


class NotYetError(Exception):
    """Something of the cluster is missing that may come; the message says what would do."""


async def check(kube: Kube, settings: Settings) -> bool:
    """Whether KubeRay is there. Raises NotYetError without our API, StartError without a permission, ApiUnreachableError."""
    if not await kube.crd_present():
        raise NotYetError(
            f"the API {names.API_VERSION} does not exist on {kube.server}; install the chart rljob-crds (or rljob) first"
        )
    missing = []
    needed = NEEDED + (NEEDED_BY_PROXY if settings.ray_access == API_SERVER_PROXY else ())
    for namespace in settings.namespaces or (None,):
        where = f"in namespace {namespace}" if namespace else "in all namespaces"
        for verb, group, resource in needed:
            if not await kube.allowed(verb, group, resource, namespace):
                missing.append(f"{verb} {resource}{'.' + group if group else ''} {where}")
    if missing:
        raise StartError(f"missing permissions: {', '.join(missing)}; bind the roles of the chart rljob to this account")
    return await kube.kuberay_present()


class Service:
    """Everything that runs in the process."""

    def __init__(self, kube: Kube, settings: Settings, access: Access, with_kuberay: bool = True) -> None:
        self._kube = kube
        self._settings = settings
        self._with_kuberay = with_kuberay
        self._direct = None if settings.ray_access == API_SERVER_PROXY else _direct(settings.ray_access)
        self.store = Store()
        self.queue = WorkQueue()
        self.health = health_module.Health(self.queue, settings.resync_seconds)
        self._stop = asyncio.Event()
        self._passes: Counter[str] = Counter()
        self.kuberay_appeared = False
        self._reconciler = Reconciler(
            kube=kube,
            ray=Ray(kube.carry if self._direct is None else self._direct, access),
            store=self.store,
            settings=settings,
            access=access,
            kuberay_present=with_kuberay,
            on_kuberay=self._kuberay_came,
        )

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, or until KubeRay appears (then `kuberay_appeared` is set)."""
        self.health.waiting = ""
        self.health.resynced()
        async with AsyncExitStack() as stack:
            if self._direct is not None:
                stack.push_async_callback(self._direct.close)
            # Before kopf: when it stops it ends every task that began after it.
            tasks = [asyncio.create_task(self._work(), name=f"worker {n}") for n in range(self._settings.workers)]
            tasks.append(asyncio.create_task(self._resync_forever(), name="resync"))
            stack.push_async_callback(_end, tasks)
            await watch(
                deliver=self.deliver,
                login=self._kube.connection,
                namespaces=self._settings.namespaces,
                with_kuberay=self._with_kuberay,
                stop=self._stop,
            )

    async def wait_for_cluster(self, patient: bool) -> None:
        """Wait for what may come: our API, and with `patient` for the API server. Raises what `check` raises beside that."""
        while True:
            try:
                self._with_kuberay = await check(self._kube, self._settings)
            except (NotYetError, ApiError, ApiUnreachableError) as error:
                if isinstance(error, ApiUnreachableError) and not patient:
                    raise
                if isinstance(error, ApiError) and not patient and error.status < 500 and error.status != 429:
                    raise
                if self.health.waiting != str(error):
                    log.warning("%s; waiting for it", error)
                self.health.waiting = str(error)
                await asyncio.sleep(_START_RETRY_SECONDS)
            else:
                self.health.waiting = ""
                self._reconciler.kuberay_present = self._with_kuberay
                if not self._with_kuberay:
                    self.health.note = f"KubeRay is not installed on {self._kube.server}; jobs wait until it is"
                    log.warning("%s", self.health.note)
                return

    def metrics(self) -> str:
        """The page of /metrics."""
        jobs = (job for key in self.store.jobs.keys_now() if (job := self.store.jobs.get(key)) is not None)
        process = Process(
            queued=len(self.queue),
            overdue_seconds=self.queue.overdue(),
            resync_age_seconds=self.health.resync_age,
            passes=self._passes,
            requests=self._kube.requests,
        )
        return render(jobs, process)

    async def serve_health(self) -> web.AppRunner:
        """Answer for this process; call `cleanup` on what comes back to stop. Raises StartError where the port is taken."""
        port = self._settings.health_port
        try:
            return await health_module.serve(self.health, port, self.metrics)
        except OSError as error:
            raise StartError(f"port {port} for /healthz: {error.strerror or error}; set RLJOB_HEALTH_PORT") from None

    def deliver(self, kind: str, obj: Object, deleted: bool) -> None:
        """Take an object of a watch and mark its job dirty."""
        key = self.store.take(kind, obj, deleted=deleted)
        if key is not None:
            self.queue.add(key)

    def _kuberay_came(self) -> None:
        log.info("KubeRay was installed; starting again to watch its RayClusters")
        self.kuberay_appeared = True
        self._stop.set()

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            job = self.store.jobs.get(key)
            about(key, job.status.attempt if job is not None else 0)
            try:
                again = await self._reconciler.reconcile(key)
            except (ApiError, ApiUnreachableError, RayError) as error:
                delay = self.queue.failed(key)
                self._passes["failed"] += 1
                log.warning("%s/%s: %s; again in %.1f s", *key, error, delay)
            except Exception as error:
                # A defect in one job's pass must not end the others'; it is logged whole and tried again ever more slowly.
                self._passes["defect"] += 1
                log.exception("%s/%s: unexpected error", *key)
                await self._tell_defect(key, error)
                delay = self.queue.failed(key)
                log.warning("%s/%s: again in %.1f s", *key, delay)
            else:
                self._passes["done"] += 1
                self.queue.done(key, again)

    async def _tell_defect(self, key: Key, error: Exception) -> None:
        """The log is the operator's; the job's owner sees the status only."""
        try:
            await self._reconciler.tell_defect(key, error)
        except (ApiError, ApiUnreachableError) as problem:
            log.warning("%s/%s: the error is not in the status: %s", *key, problem)
        except Exception:
            log.exception("%s/%s: the error is not in the status", *key)

    async def _resync_forever(self) -> None:
        delay = self._settings.resync_seconds
        while True:
            await asyncio.sleep(delay)
            try:
                await self.resync()
            except (ApiError, ApiUnreachableError) as error:
                log.warning("resync: %s", error)
                delay = _RESYNC_RETRY_SECONDS
            else:
                self.health.resynced()
                delay = self._settings.resync_seconds

    async def resync(self) -> None:
        """List everything, drop what is gone, look at every job once."""
        for namespace in self._settings.namespaces or (None,):
            for kind in ("rljobs", "rayclusters", "pods"):
                try:
                    listing = await self._kube.list_all(kind, namespace)
                except NotFoundError:
                    if kind == "rljobs":
                        raise
                    continue  # KubeRay is not installed
                for key in self.store.resync(kind, namespace, listing):
                    self.queue.add(key)
        for key in self.store.jobs.keys_now():
            self.queue.add(key)


def _direct(access: str) -> DirectTransport:
    return DirectTransport() if access == DIRECT else DirectTransport(access)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
