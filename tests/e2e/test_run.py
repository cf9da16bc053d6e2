"""The promise, end to end: real API server, KubeRay, Ray and Megatron."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from dev.kube import CommandError, Kubectl

from rljob_api import names
from rljob_api.progress import PromptCounts
from rljob_api.reasons import ConditionType
from rljob_cli.watch import condition, ended

from .conftest import SYSTEM, Manifest, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


ASK_RAY = f"""
import pathlib, urllib.request
token = pathlib.Path("{names.ACCESS_TOKEN_FILE}").read_text()
request = urllib.request.Request(
    "http://127.0.0.1:{names.DASHBOARD_PORT}/api/jobs/", headers={{"Authorization": f"Bearer {{token}}"}}
)
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


def step(job: dict[str, Any]) -> int:
    return int(job.get("status", {}).get("step", 0))


def test_an_applied_job_trains_to_its_target_though_the_operator_is_killed(kubectl: Kubectl, manifest: Manifest) -> None:
    kubectl("apply", "-f", "-", given=manifest("copy", ttlSecondsAfterFinished=30))
    wait_until(kubectl.namespace, "copy", lambda job: step(job) >= 1, 240)
    system = Kubectl(kubectl.environment, SYSTEM)
    operators = {pod["metadata"]["name"] for pod in system.pods("app.kubernetes.io/name=rljob")}
    system("delete", "pod", *operators, "--grace-period=0", "--force")

    job = wait_until(kubectl.namespace, "copy", lambda job: ended(job) is not None, 300)
    status = job["status"]
    assert condition(job, ConditionType.SUCCEEDED)["reason"] == "TargetReached", status
    assert float(status["validation"]["reward"]) >= 0.95
    assert (status["attempt"], status["restarts"], status["prompts"]["skipped"]) == (1, 0, 0)
    assert PromptCounts.model_validate(status["prompts"]).adds_up()
    kubectl("wait", "--for=condition=Succeeded", "rlj/copy", "--timeout=10s")
    told = re.compile("Events:.*AttemptStarted.*DriverSubmitted.*TargetReached", re.DOTALL)
    deadline = time.monotonic() + 30  # the last event comes after the status
    while not told.search(story := kubectl("describe", "rlj", "copy")):
        assert time.monotonic() < deadline, story
        time.sleep(0.5)
    assert condition(job, ConditionType.PROMPTS_SKIPPED)["reason"] == "None"
    assert not {pod["metadata"]["name"] for pod in system.pods("app.kubernetes.io/name=rljob")} & operators

    service = names.head_service(names.cluster_name("copy", 1))
    proxy = f"/api/v1/namespaces/{kubectl.namespace}/services/{service}:{names.DASHBOARD_PORT}/proxy/api/jobs/"
    with pytest.raises(CommandError, match="provide credentials"):  # 401: the attempt's token is needed
        kubectl("get", "--raw", proxy)
    (head,) = kubectl.pods(f"{names.LABEL_JOB}=copy,{names.LABEL_RAY_NODE_TYPE}=head")
    submitted = json.loads(kubectl("exec", head["metadata"]["name"], "--", "python", "-c", ASK_RAY))
    assert [entry["submission_id"] for entry in submitted] == [names.submission_id("copy", 1)]

    path = f"{names.VOLUME_MOUNT_PATH}/{names.run_directory(kubectl.namespace, 'copy')}/metrics.jsonl"
    rows = [json.loads(line) for line in kubectl("exec", head["metadata"]["name"], "--", "cat", path).splitlines()]
    assert [row["step"] for row in rows] == list(range(1, status["step"] + 1))
    assert {row["attempt"] for row in rows} == {1}

    deadline = time.monotonic() + 90
    while kubectl.pods(f"{names.LABEL_JOB}=copy"):
        assert time.monotonic() < deadline, "pods stay although ttlSecondsAfterFinished is over"
        time.sleep(1)
    assert kubectl.find("rlj", "copy") is not None


def test_deleting_a_job_in_training_removes_its_pods_within_the_grace_period(kubectl: Kubectl, manifest: Manifest) -> None:
    kubectl("apply", "-f", "-", given=manifest("copy"))
    wait_until(kubectl.namespace, "copy", lambda job: step(job) >= 1, 240)
    pods = kubectl.pods(f"{names.LABEL_JOB}=copy")
    assert len(pods) == 2
    grace = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in pods)
    began = time.monotonic()
    kubectl("delete", "rlj", "copy", "--wait=true", timeout=30)
    while kubectl.pods(f"{names.LABEL_JOB}=copy"):
        assert time.monotonic() - began < grace + 30, "pods outlive the job"
        time.sleep(0.5)


def test_a_generation_layout_that_differs_is_refused_at_once_naming_both_values(kubectl: Kubectl, manifest: Manifest) -> None:
    changes: dict[str, Any] = {"generation.parallelism": {"tensor": 2}}
    words = "spec.generation.parallelism.tensor: Invalid value: 2 differs from training's spec.parallelism.tensor 1"
    with pytest.raises(CommandError, match=re.escape(words)):
        kubectl("apply", "-f", "-", given=manifest("bad", **changes))
    assert kubectl.json("get", "rljobs")["items"] == []


def test_what_only_the_operator_finds_invalid_gets_no_pod_until_corrected(kubectl: Kubectl, manifest: Manifest) -> None:
    changes: dict[str, Any] = {"trainer.template": {"spec": {"containers": "none"}}}
    kubectl("apply", "-f", "-", given=manifest("bad", **changes))
    job = wait_until(kubectl.namespace, "bad", lambda job: bool(condition(job, ConditionType.VALIDATED)), 30)
    validated = condition(job, ConditionType.VALIDATED)
    assert (validated["status"], validated["reason"]) == ("False", "SpecUnreadable")
    assert "spec.trainer.template" in validated["message"]
    assert kubectl.json("get", "rayclusters")["items"] == []
    assert kubectl.json("get", "pods")["items"] == []

    # The corrected job waits for a claim that does not exist, so that no pod has to start here.
    corrected = {"checkpoint.volume": {"claimName": "nowhere"}}
    kubectl("apply", "-f", "-", given=manifest("bad", **corrected))
    job = wait_until(kubectl.namespace, "bad", lambda job: condition(job, ConditionType.VALIDATED).get("status") == "True", 30)
    job = wait_until(
        kubectl.namespace, "bad", lambda job: condition(job, ConditionType.CLUSTER_READY).get("reason") == "VolumeMissing", 30
    )
    assert "PersistentVolumeClaim nowhere does not exist" in condition(job, ConditionType.CLUSTER_READY)["message"]


def test_an_image_that_does_not_exist_is_named_and_ends_at_the_provisioning_deadline(
    kubectl: Kubectl, manifest: Manifest
) -> None:
    image = "localhost/no-such-image:dev"
    changes = {
        "trainer.image": image,
        "deadlines.provisioningSeconds": 25,
        "failurePolicy.maxRestarts": 0,
        "ttlSecondsAfterFinished": 0,
    }
    kubectl("apply", "-f", "-", given=manifest("bad", **changes))
    wait_until(
        kubectl.namespace, "bad", lambda job: image in condition(job, ConditionType.CLUSTER_READY).get("message", ""), 60
    )
    job = wait_until(kubectl.namespace, "bad", lambda job: ended(job) is not None, 60)
    assert condition(job, ConditionType.SUCCEEDED)["reason"] == "ProvisioningDeadlineExceeded"
    assert image in job["status"]["lastFailure"]["message"]
