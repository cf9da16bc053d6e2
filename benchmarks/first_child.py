"""How long an applied job waits for its RayCluster, beside KubeRay's RayJob on the same API server.

Pods carry a node selector that no node has: no kubelet takes part. The operator runs without a preflight image, since its pod
would need a kubelet. Both kinds' RayClusters are seen by one watch of this process.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import yaml
from dev.kube import ROOT

from rljob_api import names
from rljob_operator.api import ApiUnreachableError
from rljob_operator.kube import Kube, connect

RAY = "/apis/ray.io/v1"
JOBS = f"/apis/{names.GROUP}/{names.VERSION}"
NOWHERE = {"nodeSelector": {"rljob.dev/bench": "nowhere"}}
AT_ONCE = 16
PATIENCE = 900.0


@dataclass(frozen=True)
class Waits:
    """Seconds from the request that stores a job to its RayCluster, one a job, sorted."""

    seconds: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """The value below which that share of the jobs lies (nearest rank)."""
        return self.seconds[min(int(share * len(self.seconds)), len(self.seconds) - 1)]


def rljob(name: str) -> dict[str, Any]:
    """The example, with pods that no node takes."""
    job: dict[str, Any] = copy.deepcopy(yaml.safe_load((ROOT / "examples/copy.yaml").read_text()))
    job["metadata"]["name"] = name
    job["spec"]["trainer"]["template"] = {"spec": NOWHERE}
    return job


def rayjob(name: str) -> dict[str, Any]:
    """A RayJob with a head and a worker of the same sizes; KubeRay's HTTP mode, which needs no submitter pod."""
    spec = yaml.safe_load((ROOT / "examples/copy.yaml").read_text())["spec"]["trainer"]

    def group(resources: dict[str, Any]) -> dict[str, Any]:
        amounts = {"requests": resources, "limits": {"memory": resources["memory"]}}
        container = {"name": "trainer", "image": spec["image"], "resources": amounts}
        return {"rayStartParams": {}, "template": {"spec": {**NOWHERE, "containers": [container]}}}

    worker = {"groupName": names.WORKER_GROUP, "replicas": 1, "minReplicas": 1, "maxReplicas": 1, **group(spec["resources"])}
    cluster = {
        "rayVersion": names.RAY_VERSION,
        "headGroupSpec": group(spec["head"]["resources"]),
        "workerGroupSpecs": [worker],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {"submissionMode": "HTTPMode", "entrypoint": "true", "rayClusterSpec": cluster},
    }


async def wait_for_children(namespace: str, kind: str, count: int) -> Waits:
    """Create so many jobs, `AT_ONCE` at a time, and wait until each has its RayCluster; then delete them."""
    kube = await connect()
    plural, root, make = ("rljobs", JOBS, rljob) if kind == "RLJob" else ("rayjobs", RAY, rayjob)
    path = f"{root}/namespaces/{namespace}/{plural}"
    asked: dict[str, float] = {}
    seen: dict[str, float] = {}
    complete = asyncio.Event()
    watching = asyncio.create_task(_watch(kube, namespace, seen, count, complete))
    gate = asyncio.Semaphore(AT_ONCE)

    async def create(number: int) -> None:
        async with gate:
            name = f"{kind.lower()}-{count}-{number}"
            asked[name] = time.monotonic()
            await kube.request("POST", path, make(name))

    try:
        await asyncio.gather(*(create(number) for number in range(count)))
        async with asyncio.timeout(PATIENCE):
            await complete.wait()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await _gone(kube, namespace, path)
        await kube.close()
    return Waits(tuple(sorted(seen[name] - began for name, began in asked.items())))


async def delete_jobs(namespace: str) -> None:
    """Delete the RLJobs of the namespace, as a whole, and wait until they are gone with what they had."""
    kube = await connect()
    try:
        await _gone(kube, namespace, f"{JOBS}/namespaces/{namespace}/{names.PLURAL}")
    finally:
        await kube.close()


async def _watch(kube: Kube, namespace: str, seen: dict[str, float], count: int, complete: asyncio.Event) -> None:
    """Note when the first RayCluster of each owner is there, until all have one."""
    connection = await kube.connection()
    context = ssl.create_default_context(cafile=connection.ca_path)
    if connection.certificate_path:
        context.load_cert_chain(connection.certificate_path, connection.key_path)
    headers = {"Authorization": f"Bearer {connection.token}"} if connection.token else {}
    url = f"{connection.server}{RAY}/namespaces/{namespace}/rayclusters?watch=true"
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), headers=headers, timeout=timeout) as session,
        session.get(url) as answer,
    ):
        async for line in answer.content:
            event = json.loads(line)
            if event["type"] != "ADDED":
                continue
            (owner, *_) = event["object"]["metadata"].get("ownerReferences") or [{"name": ""}]
            seen.setdefault(owner["name"], time.monotonic())
            if len(seen) >= count:
                complete.set()


async def _gone(kube: Kube, namespace: str, jobs: str) -> None:
    """Delete the jobs, and wait until nothing of the round is left, so that it does not burden the next one."""
    deadline = time.monotonic() + PATIENCE
    for path in (jobs, f"{RAY}/namespaces/{namespace}/rayclusters", f"/api/v1/namespaces/{namespace}/pods"):
        while True:
            try:
                if path == jobs:
                    await kube.request("DELETE", path, {"propagationPolicy": "Background"})
                if not (await kube.request("GET", path, query={"limit": 1}))["items"]:
                    break
            except ApiUnreachableError:  # a thousand of them take it longer than one request may
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is not empty after {PATIENCE:g} s")
            await asyncio.sleep(1.0)
