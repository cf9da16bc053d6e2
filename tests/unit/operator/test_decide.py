"""What the operator does at each moment: stages, actions, conditions."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api import supported
from rljob_operator.decide import decide
from rljob_operator.plan import CreateCluster, DeleteCluster, DropSecret, PersistAttempt, Plan, ReleaseWorkers
from rljob_operator.world import Driver, Refusal, Unreachable

from .builders import (
    FINISHED,
    UID,
    apply,
    at,
    cluster,
    fresh,
    job,
    kinds,
    outcome,
    pod,
    report,
    running,
    spec,
    stamp,
    training,
    world,
)

# ---- Before the first attempt ----


def test_an_attempt_is_counted_before_anything_of_it_exists() -> None:
    before = fresh()
    plan, conditions = outcome(before)
    assert kinds(plan) == [PersistAttempt]
    status = apply(plan, before)
    assert (status.attempt, status.attempt_start_time, status.ray_cluster_name) == (1, stamp(0), None)
    assert status.total_steps == 500
    assert conditions["Validated"][:2] == ("True", "Valid")
    assert conditions["Succeeded"][:2] == ("Unknown", "Provisioning")


def test_an_invalid_spec_makes_no_child_and_names_both_values() -> None:
    plan, conditions = outcome(fresh(spec(generation__parallelism={"tensor": 2})))
    assert plan.actions == ()
    assert plan.requeue_after is None
    status, reason, message = conditions["Validated"]
    assert (status, reason) == ("False", "GenerationLayoutMismatch")
    assert "spec.generation.parallelism.tensor: 2" in message
    assert "spec.parallelism.tensor 1" in message
    assert conditions["Succeeded"][:2] == ("Unknown", "Invalid")
    assert [(event.type, event.reason) for event in plan.events] == [("Warning", "GenerationLayoutMismatch")]


def test_a_corrected_spec_starts() -> None:
    before = fresh(spec(generation__parallelism={"tensor": 2}))
    status = apply(decide(before), before).to_wire()
    plan, conditions = outcome(fresh(status=status))
    assert kinds(plan) == [PersistAttempt]
    assert conditions["Validated"][:2] == ("True", "Valid")


def test_an_unreadable_spec_is_named_by_field() -> None:
    broken = spec()
    del broken["trainer"]
    _, conditions = outcome(fresh(broken))
    assert conditions["Validated"] == ("False", "SpecUnreadable", "spec.trainer: is required")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"spec": []}, "spec.trainer.template.spec: must be a mapping; found []"),
        ({"spec": {"containers": {}}}, "spec.trainer.template.spec.containers: must be a list; found {}"),
        ({"spec": {"volumes": "x"}}, "spec.trainer.template.spec.volumes: must be a list; found 'x'"),
        ({"spec": {"volumes": ["x"]}}, "spec.trainer.template.spec.volumes[0]: must be a mapping; found 'x'"),
    ],
)
def test_a_template_without_a_pods_shape_is_a_finding(template: Any, message: str) -> None:
    plan, conditions = outcome(fresh(spec(trainer__template=template)))
    assert conditions["Validated"] == ("False", "SpecUnreadable", message)
    assert plan.actions == ()


def test_a_missing_claim_is_waited_for() -> None:
    plan, conditions = outcome(fresh(claim_exists=False))
    assert plan.actions == ()
    assert plan.requeue_after == 15
    assert conditions["ClusterReady"][:2] == ("False", "VolumeMissing")
    assert "copy-checkpoints does not exist in namespace default" in conditions["ClusterReady"][2]
    assert conditions["Succeeded"][:2] == ("Unknown", "Pending")


@pytest.mark.parametrize(
    ("modes", "nodes", "words"),
    [
        (("ReadWriteOncePod",), 1, "copy-checkpoints allows ReadWriteOncePod, and head and workers write to it"),
        (("ReadOnlyMany",), 1, "copy-checkpoints allows ReadOnlyMany"),
        (("ReadWriteOnce",), 2, "copy-checkpoints is ReadWriteOnce, and trainer.nodes 2 pods on as many nodes write to it"),
    ],
)
def test_a_claim_that_the_pods_cannot_share_is_refused_and_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...], nodes: int, words: str
) -> None:
    monkeypatch.setitem(supported.PARTLY, "spec.trainer.nodes", supported.Partly(lambda _: True, "any"))
    wanted = spec(trainer__nodes=nodes, algorithm__grpo__microBatchSize=32)
    plan, conditions = outcome(fresh(wanted, claim_modes=modes))
    assert conditions["Validated"][:2] == ("False", "AccessModeInvalid")
    assert words in conditions["Validated"][2]
    assert plan.actions == ()
    assert plan.requeue_after == 15


@pytest.mark.parametrize("modes", [("ReadWriteOnce",), ("ReadWriteMany",), ("ReadWriteOncePod", "ReadWriteMany")])
def test_a_claim_that_the_pods_can_share_is_taken(modes: tuple[str, ...]) -> None:
    plan, conditions = outcome(fresh(claim_modes=modes))
    assert conditions["Validated"][0] == "True"
    assert plan.actions


def test_a_missing_kuberay_is_waited_for() -> None:
    plan, conditions = outcome(fresh(kuberay_present=False))
    assert plan.actions == ()
    assert conditions["ClusterReady"][1] == "KubeRayMissing"
    assert conditions["Succeeded"][2] == "KubeRay is not installed"


@pytest.mark.parametrize(
    "left", [{"pods": (pod(job_uid="earlier"),)}, {"clusters": (cluster(owner_uid="earlier"),)}], ids=["pods", "cluster"]
)
def test_what_a_deleted_namesake_left_is_waited_for(left: dict[str, Any]) -> None:
    plan, conditions = outcome(fresh(**left))
    assert plan.actions == ()
    assert conditions["ClusterReady"][1] == "NameTaken"


@pytest.mark.parametrize(("owner", "told"), [("earlier", False), ("", True)])
def test_a_cluster_that_nobody_will_end_is_told_of_with_what_ends_it(owner: str, told: bool) -> None:
    """`kubectl delete rlj --cascade=orphan`: its RayCluster trains on, and a job of the same name would wait for ever."""
    plan, conditions = outcome(fresh(clusters=(cluster(owner_uid=owner),)))
    assert plan.actions == ()
    assert ("kubectl delete raycluster" in conditions["ClusterReady"][2]) is told
    assert ("kubectl delete raycluster" in conditions["Succeeded"][2]) is told


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    deleting = job()
    object.__setattr__(deleting, "deleting", True)
    assert decide(world(job=deleting)) == Plan()


# ---- The cluster ----


def test_a_counted_attempt_gets_its_cluster() -> None:
    plan, _ = outcome(fresh(status={"attempt": 1, "attemptStartTime": stamp(0)}))
    (create,) = plan.actions
    assert isinstance(create, CreateCluster)
    metadata = create.manifest["metadata"]
    assert metadata["name"] == "copy-1"
    assert [owner["uid"] for owner in metadata["ownerReferences"]] == [UID]


def test_a_cluster_that_was_deleted_is_a_failed_attempt_and_not_made_again() -> None:
    plan, conditions = outcome(world(clusters=(), pods=()))
    assert plan.actions == (DropSecret("copy-1"),)
    assert conditions["ClusterReady"][1] == "HeadLost"
    assert conditions["Succeeded"][1] == "Restarting"


def test_a_cluster_name_of_somebody_else_is_waited_for_until_the_deadline() -> None:
    status = {"attempt": 1, "attemptStartTime": stamp(0)}
    plan, conditions = outcome(fresh(status=status, stranger="RLJob copy (uid 9)"))
    assert plan.actions == ()
    assert conditions["ClusterReady"][1] == "NameTaken"
    late = world(700, status, clusters=(), pods=(), stranger="RLJob copy (uid 9)")
    assert apply(decide(late), late).last_failure.reason == "ProvisioningDeadlineExceeded"  # type: ignore[union-attr]


def test_a_refused_cluster_is_tried_again_when_that_may_help() -> None:
    status = {"attempt": 1, "attemptStartTime": stamp(0)}
    plan, conditions = outcome(fresh(status=status, refusal=Refusal("403 Forbidden: exceeded quota", final=False)))
    assert kinds(plan) == [CreateCluster]
    assert conditions["ClusterReady"] == (
        "False",
        "ClusterRejected",
        "RayCluster copy-1 is refused: 403 Forbidden: exceeded quota",
    )


def test_a_cluster_that_can_never_be_accepted_fails_the_job() -> None:
    status = {"attempt": 1, "attemptStartTime": stamp(0)}
    plan, conditions = outcome(fresh(status=status, refusal=Refusal("422 Invalid: no such field", final=True)))
    assert plan.actions == (DropSecret("copy-1"),)
    assert conditions["Succeeded"][:2] == ("False", "ClusterRejected")
    words = "RayCluster copy-1 is refused: 422 Invalid: no such field"
    assert conditions["ClusterReady"] == ("False", "ClusterRejected", words)


def test_a_cluster_that_kuberay_refuses_fails_the_job_with_its_words() -> None:
    refused = cluster(provisioned=None, observed=False)
    _, conditions = outcome(world(clusters=(refused,), pods=(), warning="InvalidRayClusterSpec: nonsense"))
    assert conditions["Succeeded"][:2] == ("False", "ClusterRejected")
    assert "InvalidRayClusterSpec: nonsense" in conditions["Succeeded"][2]


def test_starting_pods_quote_the_kubelets_words() -> None:
    waiting = pod(ready=False, trouble="ImagePullBackOff: no such image")
    plan, conditions = outcome(world(clusters=(cluster(provisioned=None),), pods=(waiting, pod("worker"))))
    assert plan.actions == ()
    message = "1 of 2 pods are ready; copy-1-head: ImagePullBackOff: no such image"
    assert conditions["ClusterReady"] == ("False", "PodsPending", message)
    assert conditions["Succeeded"][1] == "Provisioning"


def test_a_pod_that_ended_before_all_were_ready_is_quoted() -> None:
    ended = pod("worker", ready=False, ended=True, last_words="Error, exit code 1: no such module")
    _, conditions = outcome(world(clusters=(cluster(provisioned=None),), pods=(pod(), pod("worker", ended=True))))
    assert conditions["ClusterReady"][2] == "1 of 2 pods are ready"  # the kubelet may be late to call it not ready
    _, conditions = outcome(world(clusters=(cluster(provisioned=None),), pods=(pod(), ended)))
    assert conditions["ClusterReady"][2] == "1 of 2 pods are ready; copy-1-worker: Error, exit code 1: no such module"


def test_a_status_whose_times_were_taken_out_is_read_all_the_same() -> None:
    plan = decide(fresh(status={"attempt": 1}, refusal=Refusal("403 Forbidden: exceeded quota", final=False)))
    assert kinds(plan) == [CreateCluster]


def test_pods_that_never_get_ready_fail_the_attempt_with_the_kubelets_words() -> None:
    waiting = pod(ready=False, trouble="ErrImageNeverPull: x")
    before = world(601, clusters=(cluster(provisioned=None),), pods=(waiting,))
    plan, conditions = outcome(before)
    failure = apply(plan, before).last_failure
    assert failure is not None
    assert failure.reason == "ProvisioningDeadlineExceeded"
    assert "600 s (provisioningSeconds); copy-1-head: ErrImageNeverPull: x" in failure.message
    assert kinds(plan) == [DeleteCluster]
    assert conditions["Restarting"][:2] == ("True", "WaitingForPodsToExit")


# ---- The end ----


def test_success_keeps_the_last_report_and_lets_the_cluster_go() -> None:
    told = report(350, phase="Finished", validation_step=350, validation_reward=0.96, finished=FINISHED)
    before = training(driver=Driver("SUCCEEDED", 0), report=told)
    plan, conditions = outcome(before)
    assert plan.actions == (DeleteCluster("copy-1", "cluster-1"),)
    assert conditions["Succeeded"][:2] == ("True", "TargetReached")
    message = "validation reward 0.960 reached stopAtReward 0.95; step 350 of 500, 0 of 2800 prompts skipped"
    assert conditions["Succeeded"][2] == message
    assert conditions["ClusterReady"][1] == "Deleted"
    after = apply(plan, before)
    assert after.finish_time == after.attempt_end_time == stamp(60)
    assert conditions["DriverRunning"] == ("False", "Exited", "copy-1 ended with exit code 0")
    status = apply(plan, before)
    assert (status.step, status.finish_time) == (350, stamp(60))


def test_success_without_a_last_report_says_that_it_is_missing() -> None:
    status = running(step=500, lastStepTime=stamp(50))
    _, conditions = outcome(training(job=job(status), driver=Driver("SUCCEEDED", 0), report=None))
    assert conditions["Succeeded"][:2] == ("True", "Completed")
    assert "last report was not received" in conditions["Succeeded"][2]


def test_success_counts_even_when_pods_are_already_gone() -> None:
    _, conditions = outcome(training(driver=Driver("SUCCEEDED", 0), pods=(pod(),), report=report(500, finished=FINISHED)))
    assert conditions["Succeeded"][0] == "True"


def test_a_cluster_is_kept_for_its_ttl_and_then_deleted() -> None:
    keep = job(running(), spec(ttlSecondsAfterFinished=100))
    before = training(job=keep, driver=Driver("SUCCEEDED", 0), report=report(500, finished=FINISHED))
    plan, conditions = outcome(before)
    assert plan.actions == (ReleaseWorkers("copy-1", "cluster-1"),)  # the head alone has logs and a dashboard
    words = f"the job has ended; its head is kept until {stamp(160)} (ttlSecondsAfterFinished)"
    assert conditions["ClusterReady"] == ("False", "KeptAfterFinish", words)
    assert plan.requeue_after == pytest.approx(100.1)
    status = apply(plan, before).to_wire()
    finished = job(status, spec(ttlSecondsAfterFinished=100))
    released = (cluster(workers=0),)
    assert decide(world(159, job=finished, clusters=released)).actions == ()
    plan, conditions = outcome(world(161, job=finished, clusters=released))
    assert kinds(plan) == [DeleteCluster]
    assert conditions["ClusterReady"][1] == "Deleted"
    assert conditions["Succeeded"][1] == "TargetReached"


def test_a_finished_job_at_rest_needs_nothing() -> None:
    before = training(driver=Driver("SUCCEEDED", 0), report=report(500, finished=FINISHED))
    status = apply(decide(before), before).to_wire()
    plan = decide(world(9999, job=job(status), clusters=(), pods=()))
    assert plan == Plan()


# ---- Writing ----


def test_numbers_alone_are_written_at_most_every_status_period() -> None:
    first = training(60)
    status = apply(decide(first), first).to_wire()
    soon = training(66, step=9, job=job(status), written=at(60))
    plan = decide(soon)
    assert plan.status_patch is None
    assert plan.requeue_after == 2
    later = training(75, step=12, job=job(status), written=at(60))
    patch = decide(later).status_patch
    assert patch is not None
    assert patch["step"] == 12


def test_a_flipped_condition_is_written_at_once() -> None:
    first = training(60)
    status = apply(decide(first), first).to_wire()
    plan = decide(training(61, step=6, job=job(status), written=at(60), driver=Unreachable("gone")))
    assert plan.status_patch is not None


def test_nothing_new_writes_nothing() -> None:
    first = training(60)
    status = apply(decide(first), first).to_wire()
    assert decide(training(90, job=job(status), written=at(60))).status_patch is None


def test_transition_times_move_only_with_the_status() -> None:
    first = training(60)
    status = apply(decide(first), first).to_wire()
    after = training(90, job=job(status), driver=Unreachable("x"), report=report(9))
    times = {one.type: one.last_transition_time for one in apply(decide(after), after).conditions}
    assert times["DriverRunning"] == stamp(90)
    assert times["Progressing"] == stamp(60)


def test_a_field_that_another_version_wrote_is_dropped_not_fatal() -> None:
    before = training(job=job({**running(), "moonPhase": 3}))
    assert (decide(before).status_patch or {})["moonPhase"] is None


def test_a_server_whose_port_is_taken_is_refused_by_its_own_reason() -> None:
    bad = job(spec=spec(generation__server={"enabled": True, "port": 8265}))
    plan, conditions = outcome(world(status={}, job=bad, clusters=(), pods=()))
    assert conditions["Validated"][:2] == ("False", "ServerInvalid")
    assert "spec.generation.server.port: 8265" in conditions["Validated"][2]
    assert plan.actions == ()
