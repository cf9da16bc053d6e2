"""What others may do to a job's objects, and odd words in them: the job still comes to an end, or says what it waits for."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from rljob_api import names
from rljob_api.base import DECIMAL_PATTERN
from rljob_operator.decide import decide
from rljob_operator.metrics import Process, render
from rljob_operator.plan import CreatePreflight
from rljob_operator.world import Refusal

from .builders import (
    UID,
    apply,
    at,
    before_cluster,
    cluster,
    counted,
    job,
    outcome,
    preflight,
    report,
    running,
    spec,
    stamp,
    training,
    world,
)
from .fakes import FakeCluster, FakeRay, later
from .life import Operator, state

# ---- Words that are no words of ours ----


@pytest.mark.parametrize("value", [0.0, -0.5, 99999999999.99996, 1e11, 123456789012.9, 3.4e38, -3.4e38, 9.99995e99, 1e300])
def test_every_finite_reward_leaves_a_status_that_the_api_server_takes(value: float) -> None:
    before = training(report=report(5, reward=value, validation_step=5, validation_reward=value))
    after = apply(decide(before), before)
    told = [after.reward, after.validation.reward if after.validation else None]
    if abs(value) > 9e99:
        assert told == [None, None]
        return
    for text in told:
        assert text is not None
        assert re.fullmatch(DECIMAL_PATTERN, text)
        assert float(text) == pytest.approx(value, rel=1e-3)


ODD_TIMES = ["2026-11-29t12:00:10z", "0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-11-29T12:00:10+99:99"]


@pytest.mark.parametrize("text", ODD_TIMES)
def test_a_time_that_somebody_wrote_into_the_status_stops_no_pass_and_no_metrics(text: str) -> None:
    """The API server takes all of them for a date-time."""
    edits: list[dict[str, Any]] = [
        {"lastStepTime": text, "step": 5},
        {"attemptStartTime": text},
        {"startTime": text, "suspendTime": text},
        {"lastFailure": {"attempt": 1, "reason": "HeadLost", "time": text}},
        {"finishTime": text},
        {"conditions": [{"type": "Validated", "status": "True", "reason": "Valid", "lastTransitionTime": text}]},
    ]
    for edit in edits:
        for spec_ in (None, {"ttlSecondsAfterFinished": 60, "deadlines": {"activeSeconds": 5000}}):
            edited = running(**edit)
            moment = training(60, job=job(edited, None if spec_ is None else job().spec | spec_))
            apply(decide(moment), moment)
            assert "rljob_attempt" in render([moment.job], Process())


# ---- What refuses pods, or holds them ----


def test_a_quota_that_has_no_room_is_asked_now_and_then_and_ends_an_attempt_not_the_job() -> None:
    refusal = Refusal("403 Forbidden: exceeded quota: pods", final=False, what="pod copy-1-preflight")
    plan, conditions = outcome(before_cluster(refusal=refusal))
    assert [type(one) for one in plan.actions] == [CreatePreflight]
    assert plan.requeue_after is not None
    assert plan.requeue_after >= 5
    assert "exceeded quota: pods" in conditions["ClusterReady"][2]
    late = before_cluster(700, refusal=refusal)
    failure = apply(decide(late), late).last_failure
    assert failure is not None
    assert (failure.reason, failure.action) == ("ProvisioningDeadlineExceeded", "Restart")
    assert "pod copy-1-preflight is refused: 403 Forbidden: exceeded quota: pods" in failure.message


def test_a_preflight_that_does_not_go_is_named_and_bounded_from_when_it_should_have_gone() -> None:
    blocked = {"type": "Succeeded", "status": "Unknown", "reason": "Blocked", "lastTransitionTime": stamp(0)}
    held = preflight(deleting=True, ended=True, ended_at=at(8), due_gone=at(1000))
    plan, conditions = outcome(before_cluster(1100, pods=(held,)))
    assert plan.actions == ()
    assert "waiting for pod copy-1-preflight to be gone" in conditions["Succeeded"][2]
    assert apply(decide(before_cluster(1100, status=counted(conditions=[blocked]), pods=(held,))), world()).last_failure is None
    late = before_cluster(1700, pods=(held,))
    failure = apply(decide(late), late).last_failure
    assert failure is not None
    assert failure.reason == "ProvisioningDeadlineExceeded"
    assert "waiting for pod copy-1-preflight to be gone" in failure.message


async def test_a_secret_that_somebody_holds_is_named_and_bounded(kube: FakeCluster, ray: FakeRay) -> None:
    operator = Operator(kube, ray)
    await operator.count()
    kube.secrets = {names.access_secret("copy-1", UID): {}}  # of a pass that was cut off
    kube.hold_secrets(True)
    assert await operator.step() is not None
    await operator.step()
    assert kube.condition("ClusterReady")["reason"] == "ClusterRejected"
    assert "something holds it (a finalizer?)" in kube.condition("ClusterReady")["message"]
    later(kube, 700)
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "ProvisioningDeadlineExceeded"


# ---- Objects of earlier ones, and of nobody ----


async def test_an_event_about_an_earlier_cluster_of_the_same_name_refuses_nothing(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    """The job was deleted, mended and applied again; KubeRay is slow, and the old event is still there."""
    kube.kube_events = [
        {
            "type": "Warning",
            "reason": "InvalidRayClusterSpec",
            "message": "of the earlier one",
            "lastTimestamp": stamp(0),
            "involvedObject": {"uid": "an earlier one"},
        }
    ]
    await operator.step()
    for _ in range(3):
        later(kube, 20)
        await operator.step()
    assert state(kube) == "Provisioning"
    assert "the earlier one" not in str(kube.status())


async def test_pods_that_were_orphaned_are_ended_before_the_next_attempt(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    """`kubectl delete raycluster --cascade=orphan`: nobody else would ever end them."""
    await operator.until_training()
    kube.orphan_pods("copy-1")
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "HeadLost"
    await operator.step()
    assert len(kube.pods) == 2, "those of a RayCluster that was just deleted go by themselves"
    later(kube, 61)
    await operator.step()
    assert kube.pods == {}
    later(kube, 60)
    await operator.until_training()
    assert ray.submitted == ["copy-1", "copy-2"]


async def test_a_pod_of_an_earlier_attempt_that_turns_up_is_ended_before_the_clusters_are_made(
    kube: FakeCluster, ray: FakeRay
) -> None:
    """KubeRay had not seen yet that its RayCluster was gone."""
    operator = Operator(kube, ray)
    await operator.count()
    kube.jobs["copy"]["status"]["attempt"] = 2
    kube.late_pod("copy-1")
    kube.held = True
    operator.restart()
    await operator.step()
    assert kube.clusters == {}
    assert kube.condition("Restarting")["message"] == "waiting for pods of an earlier attempt to end: copy-1-late"
    later(kube, 700)
    await operator.step()
    failure = kube.status()["lastFailure"]
    assert failure["reason"] == "ProvisioningDeadlineExceeded"
    assert "waiting for copy-1-late of an earlier attempt to be gone" in failure["message"]


@pytest.mark.parametrize("attempt", [1, 5])
async def test_an_attempts_number_that_somebody_edits_makes_no_attempts_overlap(
    kube: FakeCluster, ray: FakeRay, attempt: int
) -> None:
    """FakeCluster raises where a cluster is made beside another's pods."""
    kube.jobs["copy"]["status"] = {"attempt": 2, "attemptStartTime": stamp(0), "attemptEndTime": stamp(0)}
    operator = Operator(kube, ray)
    await operator.until_training()
    assert list(kube.clusters) == ["copy-3"]
    kube.jobs["copy"]["status"]["attempt"] = attempt
    kube._touch(kube.jobs["copy"])
    await operator.step()
    await operator.step()
    assert kube.clusters == {}
    kube.pods_without_cluster_go()
    await operator.until_training()
    assert list(kube.clusters) == [f"copy-{attempt}"]


async def test_a_cluster_of_another_attempt_does_not_stay_beside_a_running_one(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    """A halted operator woke up, and made what it had decided on long ago."""
    await operator.until_training()
    late = copy.deepcopy(kube.clusters["copy-1"])
    late["metadata"] |= {"name": "copy-0", "uid": "late"}
    kube.clusters["copy-0"] = kube._new(late)
    await operator.step()
    assert list(kube.clusters) == ["copy-1"]
    assert state(kube) == "Starting"


@pytest.mark.parametrize("restarts", [0, 3])
async def test_no_secret_stays_behind_a_cluster_that_somebody_else_deleted(
    kube: FakeCluster, ray: FakeRay, restarts: int
) -> None:
    kube.edit("copy", spec(failurePolicy={"maxRestarts": restarts}))
    operator = Operator(kube, ray)
    await operator.until_training()
    assert len(kube.secrets) == 1
    del kube.clusters["copy-1"]
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "HeadLost"
    assert kube.secrets == {}


async def test_a_cluster_that_somebody_scales_up_trains_on(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    later(kube, 30)
    kube.clusters["copy-1"]["spec"]["workerGroupSpecs"][0]["replicas"] = 2
    extra = copy.deepcopy(kube.pods["copy-1-workers-worker"])
    extra["metadata"] |= {"name": "copy-1-workers-another", "uid": "another"}
    kube.pods["copy-1-workers-another"] = kube._new(extra)
    ray.reports["copy-1"] = report(10)
    await operator.step()
    assert (state(kube), kube.status()["attempt"]) == ("Running", 1)
    kube.kill_pod("copy-1-workers-worker")
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "OutOfMemory"


async def test_an_api_server_that_was_restored_from_a_backup_is_believed(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    """Its versions are older than those that the operator has seen; they would never become newer by waiting."""
    await operator.until_training()
    kube.jobs["copy"]["metadata"]["resourceVersion"] = "3"
    kube.edit("copy", kube.jobs["copy"]["spec"] | {"suspend": True})
    kube.jobs["copy"]["metadata"]["resourceVersion"] = "4"
    ray.end("copy-1", "FAILED", 73)
    for _ in range(3):
        await operator.step(told=False)
    assert kube.status()["suspendTime"]


@pytest.mark.parametrize("provisioned", [20, None])
def test_a_cluster_that_a_queue_suspends_in_training_is_an_eviction_that_is_not_counted(provisioned: float | None) -> None:
    held = cluster(provisioned=provisioned, suspended=True)
    before = training(7200, clusters=(held,), pods=(), members=frozenset({"copy-1-head", "copy-1-worker"}))
    failure = apply(decide(before), before).last_failure
    assert failure is not None
    assert (failure.reason, failure.action) == ("Evicted", "RestartUncounted")
    assert "RayCluster copy-1 was suspended by someone else" in failure.message


def test_a_cluster_that_a_queue_holds_back_waits_and_says_so() -> None:
    held = cluster(provisioned=None, suspended=True)
    plan, conditions = outcome(world(60, clusters=(held,), pods=()))
    assert plan.actions == ()
    assert "RayCluster copy-1 is suspended by someone else" in conditions["ClusterReady"][2]


async def test_somebody_elses_cluster_of_the_last_attempts_name_holds_the_next_one_up_no_more(
    kube: FakeCluster, ray: FakeRay
) -> None:
    theirs = {"metadata": {"name": "copy-1", "namespace": "default", "uid": "theirs", "labels": {}}, "spec": {}}
    operator = Operator(kube, ray)
    await operator.count()
    kube.clusters["copy-1"] = kube._new(theirs)
    await operator.step()
    later(kube, 700)
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "ProvisioningDeadlineExceeded"
    later(kube, 60)
    await operator.step()
    assert kube.status()["attempt"] == 2
    assert "copy-1" in kube.clusters


async def test_a_worker_that_a_quota_refuses_is_waited_for_and_was_never_lost(kube: FakeCluster, ray: FakeRay) -> None:
    """KubeRay calls a cluster provisioned when all pods that it could make are ready."""
    operator = Operator(kube, ray)
    await operator.count()
    await operator.step()
    kube.kuberay_makes_pods()
    worker = kube.pods["copy-1-workers-worker"]
    later(kube, 10)
    kube.pods_get_ready()
    del kube.pods["copy-1-workers-worker"]
    operator.restart()
    kube.kube_events = [{"type": "Warning", "reason": "FailedToCreateWorkerPod", "message": "quota", "lastTimestamp": stamp(9)}]
    for _ in range(3):
        later(kube, 60)
        await operator.step()
    assert (kube.status()["attempt"], kube.status().get("lastFailure")) == (1, None)
    assert "FailedToCreateWorkerPod: quota" in kube.condition("ClusterReady")["message"]
    assert kube.condition("Succeeded")["reason"] == "Provisioning"
    assert "FailedToCreateWorkerPod: quota" in kube.condition("Succeeded")["message"]
    kube.pods["copy-1-workers-worker"] = kube._new(copy.deepcopy(worker))
    for _ in range(3):
        await operator.step()
    assert ray.submitted == ["copy-1"]
    operator.restart()
    await operator.step()
    assert kube.status().get("lastFailure") is None


async def test_a_worker_that_a_quota_refuses_for_ever_ends_in_the_provisioning_deadline(
    kube: FakeCluster, ray: FakeRay
) -> None:
    operator = Operator(kube, ray)
    await operator.count()
    await operator.step()
    kube.kuberay_makes_pods()
    kube.pods_get_ready()
    del kube.pods["copy-1-workers-worker"]
    later(kube, 700)
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "ProvisioningDeadlineExceeded"
