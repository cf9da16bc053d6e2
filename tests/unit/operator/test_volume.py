"""A job's attempts share one volume, and a claim is looked for before anything mounts it, whenever the job is edited."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.progress import CheckpointInfo
from rljob_operator.api import ApiError
from rljob_operator.decide import decide

from .builders import FINISHED, apply, cluster, failed, job, outcome, report, running, spec, stamp, training, world
from .fakes import FakeCluster, FakeRay, later
from .life import Operator, state

OTHER = {"claimName": "other"}


def claims(cluster: dict[str, Any]) -> list[str]:
    volumes = cluster["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]


@pytest.mark.parametrize(
    ("volume", "field", "values"),
    [
        (OTHER, "claimName", ("'other'", "'copy-checkpoints'")),
        ({"claimName": "copy-checkpoints", "subPath": "b"}, "subPath", ("'b'", "''")),
    ],
)
def test_another_volume_is_refused_while_an_attempt_runs_and_disturbs_nothing(
    volume: dict[str, str], field: str, values: tuple[str, str]
) -> None:
    plan, conditions = outcome(training(job=job(running(), spec(checkpoint__volume=volume))))
    status, reason, message = conditions["Validated"]
    assert (status, reason) == ("False", "VolumeChanged")
    assert message.startswith(f"spec.checkpoint.volume.{field}: is {values[0]}, but this job's attempts write to {values[1]}")
    assert conditions["Succeeded"][1] == "Running"
    assert plan.actions == ()


def test_another_volume_is_refused_between_attempts() -> None:
    status = {**failed(), "checkpointVolume": {"claimName": "copy-checkpoints", "subPath": ""}}
    plan, conditions = outcome(world(60, job=job(status, spec(checkpoint__volume=OTHER)), clusters=(), pods=()))
    assert conditions["Validated"][1] == "VolumeChanged"
    assert conditions["Succeeded"][1] == "Invalid"
    assert plan.actions == ()


def test_the_volume_may_be_chosen_until_a_cluster_uses_it_and_a_namesakes_does_not_count() -> None:
    free = world(0, {}, job=job(spec=spec(checkpoint__volume=OTHER)), clusters=(cluster(owner_uid="x"),), pods=())
    assert outcome(free)[1]["Validated"][1] == "Valid"


def test_a_finished_job_is_not_judged_again() -> None:
    status = {**running(), "finishTime": stamp(50)}
    edited = job(status, spec(checkpoint__volume=OTHER, ttlSecondsAfterFinished=100))
    assert decide(world(60, job=edited, clusters=(cluster(workers=0),))).actions == ()  # the edited time to keep it counts


def test_an_edit_of_a_finished_job_is_told_to_be_without_effect_once() -> None:
    status = {**running(), "finishTime": stamp(50), "observedGeneration": 1}
    before = world(60, job=job(status, spec(suspend=True), generation=2), clusters=(), pods=())
    plan = decide(before)
    assert [(one.type, one.reason) for one in plan.events] == [("Warning", "EditIgnored")]
    assert "delete the RLJob and create it again" in plan.events[0].message
    after = world(61, job=job(apply(plan, before).to_wire(), spec(suspend=True), generation=2), clusters=(), pods=())
    assert decide(after).events == ()


@pytest.mark.parametrize(
    ("mode", "nodes", "would_do"),
    [
        ("ReadWriteOncePod", 1, "ReadWriteOnce or ReadWriteMany would do"),
        ("ReadWriteOncePod", 2, "workers write to it; ReadWriteMany would do"),
        ("ReadWriteOnce", 2, "ReadWriteMany would do"),
    ],
)
def test_a_claim_of_another_mode_says_which_would_do_and_that_it_takes_another_claim(
    mode: str, nodes: int, would_do: str
) -> None:
    wanted = job(spec=spec(trainer__nodes=nodes, algorithm__grpo__microBatchSize=32))
    missing = world(0, job=wanted, clusters=(), pods=(), claim_exists=False)
    status = apply(decide(missing), missing).to_wire()
    refused = world(20, job=job(status, wanted.spec), clusters=(), pods=(), claim_modes=(mode,))
    conditions = outcome(refused)[1]
    assert conditions["Validated"][1] == "AccessModeInvalid"
    assert would_do in conditions["Validated"][2]
    assert "modes can't be edited: name another claim here, or delete this one" in conditions["Validated"][2]
    assert conditions["ClusterReady"][:2] == ("False", "NotCreated")  # and no longer that the claim is missing


async def test_the_next_attempt_starts_on_the_same_volume_or_not_at_all(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(60, checkpoint=CheckpointInfo(step=50, path="x"))
    await operator.step()
    kube.claims.add("other")
    kube.edit("copy", spec(checkpoint__volume=OTHER))
    await operator.step()
    assert kube.condition("Validated")["reason"] == "VolumeChanged"
    kube.kill_pod("copy-1-head")
    await operator.step()
    kube.pods_without_cluster_go()
    later(kube, 60)
    for _ in range(3):
        await operator.step()
    assert (kube.clusters, state(kube)) == ({}, "Invalid")
    kube.edit("copy", spec())
    for _ in range(3):
        await operator.step()
    assert claims(kube.clusters["copy-2"]) == ["copy-checkpoints"]
    assert kube.condition("Validated")["reason"] == "Valid"


async def test_a_new_job_of_the_same_name_chooses_its_own_volume(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(500, finished=FINISHED)
    ray.end("copy-1", "SUCCEEDED", 0)
    await operator.step()
    kube.pods_without_cluster_go()
    kube.claims.add("other")
    kube.add_job(spec(checkpoint__volume=OTHER), uid="22222222-2222-3333-4444-555555555555")
    for _ in range(3):
        await operator.step()
    assert claims(kube.clusters["copy-1"]) == ["other"]


# ---- Between the counted attempt and its cluster ----


async def test_a_claim_edited_before_the_cluster_is_made_is_waited_for(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.count()
    kube.edit("copy", spec(checkpoint__volume={"claimName": "late"}))
    for _ in range(3):
        later(kube, 900)
        assert await operator.step() == 15
    assert (kube.clusters, state(kube)) == ({}, "Pending")
    assert kube.condition("ClusterReady")["reason"] == "VolumeMissing"
    assert "late does not exist" in kube.condition("ClusterReady")["message"]
    kube.claims.add("late")
    await operator.step()
    assert claims(kube.clusters["copy-1"]) == ["late"]


async def test_a_spec_made_invalid_before_the_cluster_is_made_says_so_and_recovers(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await operator.count()
    kube.edit("copy", spec(generation__parallelism={"tensor": 2}))
    await operator.step()
    assert (kube.clusters, state(kube)) == ({}, "Invalid")
    assert kube.condition("Validated")["reason"] == "GenerationLayoutMismatch"
    later(kube, 7200)
    kube.edit("copy", spec())
    await operator.step()
    kube.kuberay_makes_pods()
    await operator.step()
    assert (list(kube.clusters), state(kube)) == (["copy-1"], "Provisioning")


async def test_an_edit_that_comes_while_the_attempt_is_counted_is_looked_at_before_anything_is_made(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    event = kube.create_event

    async def edited_right_after(*args: Any) -> None:
        kube.edit("copy", spec(checkpoint__volume={"claimName": "late"}))
        kube.tell(operator.store)
        kube.create_event = event  # type: ignore[method-assign]
        await event(*args)

    kube.create_event = edited_right_after  # type: ignore[method-assign]
    assert await operator.step() == 0
    assert (kube.status()["attempt"], kube.clusters, kube.secrets) == (1, {}, {})
    await operator.step()
    assert kube.condition("ClusterReady")["reason"] == "VolumeMissing"


async def test_the_volume_of_a_cluster_that_was_never_made_may_be_changed(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    kube.refuse_create = ApiError(403, "Forbidden", "exceeded quota", "POST")
    await operator.step()
    assert kube.status()["checkpointVolume"]["claimName"] == "copy-checkpoints"
    kube.claims.add("other")
    kube.edit("copy", spec(checkpoint__volume=OTHER))
    kube.refuse_create = None
    await operator.step()
    assert claims(kube.clusters["copy-1"]) == ["other"]
    assert kube.status()["checkpointVolume"]["claimName"] == "other"
