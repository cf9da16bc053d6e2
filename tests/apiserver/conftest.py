"""The operator against a real API server and a real KubeRay; only Ray is fake, and the pods are never scheduled.

Pods get a node selector that no node has; the tests write their status, as a kubelet would.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from dev.kube import ROOT, CommandError, Kubectl, cluster_environment

from rljob_api import names
from rljob_api.crd import custom_resource_definition
from rljob_operator.api import AlreadyExistsError, ConflictError
from rljob_operator.kube import Kube, connect

from .fake_ray import FakeRay
from .spawn import Spawned

Operator = subprocess.Popen[str] | Spawned

NOWHERE = {"spec": {"nodeSelector": {"rljob.dev/test": "nowhere"}}}
#: Writes of a job's spec that may meet another writer's before a test gives up.
MOST_TRIES = 20
KEY = b"a key of the tests, long enough to be one"
_RLJOBS = f"/apis/{names.GROUP}/{names.VERSION}"


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """Environment of the cluster; the whole session runs in it, since clients read KUBECONFIG themselves."""
    try:
        found = cluster_environment()
        kubectl = Kubectl(found, "rljob-system")
        kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=yaml.safe_dump(custom_resource_definition()))
        crd = f"crd/{names.RESOURCE}"
        kubectl("wait", "--for=condition=Established", crd, "--timeout=30s")
        deployment = kubectl.find("deployment", "rljob")
    except CommandError as error:
        pytest.fail(f"no cluster: {error}; `make test` starts one")
    if deployment is not None and deployment["spec"]["replicas"]:
        pytest.fail("the installed operator would answer too: kubectl -n rljob-system scale deployment rljob --replicas=0")
    saved = dict(os.environ)
    os.environ.update(found)
    yield found
    os.environ.clear()
    os.environ.update(saved)


@dataclass
class Space:
    """A namespace of a test, with what it needs to look and to act in it."""

    kube: Kube
    name: str
    environment: dict[str, str]
    ray: FakeRay
    ray_access: str
    operators: list[Operator] = field(default_factory=list)

    def path(self, kind: str, name: str = "") -> str:
        """The URL path of objects of a kind."""
        root = {"rljobs": _RLJOBS, "rayclusters": "/apis/ray.io/v1", "networkpolicies": "/apis/networking.k8s.io/v1"}.get(
            kind, "/api/v1"
        )
        return f"{root}/namespaces/{self.name}/{kind}" + (f"/{name}" if name else "")

    async def apply(self, spec: dict[str, Any], name: str = "copy") -> dict[str, Any]:
        """Create the job, or replace its spec."""
        manifest = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
        query = {"fieldValidation": "Strict"}
        try:
            return await self.kube.request("POST", self.path("rljobs"), manifest, query=query)
        except AlreadyExistsError:
            return await self._replace(manifest, query)

    async def _replace(self, manifest: dict[str, Any], query: dict[str, str]) -> dict[str, Any]:
        """The operator may write the status between reading and writing: then once more, as every client does."""
        path = self.path("rljobs", manifest["metadata"]["name"])
        for _ in range(MOST_TRIES):
            current = await self.kube.request("GET", path)
            manifest["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"]
            with contextlib.suppress(ConflictError):
                return await self.kube.request("PUT", path, manifest, query=query)
        raise AssertionError(f"{path} was written by others in each of {MOST_TRIES} tries to replace its spec{self.logs()}")

    async def claim(self, name: str = "copy-checkpoints") -> None:
        """Create the volume claim."""
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
        manifest = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        await self.kube.request("POST", self.path("persistentvolumeclaims"), manifest)

    async def items(self, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind."""
        return list((await self.kube.request("GET", self.path(kind)))["items"])

    async def job(self, name: str = "copy") -> dict[str, Any]:
        """The job."""
        return await self.kube.request("GET", self.path("rljobs", name))

    async def until(self, holds: Callable[[dict[str, Any]], bool], what: str, seconds: float = 30) -> dict[str, Any]:
        """The job as soon as the predicate holds on it."""
        job: dict[str, Any] = {}

        async def check() -> bool:
            nonlocal job
            job = await self.job()
            return holds(job)

        await eventually(check, lambda: f"{what}: {yaml.safe_dump(job.get('status', {}))}{self.logs()}", seconds)
        return job

    async def condition(self, type_: str, reason: str, seconds: float = 30) -> dict[str, Any]:
        """The condition, as soon as it has that reason."""
        job = await self.until(lambda job: condition(job, type_).get("reason") == reason, f"{type_}={reason}", seconds)
        return condition(job, type_)

    async def pods_get_ready(self, cluster: str = "copy-1") -> None:
        """Play the kubelet: both pods of a cluster run and are ready."""
        pods: list[dict[str, Any]] = []

        async def made() -> bool:
            nonlocal pods
            pods = [pod for pod in await self.items("pods") if pod["metadata"]["labels"].get("ray.io/cluster") == cluster]
            return len(pods) == 2

        await eventually(made, lambda: f"KubeRay makes 2 pods of {cluster}; it made {len(pods)}{self.logs()}", 60)
        for pod in pods:
            await self.set_pod_status(pod["metadata"]["name"], ready_status())

    async def set_pod_status(self, name: str, status: dict[str, Any]) -> None:
        """Write a pod's status."""
        path = self.path("pods", name) + "/status"
        await self.kube.request("PATCH", path, {"status": status}, "application/merge-patch+json")

    def start_operator(self, **environment: str) -> subprocess.Popen[str]:
        """Run the operator as its own process, for this namespace."""
        values, log = self._operator(environment)
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "rljob_operator", "--namespace", self.name],
                env=values,
                stdout=out,
                stderr=out,
                text=True,
            )
        self.operators.append(process)
        return process

    def fork_operator(self, **environment: str) -> Spawned:
        """The same, from a process that has imported everything."""
        values, log = self._operator(environment)
        process = Spawned(["--namespace", self.name], values, log)
        self.operators.append(process)
        return process

    def _operator(self, environment: dict[str, str]) -> tuple[dict[str, str], Path]:
        """Environment and log of the next operator."""
        key = Path(self.environment["RLJOB_TEST_LOGS"]) / "key"
        key.write_bytes(KEY)
        values = {
            **self.environment,
            "RLJOB_RAY_ACCESS": self.ray_access,
            "RLJOB_STATUS_SECONDS": "0.5",
            "RLJOB_POLL_SECONDS": "0.3",
            "RLJOB_HEALTH_PORT": "0",
            "RLJOB_KEY_FILE": str(key),
            **environment,
        }
        return values, Path(self.environment["RLJOB_TEST_LOGS"]) / f"operator-{len(self.operators)}.log"

    def logs(self) -> str:
        """What the operators said, for failures."""
        folder = Path(self.environment["RLJOB_TEST_LOGS"])
        return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))


@pytest.fixture(scope="session")
def spent(environment: dict[str, str]) -> Iterator[list[str]]:
    """Namespaces of tests that are over: they go in the background, and the session waits for all of them at its end."""
    names_of_spaces: list[str] = []
    yield names_of_spaces
    if names_of_spaces:
        waiting = [f"namespace/{name}" for name in names_of_spaces]
        Kubectl(environment)("wait", "--for=delete", *waiting, "--timeout=90s")


@pytest.fixture
async def space(environment: dict[str, str], spent: list[str], tmp_path: Path) -> AsyncIterator[Space]:
    """A namespace of its own; operators that a test left running are ended with it."""
    kube = await connect()
    ray = FakeRay()
    name = f"api-{secrets.token_hex(3)}"
    await kube.request("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    place = Space(kube, name, {**environment, "RLJOB_TEST_LOGS": str(tmp_path)}, ray, await ray.start())
    yield place
    for process in place.operators:
        process.kill()
        process.wait()
    await ray.stop()
    await kube.request("DELETE", f"/api/v1/namespaces/{name}")
    await kube.close()
    spent.append(name)


@pytest.fixture
def spec() -> dict[str, Any]:
    """The example's spec, with pods that no node takes and nothing kept."""
    value: dict[str, Any] = copy.deepcopy(yaml.safe_load((ROOT / "examples/copy.yaml").read_text())["spec"])
    value["trainer"]["template"] = copy.deepcopy(NOWHERE)
    value.pop("ttlSecondsAfterFinished", None)
    value["failurePolicy"] = {"backoffSeconds": 1}
    return value


def condition(job: dict[str, Any], type_: str) -> dict[str, Any]:
    """A condition of a job; empty when it is not there."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == type_), {})


def ready_status() -> dict[str, Any]:
    """The status of a pod that runs and is ready."""
    now = "2026-01-01T00:00:00Z"
    running = {
        "name": "trainer",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "image": "x",
        "imageID": "x",
        "state": {"running": {"startedAt": now}},
    }
    conditions = [
        {"type": type_, "status": "True", "lastTransitionTime": now}
        for type_ in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    ]
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [running], "podIP": "10.9.9.9"}


async def eventually(holds: Callable[[], Awaitable[bool]], otherwise: Callable[[], str], seconds: float = 30) -> None:
    """Wait until it holds; fail with the words after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            while not await holds():  # noqa: ASYNC110  what is waited for is on another machine
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"not within {seconds:g} s: {otherwise()}")


async def account(space: Space, rules: list[dict[str, Any]]) -> str:
    """A kubeconfig of a new service account with these rules in the namespace."""
    for path, manifest in (
        (f"/api/v1/namespaces/{space.name}/serviceaccounts", {"kind": "ServiceAccount", "apiVersion": "v1"}),
        (
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles",
            {"kind": "Role", "apiVersion": "rbac.authorization.k8s.io/v1", "rules": rules},
        ),
        (
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/rolebindings",
            {
                "kind": "RoleBinding",
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"},
                "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": space.name}],
            },
        ),
    ):
        await space.kube.request("POST", path, {**manifest, "metadata": {"name": "operator"}})
    request = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {"expirationSeconds": 3600}}
    answer = await space.kube.request("POST", f"/api/v1/namespaces/{space.name}/serviceaccounts/operator/token", request)
    connection = await space.kube.connection()
    cluster: dict[str, Any] = {"server": connection.server}
    if connection.ca_path:
        cluster["certificate-authority"] = connection.ca_path
    path = Path(space.environment["RLJOB_TEST_LOGS"]) / "kubeconfig"
    return write_kubeconfig(path, cluster, {"token": answer["status"]["token"]})


def write_kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any]) -> str:
    """A kubeconfig of one cluster and one user."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)
