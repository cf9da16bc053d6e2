"""The API server, through `kubernetes.aio`: the only importer of kubernetes. Objects are plain dicts both ways.

The generated typed methods are not used: they validate each answer against models of built-in kinds, which costs memory and
refuses fields that are newer than the models.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import yaml
from kubernetes.aio import client, config

from rljob_api import names

from .api import (
    AlreadyExistsError,
    ApiError,
    ApiUnreachableError,
    ConflictError,
    HttpAnswer,
    Listing,
    NotFoundError,
    Object,
)
from .bodies import read_end
from .reading import read_claim
from .world import Claim

_JOBS = f"/apis/{names.GROUP}/{names.VERSION}"
_RAY = "/apis/ray.io/v1"
_NETWORKING = "/apis/networking.k8s.io/v1"
_TIMEOUT_SECONDS = 30
_CHUNK = 500
_PASSING = (429, 500, 502, 503)
"""What an overloaded or restarting API server answers."""
_RETRY_SECONDS = (0.2, 0.5, 1.0)
_SELECTORS = {"rljobs": "", "rayclusters": names.LABEL_JOB, "pods": names.LABEL_JOB}
_ROOTS = {"rljobs": _JOBS, "rayclusters": _RAY, "pods": "/api/v1"}


@dataclass(frozen=True)
class Connection:
    """How the API server is reached, for other HTTP clients (kopf's)."""

    server: str
    ca_path: str | None
    insecure: bool
    token: str | None
    certificate_path: str | None
    key_path: str | None


class ConfigurationError(Exception):
    """There is no usable way to the API server; the message says what was tried and what would do."""


def in_pod() -> bool:
    """Whether this process is one of a pod, with the pod's account."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ


async def connect() -> Kube:
    """The client of KUBECONFIG (or ~/.kube/config), else of the pod's service account. Raises ConfigurationError."""
    settings = client.Configuration()
    path = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        if in_pod():
            config.load_incluster_config(client_configuration=settings)
        else:
            _require_file(path)
            await config.load_kube_config(config_file=path, client_configuration=settings, persist_config=False)
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # The library meets a file of an unexpected shape with whatever error its code runs into.
        where = "the pod's service account" if in_pod() else path
        raise ConfigurationError(f"cannot use {where}: {' '.join(str(error).split())}") from None
    return Kube(settings)


def _require_file(path: str) -> None:
    # Checked by hand: the library reports a missing file as an empty one.
    if not any(Path(one).expanduser().is_file() for one in path.split(os.pathsep) if one):
        raise ConfigurationError(f"no kubeconfig at {path}; set KUBECONFIG to one, or run in a pod")


class Kube:
    """The real KubeApi; `carry` is the Transport through the API server's service proxy."""

    def __init__(self, settings: client.Configuration) -> None:
        self._settings = settings
        self._client = client.ApiClient(settings)
        self.requests: Counter[tuple[str, str]] = Counter()
        """Requests sent by this client, by method and status code (`none` where no answer came)."""

    async def close(self) -> None:
        """Close connections."""
        await self._client.close()

    @property
    def server(self) -> str:
        """The API server's address."""
        return str(self._settings.host)

    async def connection(self) -> Connection:
        """Address and credentials, fresh."""
        header = await self._settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        return Connection(
            server=self.server,
            ca_path=self._settings.ssl_ca_cert,
            insecure=not self._settings.verify_ssl,
            token=header.split(" ", 1)[-1] if header else None,
            certificate_path=self._settings.cert_file,
            key_path=self._settings.key_file,
        )

    # ---- Requests ----

    async def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        query: Mapping[str, Any] | None = None,
        *,
        foreign: bool = False,
        token: str = "",
    ) -> HttpAnswer:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if token:  # the API server's proxy takes the header Authorization for itself
            headers[names.HEADER_PROXIED_TOKEN] = f"Bearer {token}"
        if header := await self._settings.get_api_key_with_prefix("BearerToken", alias="authorization"):
            headers["authorization"] = header
        url = self.server + path + (f"?{urlencode(query)}" if query else "")
        try:
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
            )
            text = await read_end(answer.response.content) if foreign else (await answer.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            words = str(error) or type(error).__name__
            self.requests[method, "none"] += 1
            raise ApiUnreachableError(f"the API server at {self.server} does not answer ({method} {path}): {words}") from error
        self.requests[method, str(answer.status)] += 1
        return HttpAnswer(answer.status, text)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        query: Mapping[str, Any] | None = None,
    ) -> Object:
        """One request; its answer as an object. Raises ApiError, and ApiUnreachableError where no API server can have answered.

        What the server turned away or failed at is asked again a few times. Writes too: each is bound to a version, has a name
        of its own, or deletes, so one that was carried out after all is told apart (409, AlreadyExists) or does nothing.
        """
        for wait in _RETRY_SECONDS:
            answer = await self._send(method, path, body, content_type, query)
            if answer.status not in _PASSING:
                break
            await asyncio.sleep(wait)
        else:
            answer = await self._send(method, path, body, content_type, query)
        try:
            value = json.loads(answer.body)
        except ValueError:
            value = None
        told: Object = value if isinstance(value, dict) else {}
        if answer.status < 400 and "kind" in told:
            return told
        if answer.status < 400:  # of something in between; taken for a list it would say that nothing is there
            words = f"{method} {path}: {answer.status}, but no object: {answer.body[:200]!r}"
            raise ApiUnreachableError(f"what answers at {self.server} is no API server ({words})")
        reason, message = str(told.get("reason", "")), str(told.get("message", answer.body[:500]))
        kind = ApiError
        if answer.status == 404:
            kind = NotFoundError
        elif answer.status == 409:
            kind = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
        raise kind(answer.status, reason, message, f"{method} {path}")

    async def _get(self, path: str) -> Object | None:
        try:
            return await self.request("GET", path)
        except NotFoundError:
            return None

    # ---- KubeApi ----

    async def get_job(self, namespace: str, name: str) -> Object | None:
        """An RLJob, from the server."""
        return await self._get(f"{_JOBS}/namespaces/{namespace}/{names.PLURAL}/{name}")

    async def patch_status(self, namespace: str, name: str, version: str, patch: Mapping[str, Any]) -> Object:
        """Merge into the status of exactly this version."""
        return await self.request(
            "PATCH",
            f"{_JOBS}/namespaces/{namespace}/{names.PLURAL}/{name}/status",
            {"metadata": {"resourceVersion": version}, "status": dict(patch)},
            "application/merge-patch+json",
            {"fieldManager": names.MANAGED_BY},
        )

    async def get_cluster(self, namespace: str, name: str) -> Object | None:
        """A RayCluster, from the server."""
        return await self._get(f"{_RAY}/namespaces/{namespace}/rayclusters/{name}")

    async def list_clusters(self, namespace: str, selector: str) -> Sequence[Object]:
        """RayClusters by label, from the server; none without KubeRay."""
        try:
            answer = await self.request("GET", f"{_RAY}/namespaces/{namespace}/rayclusters", query={"labelSelector": selector})
        except NotFoundError:
            return []
        return list(answer.get("items") or [])

    async def create_cluster(self, manifest: Mapping[str, Any]) -> Object:
        """Create; unknown fields are an error instead of being dropped."""
        return await self._create(f"{_RAY}/namespaces/{manifest['metadata']['namespace']}/rayclusters", manifest)

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        """Create a Secret."""
        await self._create(f"/api/v1/namespaces/{manifest['metadata']['namespace']}/secrets", manifest)

    async def delete_secret(self, namespace: str, name: str) -> None:
        """Delete a Secret, or find it gone."""
        with contextlib.suppress(NotFoundError):
            await self.request("DELETE", f"/api/v1/namespaces/{namespace}/secrets/{name}")

    async def create_network_policy(self, manifest: Mapping[str, Any]) -> None:
        """Create a NetworkPolicy."""
        await self._create(f"{_NETWORKING}/namespaces/{manifest['metadata']['namespace']}/networkpolicies", manifest)

    async def _create(self, path: str, manifest: Mapping[str, Any]) -> Object:
        query = {"fieldManager": names.MANAGED_BY, "fieldValidation": "Strict"}
        return await self.request("POST", path, dict(manifest), query=query)

    async def delete_cluster(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this one."""
        options = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            await self.request("DELETE", f"{_RAY}/namespaces/{namespace}/rayclusters/{name}", options)
        except (NotFoundError, ConflictError):
            return  # gone, or replaced by another of that name, which is not ours to delete

    async def list_pods(self, namespace: str, selector: str) -> Sequence[Object]:
        """Pods by label, from the server."""
        answer = await self.request("GET", f"/api/v1/namespaces/{namespace}/pods", query={"labelSelector": selector})
        return list(answer.get("items") or [])

    async def create_pod(self, manifest: Mapping[str, Any]) -> Object:
        """Create; unknown fields are an error instead of being dropped."""
        return await self._create(f"/api/v1/namespaces/{manifest['metadata']['namespace']}/pods", manifest)

    async def delete_pod(self, namespace: str, name: str, uid: str) -> bool:
        """Delete exactly this one; whether it was there."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        try:
            await self.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", options)
        except (NotFoundError, ConflictError):
            return False  # gone, or replaced by another of that name
        return True

    async def release_workers(self, namespace: str, name: str, uid: str) -> None:
        """Exactly this one's worker group, to no replicas."""
        group = "/spec/workerGroupSpecs/0"
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "replace", "path": f"{group}/minReplicas", "value": 0},
            {"op": "replace", "path": f"{group}/replicas", "value": 0},
        ]
        path = f"{_RAY}/namespaces/{namespace}/rayclusters/{name}"
        try:
            await self.request("PATCH", path, patch, "application/json-patch+json", {"fieldManager": names.MANAGED_BY})
        except NotFoundError:
            return

    async def claim(self, namespace: str, name: str) -> Claim | None:
        """A PersistentVolumeClaim; modes of its volume where it is bound, else those that it asks for."""
        obj = await self._get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
        return None if obj is None else read_claim(obj)

    async def kuberay_present(self) -> bool:
        """Whether RayClusters are served."""
        resources = await self._get(_RAY)
        return resources is not None and any(one["name"] == "rayclusters" for one in resources.get("resources") or [])

    async def crd_present(self) -> bool:
        """Whether RLJobs are served."""
        return await self._get(_JOBS) is not None

    async def events_of(self, namespace: str, kind: str, uid: str) -> Sequence[Object]:
        """Events about one object; not about earlier ones of its name."""
        selector = f"involvedObject.uid={uid},involvedObject.kind={kind}"
        answer = await self.request("GET", f"/api/v1/namespaces/{namespace}/events", query={"fieldSelector": selector})
        return list(answer.get("items") or [])

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """Create an event."""
        await self.request("POST", f"/api/v1/namespaces/{namespace}/events", dict(event))

    async def list_all(self, kind: str, namespace: str | None) -> Listing:
        """All of a kind, in chunks."""
        where = f"/namespaces/{namespace}" if namespace else ""
        query: dict[str, Any] = {"limit": _CHUNK}
        if selector := _SELECTORS[kind]:
            query["labelSelector"] = selector
        items: list[Object] = []
        while True:
            answer = await self.request("GET", f"{_ROOTS[kind]}{where}/{kind}", query=query)
            items += answer.get("items") or []
            metadata = answer.get("metadata") or {}
            if not metadata.get("continue"):
                return Listing(items, metadata.get("resourceVersion", "0"))
            query["continue"] = metadata["continue"]

    async def allowed(self, verb: str, group: str, resource: str, namespace: str | None) -> bool:
        """Whether our account may do this (a SelfSubjectAccessReview, which everybody may ask)."""
        plural, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
        if namespace:
            attributes["namespace"] = namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool((answer.get("status") or {}).get("allowed"))

    async def carry(
        self,
        method: str,
        namespace: str,
        service: str,
        port: int,
        path: str,
        body: Mapping[str, Any] | None = None,
        token: str = "",
    ) -> HttpAnswer:
        """The Transport through the API server, for an operator that runs outside the cluster."""
        proxied = f"/api/v1/namespaces/{namespace}/services/http:{service}:{port}/proxy/{quote(path.lstrip('/'), safe='/?=&')}"
        return await self._send(method, proxied, None if body is None else dict(body), foreign=True, token=token)
