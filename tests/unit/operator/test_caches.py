"""What the watches have not delivered yet, or deliver about somebody else, is never taken for the truth about a job."""

from __future__ import annotations

import copy

import pytest

from .builders import FINISHED, apply, at, outcome, pod, pods, report, spec, training
from .fakes import FakeCluster, FakeRay, gone, later
from .life import KEY, Operator, state

NEXT_UID = "22222222-2222-3333-4444-555555555555"


async def fail_without_delete(operator: Operator, kube: FakeCluster) -> None:
    """The operator writes the failure and cannot delete the cluster any more."""
    await operator.until_training()
    kube.kill_pod("copy-1-head")
    delete = kube.delete_cluster

    async def refuse(*_: str) -> None:
        raise gone()

    kube.delete_cluster = refuse  # type: ignore[method-assign]
    await operator.step()
    kube.delete_cluster = delete  # type: ignore[method-assign]
    assert kube.status()["lastFailure"]["attempt"] == 1
    assert list(kube.clusters) == ["copy-1"]
    kube.pods.clear()
    later(kube, 60)


@pytest.mark.parametrize("labelled", [True, False])
async def test_a_leftover_cluster_that_the_cache_lacks_is_deleted_before_the_next_attempt(
    operator: Operator, kube: FakeCluster, ray: FakeRay, labelled: bool
) -> None:
    await fail_without_delete(operator, kube)
    if not labelled:
        kube.clusters["copy-1"]["metadata"]["labels"] = {}
    operator.restart()
    operator.store.clusters.drop(("default", "copy-1"))
    await operator.step(told=False)  # FakeCluster raises when attempts overlap
    assert (kube.status()["attempt"], kube.clusters) == (1, {})
    for _ in range(3):
        await operator.step(told=False)
    assert (kube.status()["attempt"], list(kube.clusters)) == (2, ["copy-2"])


async def test_a_kept_cluster_that_the_cache_lacks_is_not_called_deleted(kube: FakeCluster, ray: FakeRay) -> None:
    kube.edit("copy", spec(ttlSecondsAfterFinished=3600))
    operator = Operator(kube, ray)
    await operator.until_training()
    ray.reports["copy-1"] = report(500, finished=FINISHED)
    ray.end("copy-1", "SUCCEEDED", 0)
    await operator.step()
    writes = kube.status_writes
    operator.restart()
    operator.store.clusters.drop(("default", "copy-1"))
    later(kube, 5)
    await operator.step(told=False)
    assert kube.condition("ClusterReady")["reason"] == "KeptAfterFinish"
    assert kube.status_writes == writes
    del kube.clusters["copy-1"]
    await operator.step()
    assert kube.condition("ClusterReady")["reason"] == "Deleted"
    before = kube.requests
    await operator.step()
    assert kube.requests == before


async def test_a_cluster_without_its_label_is_found_by_its_name(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    kube.clusters["copy-1"]["metadata"]["labels"] = {}
    kube._touch(kube.clusters["copy-1"])
    operator.restart()
    ray.reports["copy-1"] = report(10)
    later(kube, 20)
    await operator.step()
    assert (state(kube), kube.status()["step"]) == ("Running", 10)
    ray.end("copy-1", "FAILED", 73)
    await operator.step()
    later(kube, 5)  # how the rank's pod ended might still be told
    await operator.step()
    assert (kube.status()["lastFailure"]["reason"], kube.clusters) == ("DriverFailed", {})


async def test_a_name_that_was_taken_is_used_when_it_is_free(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.step()
    metadata = {"name": "copy-1", "namespace": "default", "uid": "theirs", "labels": {}}
    kube.clusters["copy-1"] = kube._new({"metadata": metadata, "spec": {}})
    await operator.reconciler.reconcile(KEY)
    await operator.reconciler.reconcile(KEY)
    assert kube.condition("ClusterReady")["reason"] == "NameTaken"
    del kube.clusters["copy-1"]
    await operator.step()
    assert kube.clusters["copy-1"]["metadata"]["uid"] == "uid-copy-1"


def test_pods_of_a_deleted_namesake_are_no_evidence() -> None:
    theirs = pod(job_uid=NEXT_UID, ended=True, ready=False, last_words="OLDJOB, exit code 1")
    before = training(pods=(pod("worker"),), departed=(theirs,), incomplete_since=at(0))
    _, conditions = outcome(before)
    assert conditions["ClusterReady"] == ("False", "HeadLost", "the head pod of copy-1 is gone")


def test_pods_of_a_deleted_namesake_are_none_of_the_attempts() -> None:
    theirs = pod("worker", name="copy-1-old", job_uid=NEXT_UID, ended=True, ready=False)
    before = training(pods=(*pods(), theirs))
    assert apply(outcome(before)[0], before).last_failure is None


async def test_a_namesakes_pods_that_are_reported_gone_late_do_not_explain_the_new_jobs_failure(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.until_training()
    del kube.jobs["copy"]
    kube.add_job(spec(), uid=NEXT_UID)
    del kube.clusters["copy-1"]
    old = copy.deepcopy(kube.pods_without_cluster_go())
    for _ in range(2):
        await operator.step()
    ended = [{"name": "trainer", "state": {"terminated": {"reason": "OLDJOB", "exitCode": 1}}}]
    for one in old:
        operator.store.take("pods", one | {"status": {"phase": "Failed", "containerStatuses": ended}}, deleted=True)
    kube.kuberay_makes_pods()
    await operator.step()
    kube.pods_get_ready()
    for _ in range(3):
        await operator.step()
    del kube.pods["copy-1-head"]
    for _ in range(3):
        await operator.step()
        later(kube, 5)
    message = kube.status()["lastFailure"]["message"]
    assert message.startswith("the head pod")
    assert "OLDJOB" not in message
