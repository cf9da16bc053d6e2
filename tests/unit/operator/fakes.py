"""An API server with KubeRay, and a Ray, as far as the operator can tell; small enough to be obviously right."""

from __future__ import annotations

import asyncio
import copy
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api import names
from rljob_api.preflight import PreflightReport
from rljob_api.progress import ProgressReport
from rljob_operator.api import (
    AlreadyExistsError,
    ApiError,
    ApiUnreachableError,
    ConflictError,
    Listing,
    NotFoundError,
    Object,
    RayError,
)
from rljob_operator.times import format_time
from rljob_operator.world import Claim, Driver, DriverAnswer, DriverUnknown, Job, SaveAnswer, Unreachable

from .builders import T0, UID, merge

Key = tuple[str, str]


class BrokenError(Exception):
    """An invariant of the system under test does not hold."""


class FakeCluster:
    """API server and KubeRay: objects with versions; pods come with a cluster and go when told."""

    def __init__(self, spec: Any) -> None:
        self.now = T0
        self.version = 10
        self.jobs: dict[str, Object] = {}
        self.clusters: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.secrets: dict[str, Object] = {}
        self.policies: dict[str, Object] = {}
        self.claims = {"copy-checkpoints"}
        self.claims_bound = True
        self.preflight = False
        self.kuberay = True
        self.events: list[Object] = []
        self.kube_events: list[Object] = []
        self.status_writes = 0
        self.requests = 0
        self.fail_next: list[Exception] = []
        self.refuse_create: ApiError | None = None
        self.held = False
        """Whether pods that are to go stay (a finalizer, a lost node)."""
        self._secrets_held = False
        self._secrets_due: set[str] = set()
        self.add_job(spec)

    # ---- The outside world ----

    def add_job(self, spec: Any, name: str = "copy", uid: str = UID) -> None:
        self.jobs[name] = self._new(
            {"metadata": {"name": name, "namespace": "default", "uid": uid, "generation": 1}, "spec": copy.deepcopy(spec)}
        )

    def edit(self, name: str, spec: Any) -> None:
        self.jobs[name]["spec"] = copy.deepcopy(spec)
        self.jobs[name]["metadata"]["generation"] += 1
        self._touch(self.jobs[name])

    def kuberay_makes_pods(self) -> None:
        for name, cluster in self.clusters.items():
            for role in ("head", "workers-worker"):
                pod_name = f"{name}-{role}"
                if pod_name not in self.pods and not cluster.get("made"):
                    # As KubeRay does: a pod's labels are its template's, whatever was done to the cluster's own.
                    groups = cluster["spec"]
                    group = groups["headGroupSpec"] if role == "head" else groups["workerGroupSpecs"][0]
                    labels = group["template"]["metadata"]["labels"] | {
                        names.LABEL_RAY_CLUSTER: name,
                        names.LABEL_RAY_NODE_TYPE: "head" if role == "head" else "worker",
                    }
                    metadata = {"name": pod_name, "namespace": "default", "uid": pod_name, "labels": labels}
                    self.pods[pod_name] = self._new({"metadata": metadata, "status": {"phase": "Pending"}})
            cluster["made"] = True
            cluster.setdefault("status", {})["state"] = ""
            self._touch(cluster)

    def pods_get_ready(self) -> None:
        for pod in self.pods.values():
            if pod["status"]["phase"] == "Pending" and not _is_preflight(pod):
                pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
                self._touch(pod)
        for name, cluster in self.clusters.items():
            ready = [pod for pod in self.pods.values() if pod["metadata"]["labels"].get(names.LABEL_RAY_CLUSTER) == name]
            if len(ready) == 2 and not (cluster.get("status") or {}).get("conditions"):
                condition = {"type": "RayClusterProvisioned", "status": "True", "lastTransitionTime": format_time(self.now)}
                cluster["status"] = {"conditions": [condition]}
                self._touch(cluster)

    def kill_pod(self, name: str, code: int = 137) -> None:
        pod = self.pods[name]
        pod["status"] = {
            "phase": "Failed",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": {"reason": "OOMKilled", "exitCode": code}}}],
        }
        self._touch(pod)

    def drain_pod(self, name: str) -> None:
        """Eviction by the API: the pod ends, and says who ended it."""
        pod = self.pods[name]
        disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
        pod["metadata"]["deletionTimestamp"] = format_time(self.now)
        pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}, disrupted]}
        self._touch(pod)

    def preflights_end(self, told: PreflightReport | None) -> None:
        """Preflight pods end, with a report or without."""
        for pod in self.pods.values():
            if _is_preflight(pod) and pod["status"]["phase"] == "Pending":
                message = "" if told is None else told.model_dump_json(by_alias=True)
                ended = {"reason": "Completed" if told else "Error", "exitCode": 0 if told else 1, "message": message}
                state = {"terminated": {**ended, "finishedAt": format_time(self.now)}}
                pod["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "preflight", "state": state}]}
                self._touch(pod)

    def pods_without_cluster_go(self) -> list[Object]:
        """What the garbage collector finds, and what was told to go: all of it, unless something holds it."""
        gone = [
            name
            for name, pod in self.pods.items()
            if (_is_preflight(pod) and "deletionTimestamp" in pod["metadata"])
            or (
                not _is_preflight(pod)
                and pod["metadata"]["labels"][names.LABEL_RAY_CLUSTER] not in self.clusters
                and (not pod.get("orphan") or "deletionTimestamp" in pod["metadata"])
            )
        ]
        return [] if self.held else [self.pods.pop(name) for name in gone]

    def late_pod(self, cluster: str) -> None:
        """KubeRay makes one more pod of a RayCluster that is gone."""
        labels = {names.LABEL_JOB: "copy", names.LABEL_UID: UID, names.LABEL_RAY_CLUSTER: cluster}
        metadata = {"name": f"{cluster}-late", "namespace": "default", "uid": f"late-{self.version}", "labels": labels}
        self.pods.setdefault(f"{cluster}-late", self._new({"metadata": metadata, "status": {"phase": "Pending"}}))

    def orphan_pods(self, cluster: str) -> None:
        """Somebody deletes the RayCluster with --cascade=orphan."""
        del self.clusters[cluster]
        for pod in self.pods.values():
            pod["orphan"] = True

    def hold_secrets(self, held: bool) -> None:
        """Whether Secrets that are deleted stay, by somebody's finalizer."""
        self._secrets_held = held
        if not held:
            self.secrets = {name: one for name, one in self.secrets.items() if name not in self._secrets_due}
            self._secrets_due = set()

    def preflights_are_deleted(self) -> None:
        """By somebody else."""
        for name in [name for name, pod in self.pods.items() if _is_preflight(pod)]:
            self._delete_pod(name)

    def _delete_pod(self, name: str) -> None:
        pod = self.pods[name]
        pod["metadata"]["deletionTimestamp"] = format_time(self.now)
        pod.pop("orphan", None)
        self._touch(pod)
        if not self.held:
            del self.pods[name]

    def tell(self, store: Any) -> None:
        """All watches catch up."""
        version = str(self.version)
        for kind, table in (("rljobs", self.jobs), ("rayclusters", self.clusters), ("pods", self.pods)):
            store.resync(kind, None, Listing([copy.deepcopy(one) for one in table.values()], version))

    def status(self, name: str = "copy") -> dict[str, Any]:
        return dict(self.jobs[name].get("status") or {})

    def condition(self, type_: str, name: str = "copy") -> dict[str, Any]:
        return next(one for one in self.status(name)["conditions"] if one["type"] == type_)

    def _new(self, obj: Object) -> Object:
        obj["metadata"]["creationTimestamp"] = format_time(self.now)
        self._touch(obj)
        return obj

    def _touch(self, obj: Object) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)

    async def _request(self) -> None:
        await asyncio.sleep(0)  # where passes of two processes may take turns
        self.requests += 1
        if self.fail_next:
            raise self.fail_next.pop(0)

    # ---- KubeApi ----

    async def get_job(self, namespace: str, name: str) -> Object | None:
        await self._request()
        return copy.deepcopy(self.jobs.get(name))

    async def patch_status(self, namespace: str, name: str, version: str, patch: Mapping[str, Any]) -> Object:
        await self._request()
        if name not in self.jobs:
            raise NotFoundError(404, "NotFound", name, "PATCH")
        job = self.jobs[name]
        if job["metadata"]["resourceVersion"] != version:
            raise ConflictError(409, "Conflict", "changed", "PATCH")
        job["status"] = merge(job.get("status") or {}, dict(patch))
        self.status_writes += 1
        self._touch(job)
        return copy.deepcopy(job)

    async def get_cluster(self, namespace: str, name: str) -> Object | None:
        await self._request()
        return copy.deepcopy(self.clusters.get(name))

    async def list_clusters(self, namespace: str, selector: str) -> Sequence[Object]:
        await self._request()
        label, _, value = selector.partition("=")
        found = [one for one in self.clusters.values() if one["metadata"]["labels"].get(label) == value]
        return copy.deepcopy(found)

    async def create_cluster(self, manifest: Mapping[str, Any]) -> Object:
        await self._request()
        if self.refuse_create is not None:
            raise self.refuse_create
        name = manifest["metadata"]["name"]
        if name in self.clusters:
            raise AlreadyExistsError(409, "AlreadyExists", name, "POST")
        if manifest["spec"]["authOptions"]["secretName"] not in self.secrets:
            raise BrokenError(f"{name} is created before the Secret that its pods need")
        mine = f"{name}-preflight"
        if self.preflight and self.pods.get(mine, {}).get("status", {}).get("phase") != "Succeeded":
            raise BrokenError(f"{name} is created before its preflight has ended")
        alive = [one for one in self.pods if one != mine]
        ours = [one for one, obj in self.clusters.items() if obj["metadata"].get("ownerReferences")]
        if alive or ours:
            raise BrokenError(f"{name} is created while {alive or ours} of another attempt exists")
        if self.status().get("attempt") != int(name.rsplit("-", 1)[1]):
            raise BrokenError(f"{name} is created though status.attempt is {self.status().get('attempt')}")
        obj = copy.deepcopy(dict(manifest))
        obj["metadata"]["uid"] = f"uid-{name}"
        self.clusters[name] = self._new(obj)
        return copy.deepcopy(obj)

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        await self._request()
        name = manifest["metadata"]["name"]
        if name in self.secrets:
            raise AlreadyExistsError(409, "AlreadyExists", name, "POST")
        self.secrets[name] = copy.deepcopy(dict(manifest))

    async def delete_secret(self, namespace: str, name: str) -> None:
        await self._request()
        if self._secrets_held:
            self._secrets_due |= {name} & self.secrets.keys()
        else:
            self.secrets.pop(name, None)

    async def create_network_policy(self, manifest: Mapping[str, Any]) -> None:
        await self._request()
        name = manifest["metadata"]["name"]
        if name in self.policies:
            raise AlreadyExistsError(409, "AlreadyExists", name, "POST")
        self.policies[name] = copy.deepcopy(dict(manifest))

    async def delete_cluster(self, namespace: str, name: str, uid: str) -> None:
        await self._request()
        if name in self.clusters and self.clusters[name]["metadata"]["uid"] == uid:
            del self.clusters[name]

    async def list_pods(self, namespace: str, selector: str) -> Sequence[Object]:
        await self._request()
        return [copy.deepcopy(pod) for pod in self.pods.values()]

    async def claim(self, namespace: str, name: str) -> Claim | None:
        await self._request()
        return Claim(("ReadWriteOnce",), self.claims_bound) if name in self.claims else None

    async def create_pod(self, manifest: Mapping[str, Any]) -> Object:
        await self._request()
        if self.refuse_create is not None:
            raise self.refuse_create
        name = manifest["metadata"]["name"]
        if name in self.pods:
            raise AlreadyExistsError(409, "AlreadyExists", name, "POST")
        if self.clusters or self.pods:
            raise BrokenError(f"{name} is created while {[*self.clusters, *self.pods]} exist")
        obj = copy.deepcopy(dict(manifest))
        obj["metadata"]["uid"] = f"uid-{name}-{self.version}"
        obj["status"] = {"phase": "Pending"}
        self.pods[name] = self._new(obj)
        return copy.deepcopy(obj)

    async def delete_pod(self, namespace: str, name: str, uid: str) -> bool:
        await self._request()
        there = name in self.pods and self.pods[name]["metadata"]["uid"] == uid
        if there:
            self._delete_pod(name)
        return there

    async def release_workers(self, namespace: str, name: str, uid: str) -> None:
        await self._request()
        if name in self.clusters and self.clusters[name]["metadata"]["uid"] == uid:
            self.clusters[name]["spec"]["workerGroupSpecs"][0]["replicas"] = 0
            self._touch(self.clusters[name])
            for pod in [one for one in self.pods if one.startswith(f"{name}-workers")]:
                del self.pods[pod]

    async def kuberay_present(self) -> bool:
        await self._request()
        return self.kuberay

    async def events_of(self, namespace: str, kind: str, uid: str) -> Sequence[Object]:
        await self._request()
        return [one for one in self.kube_events if one.get("involvedObject", {}).get("uid", uid) == uid]

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        await self._request()
        self.events.append(dict(event))

    async def list_all(self, kind: str, namespace: str | None) -> Listing:
        raise NotImplementedError


class FakeRay:
    """Ray's jobs API on each cluster's head; a submission dies with its cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.jobs: dict[tuple[str, str], Driver] = {}
        self.submitted: list[str] = []
        self.reports: dict[str, ProgressReport] = {}
        self.logged: dict[str, ProgressReport] = {}
        self.reachable = True
        self.dashboard = True
        """Whether Ray's own API answers; the driver's endpoint is another process."""
        self.swallow_answers = 0
        self.busy = 0
        self.saves: list[str] = []
        self.logs_read = 0
        self.save_answer = SaveAnswer(accepted=True, saved=True, step=1)

    async def driver(self, job: Job) -> DriverAnswer:
        cluster, submission = job.cluster_name, job.submission_id
        if not self.reachable or not self.dashboard or cluster not in self._cluster.clusters:
            return Unreachable("no route")
        return self.jobs.get((cluster, submission), DriverUnknown())

    async def submit(self, job: Job, body: Mapping[str, Any]) -> None:
        cluster = job.cluster_name
        if not self.reachable or cluster not in self._cluster.clusters:
            raise RayError("no route")
        if self.busy:
            self.busy -= 1
            raise RayError("Ray answered 500: No available agent to submit job")
        key = (cluster, body["submission_id"])
        if key not in self.jobs:
            if body["submission_id"] in self.submitted:
                raise BrokenError(f"{body['submission_id']} is submitted to a second Ray")
            self.submitted.append(body["submission_id"])
            self.jobs[key] = Driver("RUNNING")
        if self.swallow_answers:
            self.swallow_answers -= 1
            raise RayError("timeout, though the request was taken")

    async def report(self, job: Job) -> ProgressReport | Unreachable:
        found = self.reports.get(job.cluster_name)
        return found if found is not None and self.reachable else Unreachable("no route")

    async def save(self, job: Job, wait_seconds: float) -> SaveAnswer | Unreachable:
        self.saves.append(job.cluster_name)
        return self.save_answer if self.reachable else Unreachable("no route")

    async def last_report_in_logs(self, job: Job) -> ProgressReport | Unreachable:
        self.logs_read += 1
        return self.logged.get(job.cluster_name) or Unreachable("no report in the driver's log")

    def end(self, cluster: str, status: str, code: int | None, message: str = "") -> None:
        self.jobs[cluster, cluster] = Driver(status, code, message)


def _is_preflight(pod: Object) -> bool:
    return bool(pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_PREFLIGHT)


def gone(error: str = "connection refused") -> ApiUnreachableError:
    return ApiUnreachableError(error)


def later(cluster: FakeCluster, seconds: float) -> None:
    cluster.now += datetime.timedelta(seconds=seconds)
