"""Carrying out a plan: the status first, then the actions; each event once what it tells of is a fact."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rljob_api import names

from .access import Access
from .api import AlreadyExistsError, ApiError, ConflictError, KubeApi, NotFoundError, RayApi, RayError
from .logs import about
from .plan import (
    Action,
    AskSave,
    CreateCluster,
    CreatePreflight,
    DeleteCluster,
    DeletePod,
    DropSecret,
    EventNote,
    PersistAttempt,
    Plan,
    ReleaseWorkers,
    SubmitDriver,
)
from .store import Store
from .times import format_time
from .world import Job, Refusal, SaveAnswer, Unreachable, World

log = logging.getLogger("rljob.act")

_NEVER_ACCEPTED = frozenset({400, 422})
_STARTS_SOMETHING = (PersistAttempt, CreatePreflight, CreateCluster, SubmitDriver)


@dataclass
class Outcome:
    """How the actions of an attempt went, for the next pass to see."""

    refusal: Refusal | None = None
    stranger: str = ""
    submit_error: str = ""
    save: SaveAnswer | Unreachable | None = None


class Actor:
    """Executes plans."""

    def __init__(self, kube: KubeApi, ray: RayApi, store: Store, access: Access) -> None:
        self._kube = kube
        self._ray = ray
        self._store = store
        self._access = access

    async def act(self, world: World, plan: Plan, outcome: Outcome, *, newest: bool = False) -> float | None:
        """Carry the plan out. Returns the seconds to the next pass when the plan's own answer no longer holds.

        `newest` says that the job is what this pass has itself just written.
        """
        job = world.job
        spends = any(isinstance(action, _STARTS_SOMETHING) for action in plan.actions)
        # A status write is bound to the version that was decided upon: the server itself says then whether that is the newest.
        if spends and plan.status_patch is None and not newest and not await self._is_current(job):
            return 0.0
        if plan.status_patch is not None and not await self._write_status(job, plan):
            return 0.0
        # Warnings tell what the status now holds; the other events tell of the actions, once they are done.
        for note in plan.events:
            if note.type == "Warning":
                await self._send_event(world, note)
        for action in plan.actions:
            await self._carry_out(world, action, outcome)
        for note in plan.events:
            if note.type == "Normal":
                await self._send_event(world, note)
        return None

    async def _is_current(self, job: Job) -> bool:
        """Whether the job is still what was decided upon. What starts something is never decided on a cached view."""
        obj = await self._kube.get_job(job.namespace, job.name)
        if obj is None:
            self._store.jobs.drop(job.key)
            return False
        if int(obj["metadata"]["resourceVersion"]) < int(job.resource_version):
            self._store.jobs.drop(job.key)  # the API server's own past was restored from a backup
        self._store.take("rljobs", obj)
        return bool(obj["metadata"]["resourceVersion"] == job.resource_version)

    async def _write_status(self, job: Job, plan: Plan) -> bool:
        """Write against the version that was decided upon; False when somebody changed the job meanwhile."""
        try:
            obj = await self._kube.patch_status(job.namespace, job.name, job.resource_version, plan.status_patch or {})
        except NotFoundError:
            self._store.jobs.drop(job.key)
            return False
        except ConflictError:
            await self._is_current(job)
            return False
        self._store.take("rljobs", obj)
        return True

    async def _carry_out(self, world: World, action: Action, outcome: Outcome) -> None:
        job = world.job
        match action:
            case PersistAttempt(number):
                self._store.forget_departed(job.key)  # the status write was the action
                if number > 1:  # its cluster may have been deleted by somebody else
                    await self._drop_secret(job, names.cluster_name(job.name, number - 1))
                about(job.key, number)
                log.info("%s/%s: attempt %d is counted", *job.key, number)
            case CreateCluster(manifest):
                await self._create(job, manifest["metadata"]["name"], action, outcome)
            case CreatePreflight(manifest):
                await self._create_preflight(job, manifest["metadata"]["name"], action, outcome)
            case DeletePod(name, uid):
                if await self._kube.delete_pod(job.namespace, name, uid):
                    log.info("%s/%s: pod %s is deleted", *job.key, name)
            case AskSave(_, seconds):
                outcome.save = _merged(outcome.save, await self._ray.save(job, seconds))
                log.info("%s/%s: asked for a save: %s", *job.key, outcome.save)
            case ReleaseWorkers(name, uid):
                await self._kube.release_workers(job.namespace, name, uid)
                log.info("%s/%s: RayCluster %s keeps its head only", *job.key, name)
            case DropSecret(cluster):
                await self._drop_secret(job, cluster)
            case DeleteCluster(name, uid):
                # The token first: what a killed operator leaves behind is then a cluster, which the next pass sees.
                await self._drop_secret(job, name)
                await self._kube.delete_cluster(job.namespace, name, uid)
                log.info("%s/%s: RayCluster %s is deleted", *job.key, name)
            case SubmitDriver():
                await self._submit(job, action, outcome)

    async def _create(self, job: Job, name: str, action: CreateCluster, outcome: Outcome) -> None:
        try:
            await self._guard(job)
            obj = await self._kube.create_cluster(action.manifest)
        except AlreadyExistsError:
            return  # the next pass reads it back and compares the owner
        except ApiError as error:
            outcome.refusal = _refusal(error)
            log.warning("%s/%s: RayCluster %s is refused: %s", *job.key, name, error.message)
            return
        outcome.refusal = None
        self._store.take("rayclusters", obj)
        log.info("%s/%s: RayCluster %s is created", *job.key, name)

    async def _guard(self, job: Job) -> None:
        """What the attempt's pods need to be safe, before they exist."""
        with contextlib.suppress(AlreadyExistsError):
            await self._kube.create_network_policy(self._access.network_policy(job))
        secret = self._access.secret(job)
        try:
            await self._kube.create_secret(secret)
        except AlreadyExistsError:
            # Of a pass that was cut off, perhaps of an operator with another key. It can't be read, so it is made anew.
            await self._drop_secret(job, job.cluster_name)
            await self._create_secret_again(secret)

    async def _create_secret_again(self, secret: Mapping[str, Any]) -> None:
        name = secret["metadata"]["name"]
        try:
            await self._kube.create_secret(secret)
        except AlreadyExistsError as error:  # to be told from the cluster's own
            detail = f"Secret {name} was deleted to be made anew, and something holds it (a finalizer?)"
            raise ApiError(error.status, "Conflict", detail, error.request) from error

    async def _drop_secret(self, job: Job, cluster: str) -> None:
        await self._kube.delete_secret(job.namespace, names.access_secret(cluster, job.uid))

    async def _create_preflight(self, job: Job, name: str, action: CreatePreflight, outcome: Outcome) -> None:
        try:
            obj = await self._kube.create_pod(action.manifest)
        except AlreadyExistsError:
            # Ours is read back by its label in the next pass, which forgets this; anybody else's is in the way.
            outcome.refusal = Refusal("a pod of that name exists already", final=False, what=f"pod {name}")
            return
        except ApiError as error:
            outcome.refusal = replace(_refusal(error), what=f"pod {name}")
            log.warning("%s/%s: pod %s is refused: %s", *job.key, name, error.message)
            return
        outcome.refusal = None
        self._store.take("pods", obj)
        log.info("%s/%s: pod %s is created", *job.key, name)

    async def _submit(self, job: Job, action: SubmitDriver, outcome: Outcome) -> None:
        body = {
            "submission_id": action.submission_id,
            "entrypoint": action.entrypoint,
            "runtime_env": {"env_vars": dict(action.environment)},
            "metadata": dict(action.metadata),
        }
        try:
            await self._ray.submit(job, body)
        except RayError as error:
            outcome.submit_error = f"the driver was not taken: {error}"
            raise
        outcome.submit_error = ""
        log.info("%s/%s: driver %s is submitted", *job.key, action.submission_id)

    async def _send_event(self, world: World, note: EventNote) -> None:
        job, moment = world.job, format_time(world.now)
        log.log(
            logging.WARNING if note.type == "Warning" else logging.INFO, "%s/%s: %s: %s", *job.key, note.reason, note.message
        )
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name}.{time.time_ns():x}", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "type": note.type,
            "reason": note.reason,
            "message": note.message,
            "source": {"component": names.MANAGED_BY},
            "reportingComponent": names.MANAGED_BY,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        try:
            await self._kube.create_event(job.namespace, event)
        except ApiError as error:
            # Events are a courtesy; the status holds the same words.
            log.warning("%s/%s: event %s not recorded: %s", *job.key, note.reason, error)


def _refusal(error: ApiError) -> Refusal:
    """The server's answer to a create, where it is one; raises it where asking again is all that can be done."""
    if error.status >= 500 or error.status == 429:
        raise error
    return Refusal(f"{error.status} {error.reason}: {error.message}", error.status in _NEVER_ACCEPTED)


def _merged(before: SaveAnswer | Unreachable | None, now: SaveAnswer | Unreachable) -> SaveAnswer | Unreachable:
    """The newest answer, with the step at which a save was first accepted: a checkpoint of that step is what was asked for."""
    if isinstance(before, SaveAnswer) and isinstance(now, SaveAnswer) and before.accepted:
        return replace(now, step=before.step)
    return before if isinstance(before, SaveAnswer) and before.accepted and isinstance(now, Unreachable) else now
