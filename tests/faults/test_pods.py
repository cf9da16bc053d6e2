"""Pods and processes that go: the attempt ends, its evidence stays, the next one goes on from the checkpoint."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import yaml
from dev.case import Case, Job
from dev.kube import Kubectl

from rljob_api.reasons import ConditionType

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

STEPS = 200
RESTARTED = ("attempt=1", "Succeeded=Unknown/Running", "Succeeded=Unknown/Restarting", "attempt=2", "Succeeded=True/Completed")


def lossless(job: Job, attempts: int, restarts: int, steps: int = STEPS) -> None:
    """The numbers of a run that was restarted so often and lost nothing."""
    status = job["status"]
    prompts = status["prompts"]
    assert (status["attempt"], status["restarts"], status["step"]) == (attempts, restarts, steps), status
    assert (prompts.get("skipped", 0), prompts.get("trainedTwice", 0)) == (0, 0), prompts


@pytest.mark.slow
def test_head_pod_deleted_three_times(case: Case) -> None:
    case.apply(algorithm__grpo__steps=STEPS)
    for attempt in (1, 2, 3):
        case.reaches(20 * attempt, attempt)
        case.delete_pod("head")
    job = case.ends()
    lost = ("ClusterReady=False/HeadLost", "Succeeded=Unknown/Restarting")
    case.passed("attempt=1", *lost, "attempt=2", *lost, "attempt=3", *lost, "attempt=4", "Succeeded=True/Completed")
    lossless(job, 4, 3)
    assert job["status"]["resume"]["fromStep"] > 0
    case.nothing_is_left()


@pytest.mark.slow
def test_head_container_killed_in_place(case: Case) -> None:
    case.apply(algorithm__grpo__steps=STEPS)
    case.reaches(20)
    case.signal("head", "gcs_server", signal.SIGKILL)
    job = case.ends()
    case.passed(*RESTARTED)
    lossless(job, 2, 1)
    assert job["status"]["lastFailure"]["reason"] in ("HeadLost", "DriverLost", "DriverFailed"), job["status"]["lastFailure"]


@pytest.mark.slow
def test_worker_pod_killed(case: Case) -> None:
    """Whoever notices first names it: the driver that lost a rank, or the operator that lost a pod."""
    case.apply(algorithm__grpo__steps=STEPS)
    case.reaches(20)
    case.delete_pod("worker")
    job = case.ends()
    case.passed(*RESTARTED)
    lossless(job, 2, 1)
    failure = job["status"]["lastFailure"]
    assert failure["reason"] == "WorkerLost" or failure.get("exitCode") in (73, 74), failure


@pytest.mark.slow
def test_worker_drained(case: Case) -> None:
    """Its preStop has the driver save and end, so that no step is done again, and nobody's restart is used up."""
    case.apply(algorithm__grpo__steps=STEPS)
    step = case.reaches(20)["status"]["step"]
    case.evict("worker")
    job = case.ends()
    case.passed(*RESTARTED)
    lossless(job, 2, 0)
    failure, status = job["status"]["lastFailure"], job["status"]
    assert (failure["reason"], failure["action"]) == ("Drained", "RestartUncounted"), failure
    assert status["resume"]["fromStep"] >= step
    assert (status.get("rolledBack") or {}).get("steps", 0) == 0, status


EXIT_13 = """
import os, sys
if "rljob_workload.runtime.main" in sys.orig_argv and os.environ.get("RLJOB_ATTEMPT") == "1":
    print("a user's module gives up", flush=True)
    os._exit(13)
"""


def with_module(kubectl: Kubectl, code: str) -> dict[str, Any]:
    """A pod template in which every Python process first runs this code."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fault"}, "data": {"sitecustomize.py": code}}
    kubectl("apply", "-f", "-", given=yaml.safe_dump(config))
    container = {
        "name": "trainer",
        "env": [{"name": "PYTHONPATH", "value": "/fault"}],
        "volumeMounts": [{"name": "fault", "mountPath": "/fault"}],
    }
    return {"spec": {"volumes": [{"name": "fault", "configMap": {"name": "fault"}}], "containers": [container]}}


@pytest.mark.slow
def test_driver_exits_13(case: Case, kubectl: Kubectl) -> None:
    case.apply(algorithm__grpo__steps=5, trainer__template=with_module(kubectl, EXIT_13))
    job = case.ends()
    case.passed(
        "attempt=1", "DriverRunning=False/Exited", "Succeeded=Unknown/Restarting", "attempt=2", "Succeeded=True/Completed"
    )
    lossless(job, 2, 1, 5)
    failure = job["status"]["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == ("DriverFailed", 13)
    assert "a user's module gives up" in failure["message"]


@pytest.mark.slow
def test_old_pods_stuck_in_terminating(case: Case, kubectl: Kubectl) -> None:
    case.apply(algorithm__grpo__steps=STEPS)
    case.reaches(20)
    worker = case.pod("worker")
    kubectl("patch", "pod", worker, "--type=merge", "-p", '{"metadata": {"finalizers": ["example.test/hold"]}}')
    case.delete_pod("head")

    def waits(job: Job) -> bool:
        conditions = {one["type"]: one for one in job["status"]["conditions"]}
        return worker in conditions.get("Restarting", {}).get("message", "")

    job = case.until(waits, "the condition names the pod that is waited for")
    assert job["status"]["attempt"] == 1
    kubectl("patch", "pod", worker, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    lossless(case.ends(), 2, 1)
    case.passed("attempt=1", "Restarting=True/WaitingForPodsToExit", "attempt=2", "Succeeded=True/Completed")


@pytest.mark.slow
def test_a_40_character_name(make_case: Any) -> None:
    case = make_case("c" * 40)
    case.apply(algorithm__grpo__steps=5)
    lossless(case.ends(), 1, 0, 5)
    case.nothing_is_left()


@pytest.mark.slow  # tests/e2e has a short form of it
def test_image_that_does_not_exist(case: Case) -> None:
    case.apply(
        trainer__image="localhost/no-such-image:dev",
        deadlines__provisioningSeconds=20,
        failurePolicy={"maxRestarts": 0},
    )
    job = case.ends()
    case.passed("attempt=1", "Succeeded=False/ProvisioningDeadlineExceeded")
    assert "localhost/no-such-image:dev" in job["status"]["lastFailure"]["message"]
    case.nothing_is_left()


@pytest.mark.slow
def test_image_corrected_before_it_was_pulled(case: Case) -> None:
    """The edit is taken at once: no deadline is waited out, and no restart is used up."""
    case.apply(trainer__image="localhost/no-such-image:dev", algorithm__grpo__steps=10, failurePolicy={"maxRestarts": 0})
    case.until(lambda job: "localhost/no-such-image:dev" in str(job.get("status")), "the pull error")
    case.apply(algorithm__grpo__steps=10, failurePolicy={"maxRestarts": 0})
    job = case.ends()
    case.passed("attempt=1", "Succeeded=Unknown/Restarting", "attempt=2", "Succeeded=True/Completed")
    assert "lastFailure" not in job["status"]
    lossless(job, 2, 0, 10)


def test_unschedulable(case: Case) -> None:
    case.apply(
        trainer__resources={"cpu": "512", "memory": "3Gi"},
        deadlines__provisioningSeconds=20,
        failurePolicy={"maxRestarts": 0},
    )
    message = case.ends()["status"]["lastFailure"]["message"]
    case.passed("attempt=1", "ClusterReady=False/PodsPending", "Succeeded=False/ProvisioningDeadlineExceeded")
    assert "Insufficient cpu" in message, message
    case.nothing_is_left()
    assert ConditionType.SUCCEEDED in str(case.trail)
