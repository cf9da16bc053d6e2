"""Whole lives of a job: the reconciler against a fake API server, KubeRay and Ray."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.progress import CheckpointInfo
from rljob_operator.api import ApiError

from .builders import FINISHED, found, report, spec, stamp
from .fakes import FakeCluster, FakeRay, later
from .life import KEY, Operator, state


async def test_a_job_goes_from_nothing_to_succeeded(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    assert ray.submitted == ["copy-1"]
    ray.reports["copy-1"] = report(10)
    later(kube, 20)
    await operator.step()
    assert (state(kube), kube.status()["step"]) == ("Running", 10)
    ray.reports["copy-1"] = report(350, phase="Finished", finished=FINISHED, validation_step=350, validation_reward=0.97)
    await operator.step()
    ray.end("copy-1", "SUCCEEDED", 0)
    ray.reports.clear()
    await operator.step()
    assert (state(kube), kube.status()["step"], kube.clusters) == ("TargetReached", 350, {})
    assert kube.status()["validation"] == {"step": 350, "reward": "0.9700"}
    assert [event["reason"] for event in kube.events] == ["AttemptStarted", "DriverSubmitted", "TargetReached"]


async def test_a_job_has_its_cluster_after_one_pass_and_eight_requests(kube: FakeCluster, ray: FakeRay) -> None:
    """Three to look, the status, an event, what guards the pods (two), the cluster: with many jobs the server is the limit."""
    operator = Operator(kube, ray)
    assert await operator.step() == 1
    assert (list(kube.clusters), kube.status()["attempt"], kube.status_writes, kube.requests) == (["copy-1"], 1, 1, 8)


async def test_a_job_deleted_while_its_attempt_is_counted_gets_no_cluster(kube: FakeCluster, ray: FakeRay) -> None:
    operator = Operator(kube, ray)
    event = kube.create_event

    async def deleted_right_after(*args: Any) -> None:
        kube.jobs["copy"]["metadata"] |= {"deletionTimestamp": stamp(1), "generation": 2, "resourceVersion": "99"}
        kube.tell(operator.store)
        await event(*args)

    kube.create_event = deleted_right_after  # type: ignore[method-assign]
    await operator.step()
    assert (await operator.step(), kube.clusters, kube.secrets) == (None, {}, {})


async def test_a_finished_job_costs_no_request(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(500, finished=FINISHED)
    ray.end("copy-1", "SUCCEEDED", 0)
    await operator.step()
    kube.pods_without_cluster_go()
    await operator.step()
    before = kube.requests
    assert await operator.step() is None
    assert kube.requests == before


async def test_a_finished_run_keeps_its_head_for_a_while_and_no_worker(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    kube.edit("copy", spec(ttlSecondsAfterFinished=600))
    await operator.until_training()
    ray.reports["copy-1"] = report(500, finished=FINISHED)
    ray.end("copy-1", "SUCCEEDED", 0)
    again = await operator.step()
    assert (list(kube.pods), state(kube)) == (["copy-1-head"], "TargetReached")
    assert again is not None
    later(kube, again - 1)
    await operator.step()
    assert list(kube.clusters) == ["copy-1"]
    later(kube, 1)
    await operator.step()
    assert (kube.clusters, kube.secrets, kube.condition("ClusterReady")["reason"]) == ({}, {}, "Deleted")


async def test_an_invalid_job_costs_no_request_after_its_status(kube: FakeCluster, ray: FakeRay) -> None:
    kube.edit("copy", spec(generation__parallelism={"tensor": 2}))
    operator = Operator(kube, ray)
    await operator.step()
    await operator.step()
    before = kube.requests
    assert await operator.step() is None
    assert (kube.requests, kube.clusters) == (before, {})
    kube.edit("copy", spec())
    await operator.step()
    await operator.step()
    assert list(kube.clusters) == ["copy-1"]


async def test_a_missed_last_report_is_read_from_the_log(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    ray.end("copy-1", "SUCCEEDED", 0)
    ray.logged["copy-1"] = report(350, finished=FINISHED)
    await operator.step()
    assert (state(kube), kube.status()["step"]) == ("TargetReached", 350)


async def test_a_report_of_another_attempt_is_passed_over(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(99, attempt=7)
    later(kube, 30)
    await operator.step()
    assert kube.status()["step"] == 0


async def test_an_answer_that_was_lost_does_not_submit_twice(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    ray.swallow_answers = 1
    await operator.until_training()
    await operator.step()
    assert ray.submitted == ["copy-1"]
    assert kube.condition("DriverRunning")["reason"] == "Running"


async def test_a_busy_ray_is_asked_again_and_shown(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    ray.busy = 4
    await operator.until_training()
    assert "No available agent" in kube.condition("DriverRunning")["message"]
    for _ in range(4):
        await operator.step()
    assert ray.submitted == ["copy-1"]


async def test_a_dead_dashboard_does_not_hide_the_drivers_own_report(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    """Minutes of it, past every deadline between two steps; a restarted operator hears the driver too."""
    await operator.until_training()
    ray.dashboard = False
    for step in range(10, 310, 10):
        ray.reports["copy-1"] = report(step)
        later(kube, 30)
        await operator.step()
        if step == 150:
            operator.restart()
        assert (state(kube), kube.status()["step"], kube.status()["attempt"]) == ("Running", step, 1)
        assert kube.condition("DriverRunning")["reason"] == "Unreachable"
    ray.dashboard = True
    await operator.step()
    assert kube.condition("DriverRunning")["reason"] == "Running"

    ray.dashboard = False  # and a driver that stands still is overdue, whoever else is silent
    later(kube, 301)
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "StallDeadlineExceeded"


async def test_an_operator_that_restarts_finds_the_attempt_again(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(10)
    await operator.step()
    for _ in range(3):
        operator.restart()
        await operator.step()
    assert (ray.submitted, kube.status()["attempt"], state(kube)) == (["copy-1"], 1, "Running")


async def test_a_stale_cache_starts_nothing(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.step()
    stale = Operator(kube, ray)
    stale.store.jobs.drop(KEY)
    old = dict(kube.jobs["copy"], status={})
    old["metadata"] = {**kube.jobs["copy"]["metadata"], "resourceVersion": "1"}
    stale.store.take("rljobs", old)
    await stale.step(told=False)
    assert kube.status()["attempt"] == 1


async def test_a_lost_worker_restarts_after_all_pods_are_gone(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(60, checkpoint=CheckpointInfo(step=50, path="x"))
    await operator.step()
    kube.kill_pod("copy-1-workers-worker")
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "OutOfMemory"
    assert kube.condition("ClusterReady")["reason"] == "WorkerLost"
    assert "OOMKilled, exit code 137" in kube.status()["lastFailure"]["message"]
    later(kube, 60)
    await operator.step()
    assert kube.condition("Restarting")["reason"] == "WaitingForPodsToExit"
    assert kube.status()["attempt"] == 1
    kube.pods_without_cluster_go()
    await operator.until_training()
    assert (ray.submitted, kube.status()["attempt"], kube.status()["restarts"]) == (["copy-1", "copy-2"], 2, 1)


async def test_the_last_words_of_a_pod_that_the_watch_saw_die_are_kept(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.until_training()
    kube.kill_pod("copy-1-head")
    head = kube.pods.pop("copy-1-head")
    operator.store.take("pods", head, deleted=True)
    await operator.step()
    assert "the head pod copy-1-head is gone: OOMKilled, exit code 137" in kube.status()["lastFailure"]["message"]


async def test_kuberays_event_is_the_evidence_after_a_restart(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    del kube.pods["copy-1-head"]
    words = "Deleted head Pod default/copy-1-head; ContainerStateTerminated{ExitCode:137}"
    kube.kube_events = [
        {"type": "Warning", "reason": "Old", "message": "old", "lastTimestamp": stamp(0)},
        {"type": "Normal", "reason": "DeletedHeadPod", "message": words, "lastTimestamp": stamp(9)},
        {"type": "Normal", "reason": "CreatedService", "message": "no trouble", "lastTimestamp": stamp(10)},
    ]
    later(kube, 5)
    operator.restart()
    await operator.step()
    assert "DeletedHeadPod" in kube.status()["lastFailure"]["message"]
    assert "ExitCode:137" in kube.status()["lastFailure"]["message"]


async def test_a_refused_cluster_shows_and_recovers(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    kube.refuse_create = ApiError(403, "Forbidden", "exceeded quota: pods", "POST")
    for _ in range(3):
        await operator.step()
    assert kube.condition("ClusterReady")["reason"] == "ClusterRejected"
    assert "exceeded quota: pods" in kube.condition("ClusterReady")["message"]
    kube.refuse_create = None
    await operator.step()
    assert list(kube.clusters) == ["copy-1"]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_server_that_cannot_answer_refuses_nothing(
    operator: Operator, kube: FakeCluster, ray: FakeRay, status: int
) -> None:
    kube.refuse_create = ApiError(status, "Busy", "try again", "POST")
    for _ in range(3):
        await operator.step()
    assert kube.condition("ClusterReady")["reason"] == "NotCreated"
    kube.refuse_create = None
    await operator.step()
    assert list(kube.clusters) == ["copy-1"]


async def test_nothing_is_made_for_a_job_that_was_deleted_unseen(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    kube.refuse_create = ApiError(403, "Forbidden", "exceeded quota: pods", "POST")
    for _ in range(3):
        await operator.step()
    del kube.jobs["copy"]
    kube.refuse_create = None
    assert await operator.step(told=False) == 0
    assert (await operator.step(told=False), kube.clusters) == (None, {})


async def test_somebody_elses_cluster_of_that_name_is_not_touched(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.step()
    metadata = {"name": "copy-1", "namespace": "default", "uid": "theirs", "labels": {}}
    kube.clusters["copy-1"] = kube._new({"metadata": metadata, "spec": {}})
    for _ in range(3):
        await operator.reconciler.reconcile(KEY)
    assert kube.condition("ClusterReady")["reason"] == "NameTaken"
    assert kube.clusters["copy-1"]["metadata"]["uid"] == "theirs"


async def test_a_conflicting_edit_cancels_the_pass_and_nothing_is_started(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    kube.edit("copy", spec(generation__parallelism={"tensor": 2}))
    await operator.step(told=False)
    assert "attempt" not in kube.status() or kube.status()["attempt"] == 0
    await operator.step(told=False)
    assert kube.condition("Validated")["reason"] == "GenerationLayoutMismatch"


async def test_a_life_with_preflights_resumes_from_what_they_found(kube: FakeCluster, ray: FakeRay) -> None:
    operator = Operator(kube, ray, preflight=True)
    for _ in range(3):
        await operator.step()
    assert (list(kube.pods), kube.clusters) == (["copy-1-preflight"], {})
    for told, blocked in ((found("Corrupt"), True), (found("Fresh"), False)):
        kube.preflights_end(told)
        operator.restart()  # nothing is lost with the process: the pod has the report
        await operator.step()
        assert (state(kube) == "Blocked") == blocked
        for _ in range(3):
            later(kube, 60)
            await operator.step()
    assert list(kube.clusters) == ["copy-1"]
    kube.kuberay_makes_pods()
    kube.pods_get_ready()
    operator.restart()
    for _ in range(4):
        await operator.step()
    assert sorted(kube.pods) == ["copy-1-head", "copy-1-workers-worker"]
    assert (ray.submitted, kube.status()["attempt"]) == (["copy-1"], 1)
    ray.reports["copy-1"] = report(110, checkpoint=CheckpointInfo(step=100, path="runs/default/copy/step-000100-t000001"))
    await operator.step()
    kube.drain_pod("copy-1-workers-worker")
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "Drained"
    kube.pods_without_cluster_go()
    later(kube, 60)
    for _ in range(3):
        await operator.step()
    kube.preflights_end(found())
    await operator.step()
    assert (kube.status()["resume"]["fromStep"], kube.status()["restarts"]) == (100, 0)
    reasons = [event["reason"] for event in kube.events]
    assert [one for one in reasons if one != "DriverSubmitted"] == [
        "AttemptStarted",
        "Corrupt",
        "StartsFromScratch",
        "AttemptFailed",
        "AttemptStarted",
        "Resumes",
    ]


async def test_a_job_that_vanished_ends_the_work(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    del kube.jobs["copy"]
    assert await operator.reconciler.reconcile(KEY) == 0.0
    assert await operator.reconciler.reconcile(KEY) is None
