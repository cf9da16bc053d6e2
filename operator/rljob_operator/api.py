"""What the operator needs of Kubernetes and of Ray, as protocols: `kube.py` and `ray.py` hold the real ones, tests fakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rljob_api.progress import ProgressReport

from .world import Claim, DriverAnswer, Job, SaveAnswer, Unreachable

Object = dict[str, Any]


class ApiError(Exception):
    """The API server's refusal, with what was asked."""

    def __init__(self, status: int, reason: str, message: str, request: str) -> None:
        super().__init__(f"{request}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.request = request


class NotFoundError(ApiError):
    """404: the object or the whole API does not exist."""


class ConflictError(ApiError):
    """409 on a write: the object changed since it was read."""


class AlreadyExistsError(ApiError):
    """409 on a create."""


class ApiUnreachableError(Exception):
    """No answer from the API server; the message says where and why."""


class RayError(Exception):
    """Ray did not take a submission; trying again may help."""


@dataclass(frozen=True)
class Listing:
    """All objects of a kind, and the version of the whole list."""

    items: Sequence[Object]
    resource_version: str


@dataclass(frozen=True)
class HttpAnswer:
    """Status and body of a request to a Service."""

    status: int
    body: str


class KubeApi(Protocol):
    """Requests to the API server. Every method may raise ApiError or ApiUnreachableError."""

    async def get_job(self, namespace: str, name: str) -> Object | None:
        """An RLJob, from the server, never from a cache."""

    async def patch_status(self, namespace: str, name: str, version: str, patch: Mapping[str, Any]) -> Object:
        """Merge the patch into the status of exactly this version of the job. Raises ConflictError, NotFoundError."""

    async def get_cluster(self, namespace: str, name: str) -> Object | None:
        """A RayCluster, from the server."""

    async def list_clusters(self, namespace: str, selector: str) -> Sequence[Object]:
        """RayClusters by label, from the server; none where it does not know RayClusters."""

    async def create_cluster(self, manifest: Mapping[str, Any]) -> Object:
        """Create a RayCluster. Raises AlreadyExistsError."""

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        """Create a Secret. Raises AlreadyExistsError. (Secrets are never read.)"""

    async def delete_secret(self, namespace: str, name: str) -> None:
        """Delete a Secret; one that is gone already is success."""

    async def create_network_policy(self, manifest: Mapping[str, Any]) -> None:
        """Create a NetworkPolicy. Raises AlreadyExistsError."""

    async def delete_cluster(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this RayCluster; one that is gone already is success."""

    async def list_pods(self, namespace: str, selector: str) -> Sequence[Object]:
        """Pods by label, from the server."""

    async def create_pod(self, manifest: Mapping[str, Any]) -> Object:
        """Create a pod. Raises AlreadyExistsError."""

    async def delete_pod(self, namespace: str, name: str, uid: str) -> bool:
        """Delete exactly this pod; one that is gone already is success. Returns whether it was there."""

    async def release_workers(self, namespace: str, name: str, uid: str) -> None:
        """Set exactly this RayCluster's worker group to no replicas; one that is gone already is success."""

    async def claim(self, namespace: str, name: str) -> Claim | None:
        """A PersistentVolumeClaim; None where it does not exist."""

    async def kuberay_present(self) -> bool:
        """Whether the API server knows RayClusters."""

    async def events_of(self, namespace: str, kind: str, uid: str) -> Sequence[Object]:
        """Events about one object; not about earlier ones of its name."""

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """Create an event."""

    async def list_all(self, kind: str, namespace: str | None) -> Listing:
        """All of a kind (`rljobs`, `rayclusters`, `pods`; the last two ours only), in chunks."""


class RayApi(Protocol):
    """Requests to the Ray and the driver of a job's current attempt. Unreachable is an answer, not an error."""

    async def driver(self, job: Job) -> DriverAnswer:
        """What Ray says of the attempt's submission."""

    async def submit(self, job: Job, body: Mapping[str, Any]) -> None:
        """Submit; an existing submission of that id is success. Raises RayError."""

    async def report(self, job: Job) -> ProgressReport | Unreachable:
        """The driver's report."""

    async def save(self, job: Job, wait_seconds: float) -> SaveAnswer | Unreachable:
        """Ask the driver for a save and wait that long for it."""

    async def last_report_in_logs(self, job: Job) -> ProgressReport | Unreachable:
        """The report that the driver logged as its last line."""


class Transport(Protocol):
    """Carries a request to a Service of the cluster. Raises ApiUnreachableError."""

    async def __call__(
        self,
        method: str,
        namespace: str,
        service: str,
        port: int,
        path: str,
        body: Mapping[str, Any] | None = None,
        token: str = "",
    ) -> HttpAnswer: ...
