"""The operator's promises on a real API server with a real KubeRay."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from dev.kube import ROOT, run

from rljob_api.progress import Finished, ProgressReport, PromptCounts
from rljob_operator.access import Access
from rljob_operator.api import Object
from rljob_operator.ray import DirectTransport, Ray
from rljob_operator.reconciler import Reconciler
from rljob_operator.settings import Settings
from rljob_operator.store import Store

from .conftest import KEY, Space, account, condition, eventually, ready_status, write_kubeconfig
from .gate import Gate

ACCESS = Access(KEY)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


async def report(space: Space, step: int, attempt: int = 1, **changes: Any) -> ProgressReport:
    uid = (await space.job())["metadata"]["uid"]
    values: dict[str, Any] = {
        "name": "copy",
        "namespace": space.name,
        "uid": uid,
        "attempt": attempt,
        "phase": "Training",
        "updated_time": "2026-01-01T00:00:00Z",
        "step": step,
        "total_steps": 500,
        "prompts": PromptCounts(handed_out=8 * step, trained=8 * step),
    }
    return ProgressReport(**{**values, **changes})


async def start_training(space: Space, spec: dict[str, Any]) -> None:
    await space.claim()
    await space.apply(spec)
    await space.pods_get_ready()
    await space.condition("DriverRunning", "Running")


async def test_a_job_that_only_the_operator_finds_invalid_gets_no_child_and_recovers_when_corrected(
    space: Space, spec: dict[str, Any]
) -> None:
    """The API server refuses what the rules in the definition can tell; a pod template it takes as it is."""
    await space.claim()
    space.start_operator()
    await space.apply({**spec, "trainer": {**spec["trainer"], "template": {"spec": {"containers": "none"}}}})
    found = await space.condition("Validated", "SpecUnreadable")
    assert found["status"] == "False"
    assert "spec.trainer.template" in found["message"]
    assert await space.items("rayclusters") == []
    assert await space.items("pods") == []
    await space.apply(spec)
    job = await space.until(lambda job: job.get("status", {}).get("attempt") == 1, "an attempt")
    assert condition(job, "Validated")["status"] == "True"
    assert condition(job, "Validated")["observedGeneration"] == 2


async def test_a_missing_claim_is_named_and_the_job_goes_on_when_it_comes(space: Space, spec: dict[str, Any]) -> None:
    space.start_operator()
    await space.apply(spec)
    found = await space.condition("ClusterReady", "VolumeMissing")
    assert f"copy-checkpoints does not exist in namespace {space.name}" in found["message"]
    await space.claim()
    await space.condition("ClusterReady", "PodsPending", 40)
    found = await space.condition("ClusterReady", "PodsPending")
    (cluster,) = await space.items("rayclusters")
    assert cluster["metadata"]["name"] == "copy-1"


class Recorder:
    """A KubeApi that keeps the order of writes."""

    def __init__(self, kube: Any) -> None:
        self._kube = kube
        self.writes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    async def patch_status(self, namespace: str, name: str, version: str, patch: Mapping[str, Any]) -> Object:
        answer: Object = await self._kube.patch_status(namespace, name, version, patch)
        self.writes.append(f"status attempt {answer['status']['attempt']}")
        return answer

    async def create_cluster(self, manifest: Mapping[str, Any]) -> Object:
        answer: Object = await self._kube.create_cluster(manifest)
        self.writes.append(f"create {answer['metadata']['name']}")
        return answer


async def test_the_attempt_is_persisted_before_its_cluster_and_an_old_view_persists_nothing(
    space: Space, spec: dict[str, Any]
) -> None:
    await space.claim()
    first = await space.apply(spec)
    recorder = Recorder(space.kube)
    transport = DirectTransport(space.ray_access)
    store = Store()
    reconciler = Reconciler(
        kube=recorder, ray=Ray(transport, ACCESS), store=store, settings=Settings(), access=ACCESS, kuberay_present=True
    )
    key = (space.name, "copy")
    edited = await space.apply({**spec, "ttlSecondsAfterFinished": 9})
    assert edited["metadata"]["resourceVersion"] != first["metadata"]["resourceVersion"]
    store.take("rljobs", first)
    assert await reconciler.reconcile(key) == 0.0
    assert recorder.writes == []
    await reconciler.reconcile(key)
    assert recorder.writes == ["status attempt 1", "create copy-1"]
    await transport.close()


async def test_a_driver_is_submitted_once_though_the_operator_is_killed(space: Space, spec: dict[str, Any]) -> None:
    operator = space.start_operator()
    await start_training(space, spec)
    operator.kill()
    operator.wait()
    space.ray.reports["copy-1"] = await report(space, 7)
    space.start_operator()
    await space.until(lambda job: job["status"]["step"] == 7, "step 7")
    (submitted,) = space.ray.posts
    assert submitted["submission_id"] == "copy-1"
    assert submitted["entrypoint"] == "python -m rljob_workload.runtime.main"
    environment = submitted["runtime_env"]["env_vars"]
    assert json.loads(environment["RLJOB_SPEC"])["algorithm"]["grpo"]["steps"] == 500
    assert (environment["RLJOB_ATTEMPT"], environment["RLJOB_NAMESPACE"]) == ("1", space.name)
    finished = Finished(reason="TargetReached", message="target reached")
    space.ray.reports["copy-1"] = await report(space, 350, validation_step=350, validation_reward=0.97, finished=finished)
    space.ray.end("copy-1", "SUCCEEDED", 0)
    await space.condition("Succeeded", "TargetReached")
    job = await space.job()
    assert (job["status"]["attempt"], job["status"]["step"], job["status"]["validation"]["reward"]) == (1, 350, "0.9700")

    async def cluster_gone() -> bool:
        return not await space.items("rayclusters") and not await space.items("pods")

    await eventually(cluster_gone, lambda: "the cluster is deleted" + space.logs())


async def test_the_operator_writes_nothing_to_the_users_object_but_status(space: Space, spec: dict[str, Any]) -> None:
    operator = space.start_operator()
    applied = await space.apply(spec)
    await space.claim()
    await space.pods_get_ready()
    await space.condition("DriverRunning", "Running")
    job = await space.job()
    assert job["spec"] == applied["spec"]
    for name in ("finalizers", "annotations", "labels"):
        assert name not in job["metadata"]
    writers = {(one["manager"], one.get("subresource")) for one in job["metadata"]["managedFields"]}
    assert {one for one in writers if one[1] != "status"} == {next(one for one in writers if one[1] is None)}
    assert ("rljob-operator", "status") in writers
    operator.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(operator.wait, 20) == 0


async def test_a_failed_driver_ends_with_its_exit_code_and_its_last_lines(space: Space, spec: dict[str, Any]) -> None:
    space.start_operator()
    await start_training(space, spec)
    space.ray.end("copy-1", "FAILED", 78, "Job entrypoint command failed with exit code 78\nstep 8: loss is nan\ngiving up")
    found = await space.condition("Succeeded", "DriverFailed")
    assert found["status"] == "False"
    assert "exit code 78 (NonFinite)" in found["message"]
    assert "step 8: loss is nan\ngiving up" in found["message"]
    failure = (await space.job())["status"]["lastFailure"]
    assert (failure["attempt"], failure["exitCode"], failure["reason"]) == (1, 78, "DriverFailed")
    assert len(space.ray.posts) == 1


async def test_a_transient_failure_is_followed_by_a_second_attempt_when_the_first_ones_pods_are_gone(
    space: Space, spec: dict[str, Any]
) -> None:
    space.start_operator()
    await start_training(space, spec)
    (pod, *_) = await space.items("pods")
    hold = {"metadata": {"finalizers": ["example.test/hold"]}}
    await space.kube.request("PATCH", space.path("pods", pod["metadata"]["name"]), hold, "application/merge-patch+json")
    space.ray.end("copy-1", "FAILED", 73, "rank 0 died")
    await space.until(
        lambda job: pod["metadata"]["name"] in condition(job, "Restarting")["message"], "waiting for the pod by name"
    )
    assert (await space.job())["status"]["attempt"] == 1
    release = {"metadata": {"finalizers": None}}
    await space.kube.request("PATCH", space.path("pods", pod["metadata"]["name"]), release, "application/merge-patch+json")
    await space.pods_get_ready("copy-2")
    job = await space.until(lambda job: condition(job, "DriverRunning")["reason"] == "Running", "the second attempt")
    assert (job["status"]["attempt"], job["status"]["restarts"]) == (2, 1)
    assert [post["submission_id"] for post in space.ray.posts] == ["copy-1", "copy-2"]


async def test_a_lost_worker_is_named_with_what_kubernetes_said(space: Space, spec: dict[str, Any]) -> None:
    space.start_operator()
    await start_training(space, {**spec, "failurePolicy": {"maxRestarts": 0}})
    worker = next(pod for pod in await space.items("pods") if "worker" in pod["metadata"]["name"])
    status = ready_status()
    state = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "startedAt": None, "finishedAt": None}}
    status["containerStatuses"][0] |= {"ready": False, "state": state}
    status["conditions"] = [one | {"status": "False"} for one in status["conditions"]]
    await space.set_pod_status(worker["metadata"]["name"], {**status, "phase": "Failed"})
    found = await space.condition("Succeeded", "OutOfMemory")
    assert f"worker pod {worker['metadata']['name']} is gone: OOMKilled, exit code 137" in found["message"]


async def test_an_attempt_in_progress_is_not_disturbed_by_an_invalid_edit(space: Space, spec: dict[str, Any]) -> None:
    space.start_operator()
    await start_training(space, spec)
    space.ray.reports["copy-1"] = await report(space, 3)
    await space.apply({**spec, "trainer": {**spec["trainer"], "template": {"spec": {"containers": "none"}}}})
    await space.condition("Validated", "SpecUnreadable")
    job = await space.until(lambda job: job["status"]["step"] == 3, "step 3")
    assert condition(job, "Succeeded")["reason"] == "Running"
    assert len(await space.items("rayclusters")) == 1


async def test_deleting_the_job_takes_everything_along(space: Space, spec: dict[str, Any]) -> None:
    space.start_operator()
    await start_training(space, spec)
    await space.kube.request("DELETE", space.path("rljobs", "copy"))

    async def nothing_left() -> bool:
        return not [*await space.items("rayclusters"), *await space.items("pods"), *await space.items("rljobs")]

    await eventually(nothing_left, lambda: "all objects are gone" + space.logs(), 40)


async def test_each_attempt_has_a_token_of_its_own_that_the_operator_never_reads(space: Space, spec: dict[str, Any]) -> None:
    space.start_operator(KUBECONFIG=await account(space, chart_rules(space.name, space.environment)))
    await start_training(space, spec)
    (first,) = await space.items("secrets")
    pod = (await space.items("pods"))[0]["spec"]
    value = base64.b64decode(first["data"]["auth_token"]).decode()
    box = pod["containers"][0]
    assert {"name": "RAY_AUTH_MODE", "value": "token"} in box["env"]
    (given,) = (one for one in box["env"] if one["name"] == "RAY_AUTH_TOKEN")
    assert given["valueFrom"]["secretKeyRef"]["name"] == first["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is False
    (policy,) = await space.items("networkpolicies")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= (await space.items("pods"))[0]["metadata"]["labels"].items()
    assert space.ray.tokens["copy-1"] == {f"Bearer {value}"}

    space.ray.end("copy-1", "FAILED", 73, "rank 0 died")
    await space.pods_get_ready("copy-2")
    await space.until(lambda job: condition(job, "DriverRunning")["reason"] == "Running", "the second attempt")
    (second,) = await space.items("secrets")
    assert second["metadata"]["name"] != first["metadata"]["name"]
    assert base64.b64decode(second["data"]["auth_token"]).decode() != value

    await space.kube.request("DELETE", space.path("rljobs", "copy"))

    async def nothing_left() -> bool:
        return not [*await space.items("secrets"), *await space.items("networkpolicies")]

    await eventually(nothing_left, lambda: "Secret and NetworkPolicy go with the job", 40)


def chart_rules(namespace: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Rules of the chart's role for one namespace."""
    values = ("--kube-version", "1.35.0", "--set", f"watchNamespaces={{{namespace}}}")
    rendered = run("helm", "template", "rljob", str(ROOT / "charts/rljob"), *values, environment=environment)
    roles = [one for one in yaml.safe_load_all(rendered) if one and one["kind"] == "Role"]
    return [rule for role in roles for rule in role["rules"]]


async def test_the_charts_role_is_enough(space: Space, spec: dict[str, Any]) -> None:
    kubeconfig = await account(space, chart_rules(space.name, space.environment))
    space.start_operator(KUBECONFIG=kubeconfig)
    await start_training(space, spec)
    space.ray.reports["copy-1"] = await report(space, 500)
    space.ray.end("copy-1", "SUCCEEDED", 0)
    await space.condition("Succeeded", "Completed")
    assert "Forbidden" not in space.logs()


async def test_missing_permissions_are_named_and_end_the_start(space: Space) -> None:
    rules = [rule for rule in chart_rules(space.name, space.environment) if "pods" not in rule["resources"]]
    operator = space.start_operator(KUBECONFIG=await account(space, rules))
    assert await asyncio.to_thread(operator.wait, 30) == 1
    said = space.logs()
    missing = [f"{verb} pods in namespace {space.name}" for verb in ("list", "watch", "create", "delete")]
    (line,) = (one for one in said.splitlines() if "missing permissions: " in one)
    assert sorted(line.partition("missing permissions: ")[2].partition(";")[0].split(", ")) == sorted(missing)
    assert "Traceback" not in said


async def test_a_kuberay_that_is_installed_later_is_noticed(space: Space, spec: dict[str, Any], tmp_path: Path) -> None:
    gate = Gate(await space.kube.connection())
    try:
        kubeconfig = write_kubeconfig(tmp_path / "gate", {"server": await gate.start()}, {})
        space.start_operator(KUBECONFIG=kubeconfig)
        await space.claim()
        await space.apply(spec)
        found = await space.condition("ClusterReady", "KubeRayMissing")
        assert "install KubeRay >= 1.6" in found["message"]
        assert (await space.job())["status"]["attempt"] == 0
        gate.open = True
        await space.pods_get_ready()
        await space.condition("DriverRunning", "Running")
        assert "KubeRay was installed; starting again" in space.logs()
        assert "Traceback" not in space.logs()
    finally:
        for operator in space.operators:
            operator.kill()
        await gate.stop()
