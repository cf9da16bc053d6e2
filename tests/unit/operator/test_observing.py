"""What a pass asks for, and what it makes of the answers: events in place of silence, and no request for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from .builders import report, spec, stamp
from .fakes import FakeCluster, FakeRay, later
from .life import Operator, state


def event(seconds: float, reason: str, message: str, type_: str = "Warning") -> dict[str, Any]:
    return {"type": type_, "reason": reason, "message": message, "lastTimestamp": stamp(seconds)}


async def test_why_a_preflight_does_not_start_is_told_by_its_events(kube: FakeCluster, ray: FakeRay) -> None:
    """A volume that can't be mounted: the pod itself says nothing at all."""
    operator = Operator(kube, ray, preflight=True)
    for _ in range(3):
        await operator.step()
    kube.kube_events = [
        event(5, "FailedMount", "timed out"),
        event(9, "FailedAttachVolume", "the volume is\nattached to another node"),
        event(11, "Pulled", "no trouble", "Normal"),
    ]
    later(kube, 5)
    await operator.step()
    later(kube, 4)
    await operator.step()
    alone = "pod copy-1-preflight looks at the volume"  # a pod that is only seconds old is not asked about
    assert kube.condition("CheckpointAvailable")["message"] == alone
    later(kube, 10)
    await operator.step()
    later(kube, 20)
    await operator.step()
    words = f"{alone}; FailedAttachVolume: the volume is attached to another node"
    assert kube.condition("CheckpointAvailable")["message"] == words


@pytest.mark.parametrize("first", [True, False])
async def test_the_newest_event_of_an_unbound_claim_decides(kube: FakeCluster, ray: FakeRay, first: bool) -> None:
    operator = Operator(kube, ray, preflight=True)
    kube.claims_bound = False
    waits = event(20 if first else 1, "WaitForFirstConsumer", "waiting for first consumer", "Normal")
    kube.kube_events = [event(10, "ProvisioningFailed", "exceeded quota"), waits]
    kube.preflight = not first  # the first pod binds it: one of the run's own
    await operator.step()
    await operator.step()
    if first:
        assert list(kube.clusters) == ["copy-1"]
        return
    assert (kube.clusters, kube.pods, state(kube)) == ({}, {}, "Pending")
    assert "has no volume yet: ProvisioningFailed: exceeded quota" in kube.condition("ClusterReady")["message"]
    kube.claims_bound = True
    await operator.step()
    assert kube.status()["attempt"] == 1


async def test_a_pod_that_can_not_answer_its_probe_yet_is_no_trouble_until_it_should(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.step()
    kube.kuberay_makes_pods()
    refused = event(5, "Unhealthy", "Readiness probe failed: connection refused")
    kube.kube_events = [refused | {"involvedObject": {"uid": "copy-1-head"}}]
    later(kube, 20)
    await operator.step()
    assert kube.condition("ClusterReady")["message"] == "0 of 2 pods are ready"
    later(kube, 60)
    await operator.step()
    assert "connection refused" in kube.condition("ClusterReady")["message"]


async def test_kuberay_is_looked_for_until_it_is_there(kube: FakeCluster, ray: FakeRay) -> None:
    kube.kuberay = False
    operator = Operator(kube, ray)
    assert await operator.step() == 15
    assert (kube.condition("ClusterReady")["reason"], kube.clusters, operator.appeared) == ("KubeRayMissing", {}, 0)
    kube.kuberay = True
    await operator.step()
    assert (list(kube.clusters), operator.appeared) == (["copy-1"], 1)


async def test_an_invalid_job_is_not_looked_around_for(kube: FakeCluster, ray: FakeRay) -> None:
    kube.edit("copy", spec(generation__parallelism={"tensor": 2}))
    operator = Operator(kube, ray)
    await operator.step()
    assert kube.requests == 2  # its status, and the event that says why


async def test_a_pass_over_a_job_that_trains_asks_the_api_server_for_nothing(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(10)
    later(kube, 20)
    await operator.step()
    before, logs = kube.requests, ray.logs_read
    for step in range(11, 16):
        ray.reports["copy-1"] = report(step)
        later(kube, 2)
        await operator.step()
    assert (kube.requests, ray.logs_read) == (before, logs)
    later(kube, 15)
    await operator.step()
    assert kube.requests == before + 1  # the numbers


async def test_a_write_that_met_another_version_is_decided_anew_at_once(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(10)
    later(kube, 20)
    kube.edit("copy", spec(prompts={"maxSkipped": 3}))
    assert await operator.step(told=False) == 0
    await operator.step(told=False)
    assert kube.status()["observedGeneration"] == 2
