"""From a killed head to the first step of the next attempt, on real pods, beside KubeRay's RayJob with backoffLimit.

Both run the same image and the same trainer on pods of the same sizes, one after the other; heads are deleted by force, and
steps are read from the driver's own report, all in the same way. A RayJob knows no checkpoint, so its trainer begins at
step 0 each time; its runs keep nothing, as each pod has a volume of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import yaml
from dev.case import manifest
from dev.kube import CommandError

from rljob_api import names
from rljob_api.progress import ProgressReport
from rljob_api.spec import RLJobSpec
from rljob_operator.api import ApiUnreachableError
from rljob_operator.kube import Kube, connect
from rljob_operator.ray import read_report
from rljob_operator.render import spec_text

from .results import Row

RAY = "/apis/ray.io/v1"
JOBS = f"/apis/{names.GROUP}/{names.VERSION}"
SAVE_EVERY = 200
STEPS_BEFORE_KILL = 300
"""Steps of an attempt's own before its head goes: half an interval after a save, so that something has to be done again. The
report that is read is up to a second old, dozens of steps: an interval has to be longer than that."""
LOOK_SECONDS = 0.25
PATIENCE = 600.0
ENDLESS = 1_000_000
CHANGES: dict[str, Any] = {"algorithm.grpo.steps": ENDLESS, "checkpoint.everySteps": SAVE_EVERY}


@dataclass
class Measured:
    """Of one kind: seconds from the created object to its first step, from each kill to the next one, steps lost each time."""

    first: float
    again: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


class RLJobRun:
    """Ours: each attempt has a RayCluster of its own, whose name is known beforehand."""

    def __init__(self, kills: int) -> None:
        policy = {"maxRestarts": kills, "backoffSeconds": 1}
        self.manifest = yaml.safe_load(manifest("recovery", {**CHANGES, "failurePolicy": policy}))
        self.plural = f"{JOBS}/namespaces/{{}}/{names.PLURAL}"

    async def cluster(self, kube: Kube, namespace: str, kills: int) -> str:
        """The RayCluster after so many kills."""
        return names.cluster_name("recovery", kills + 1)


class RayJobRun:
    """Theirs: KubeRay names the RayCluster, and keeps or replaces it."""

    def __init__(self, kills: int, mode: str) -> None:
        self.manifest = rayjob(kills, mode)
        self.plural = f"{RAY}/namespaces/{{}}/rayjobs"

    async def cluster(self, kube: Kube, namespace: str, kills: int) -> str:
        """The RayCluster that it names now; empty between two."""
        job = await kube.request("GET", f"{self.plural.format(namespace)}/recovery")
        status = job.get("status") or {}
        if status.get("jobDeploymentStatus") == "Failed":
            raise CommandError(f"the RayJob failed: {status.get('reason')}: {status.get('message')}")
        return str(status.get("rayClusterName") or "")


def rayjob(kills: int, mode: str) -> dict[str, Any]:
    """The same trainer as a RayJob: sizes, image, command and Ray's custom resources as ours."""
    # No save: what its pods write is gone with them.
    raw = yaml.safe_load(manifest("recovery", {**CHANGES, "checkpoint.everySteps": ENDLESS}))["spec"]
    spec = RLJobSpec.model_validate(raw)
    trainer = raw["trainer"]

    def group(resources: dict[str, Any], resource: str, cpus: int, ports: list[dict[str, Any]]) -> dict[str, Any]:
        container = {
            "name": names.CONTAINER,
            "image": trainer["image"],
            "imagePullPolicy": "IfNotPresent",
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
            "resources": {"requests": resources, "limits": {"memory": resources["memory"]}},
            "ports": ports,
            "volumeMounts": [{"name": names.VOLUME_NAME, "mountPath": names.VOLUME_MOUNT_PATH}],
        }
        pod = {
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "containers": [container],
            "volumes": [{"name": names.VOLUME_NAME, "emptyDir": {}}],
        }
        custom = f"'{{\"{resource}\":{names.RESOURCE_AMOUNT}}}'"
        return {"rayStartParams": {"num-cpus": str(cpus), "resources": custom}, "template": {"spec": pod}}

    ports = [("gcs-server", names.GCS_PORT), ("dashboard", names.DASHBOARD_PORT), ("client", 10001)]
    ports.append((names.PROGRESS_PORT_NAME, names.PROGRESS_PORT))
    head = group(
        trainer["head"]["resources"], names.RESOURCE_HEAD, 0, [{"name": one, "containerPort": port} for one, port in ports]
    )
    head["rayStartParams"]["dashboard-host"] = "0.0.0.0"  # noqa: S104  the pod's own network; KubeRay's Service needs it
    worker = {"groupName": names.WORKER_GROUP, "replicas": 1, "minReplicas": 1, "maxReplicas": 1}
    worker |= group(trainer["resources"], names.RESOURCE_NODE, 1, [])
    small = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    submitter = {"name": "ray-job-submitter", "image": trainer["image"], "imagePullPolicy": "IfNotPresent", "resources": small}
    environment = {
        names.ENV_SPEC: spec_text(spec),
        names.ENV_NAME: "recovery",
        names.ENV_NAMESPACE: "default",
        names.ENV_UID: "recovery",
        names.ENV_ATTEMPT: "1",
        names.ENV_VOLUME: names.VOLUME_MOUNT_PATH,
    }
    job: dict[str, Any] = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "recovery"},
        "spec": {
            "submissionMode": mode,
            "backoffLimit": kills,
            "shutdownAfterJobFinishes": True,
            "entrypoint": names.DRIVER_ENTRYPOINT,
            "runtimeEnvYAML": yaml.safe_dump({"env_vars": environment}),
            "rayClusterSpec": {"rayVersion": names.RAY_VERSION, "headGroupSpec": head, "workerGroupSpecs": [worker]},
        },
    }
    if mode == "K8sJobMode":  # the pod that submits; KubeRay's own size may not find room beside the run
        pod = {"restartPolicy": "Never", "containers": [submitter]}
        job["spec"]["submitterPodTemplate"] = {"spec": pod}
    return job


async def measure(run: RLJobRun | RayJobRun, namespace: str, kills: int) -> Measured:
    """Create it, kill its head so often, delete it. Raises CommandError when a step does not come in time."""
    kube = await connect()
    path = run.plural.format(namespace)
    try:
        await kube.request("POST", path, run.manifest)
        began = time.monotonic()
        report = await _until(kube, run, namespace, 0, lambda report: _own_steps(report) >= 1)
        measured = Measured(time.monotonic() - began)
        for kill in range(kills):
            before = await _until(kube, run, namespace, kill, lambda report: _own_steps(report) >= STEPS_BEFORE_KILL)
            await _delete_head(kube, namespace, await run.cluster(kube, namespace, kill))
            began = time.monotonic()

            def is_next(report: ProgressReport, before: ProgressReport = before) -> bool:
                return _own_steps(report) >= 1 and (report.attempt > before.attempt or report.step < before.step)

            report = await _until(kube, run, namespace, kill + 1, is_next)
            measured.again.append(time.monotonic() - began)
            # A driver that is told to end saves on its way, steps after the report that was read last.
            measured.lost.append(max(0, before.step - (report.resume.from_step if report.resume else 0)))
        return measured
    finally:
        await kube.request("DELETE", f"{path}/recovery", {"propagationPolicy": "Background"})
        await _no_pods(kube, namespace)
        await kube.close()


def _own_steps(report: ProgressReport) -> int:
    return report.step - (report.resume.from_step if report.resume else 0)


async def _until(
    kube: Kube, run: RLJobRun | RayJobRun, namespace: str, kills: int, holds: Callable[[ProgressReport], bool]
) -> ProgressReport:
    """The driver's report once it holds; whoever does not answer is asked again."""
    deadline = time.monotonic() + PATIENCE
    last = "nobody answered"
    while time.monotonic() < deadline:
        if cluster := await run.cluster(kube, namespace, kills):
            service = names.head_service(cluster)
            try:
                answer = await kube.carry("GET", namespace, service, names.PROGRESS_PORT, names.PROGRESS_PATH)
            except ApiUnreachableError as error:
                last = str(error)
            else:
                report = read_report(answer.body) if answer.status == 200 else None
                if isinstance(report, ProgressReport) and holds(report):
                    return report
                last = f"{answer.status}: {answer.body[:300]}"
        await asyncio.sleep(LOOK_SECONDS)
    raise CommandError(f"no such step within {PATIENCE:g} s after kill {kills} of {type(run).__name__}; last answer: {last}")


async def _delete_head(kube: Kube, namespace: str, cluster: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    selector = f"{names.LABEL_RAY_CLUSTER}={cluster},{names.LABEL_RAY_NODE_TYPE}=head"
    (head,) = (await kube.request("GET", pods, query={"labelSelector": selector}))["items"]
    await kube.request("DELETE", f"{pods}/{head['metadata']['name']}", {"gracePeriodSeconds": 0})


async def _no_pods(kube: Kube, namespace: str) -> None:
    """The next run needs the place."""
    deadline = time.monotonic() + PATIENCE
    while (await kube.request("GET", f"/api/v1/namespaces/{namespace}/pods"))["items"]:
        if time.monotonic() > deadline:
            raise CommandError(f"pods of {namespace} are still there after {PATIENCE:g} s")
        await asyncio.sleep(1.0)


def rows(namespace: str, kills: int, mode: str) -> list[Row]:
    """Measure both; the claim of the example has to be in the namespace, and KUBECONFIG in this process' environment."""
    ours = asyncio.run(measure(RLJobRun(kills), namespace, kills))
    theirs = asyncio.run(measure(RayJobRun(kills, mode), namespace, kills))
    pods = f"same image, command and pods; peer: RayJob, {mode}, backoffLimit {kills}"
    spread = "; ".join(
        f"{who} {', '.join(f'{one:.0f}' for one in found.again)}" for who, found in (("ours", ours), ("peer", theirs))
    )
    return [
        Row("apply to first step", "s", ours.first, theirs.first, "lower", pods),
        Row("head killed to next step, median", "s", median(ours.again), median(theirs.again), "lower", f"{pods}; {spread}"),
        Row("steps lost with a head, mean", "", sum(ours.lost) / kills, sum(theirs.lost) / kills, "lower",
            f"of those reported; ours saves every {SAVE_EVERY} steps and when told to end; a RayJob begins at step 0"),
    ]  # fmt: skip
