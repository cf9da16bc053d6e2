"""`spec.suspend`: a save, then no pods, then rest; resuming is a new attempt and no restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.progress import CheckpointInfo
from rljob_operator.decide import decide
from rljob_operator.plan import AskSave, DeleteCluster, DeletePod, PersistAttempt
from rljob_operator.world import Driver, SaveAnswer, Unreachable, World

from .builders import (
    FINISHED,
    apply,
    before_cluster,
    failed,
    fresh,
    job,
    kinds,
    outcome,
    pod,
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

WANTED = spec(suspend=True)
SAVED = SaveAnswer(accepted=True, saved=True, step=5)
OF_STEP_5 = CheckpointInfo(step=5, path="runs/default/copy/step-000005-t000001")


def suspending(seconds: float = 60, since: float = 60, **changes: Any) -> World:
    """A moment of a job that trains, as its status says, and is to be suspended."""
    status = {**said_by(training()), "suspendTime": stamp(since)}
    return training(seconds, **{"job": job(status, WANTED), **changes})


def said_by(moment: World) -> dict[str, Any]:
    """The status after that moment's pass."""
    return apply(decide(moment), moment).to_wire()


def test_the_driver_is_asked_for_a_save_first() -> None:
    before = training(job=job(running(), WANTED))
    plan, conditions = outcome(before)
    assert plan.actions == (AskSave("copy-1", 2.0),)
    assert apply(plan, before).suspend_time == stamp(60)
    assert conditions["Suspended"][:2] == ("False", "Suspending")
    assert conditions["Succeeded"][1] == "Suspended"
    # What trains on until it has saved is still told.
    assert [conditions[one][0] for one in ("ClusterReady", "DriverRunning", "Progressing")] == ["True"] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"save": SAVED},
        {"save": SaveAnswer(accepted=False, saved=False)},
        {"save": SaveAnswer(accepted=True, saved=False, step=5), "report": report(6, checkpoint=OF_STEP_5)},
        {"seconds": 120, "save": SaveAnswer(accepted=True, saved=False)},
        {"driver": Unreachable("x")},
        {"driver": Driver("FAILED", 73)},
        {"driver": None},
    ],
    ids=["saved", "will not", "saved meanwhile", "too late", "unreachable", "ended", "not there yet"],
)
def test_the_pods_go_when_it_has_saved_or_can_not(changes: dict[str, Any]) -> None:
    before = suspending(**changes)
    plan, conditions = outcome(before)
    assert plan.actions == (DeleteCluster("copy-1", "cluster-1"),)
    status = apply(plan, before)
    assert status.attempt_end_time is not None
    assert (status.restarts, status.last_failure) == (0, None)
    assert conditions["Suspended"][0] == "False"
    assert [conditions[one][:2] for one in ("ClusterReady", "DriverRunning", "Progressing")] == [
        ("False", "Deleted"),
        ("False", "NotSubmitted"),
        ("False", "NotStarted"),
    ]


def test_the_save_that_was_asked_for_is_in_the_status_when_the_pods_go() -> None:
    saved = CheckpointInfo(step=9, path="runs/default/copy/step-000009-t000001")
    old = CheckpointInfo(step=5, path="runs/default/copy/step-000005-t000001")
    before = suspending(save=replace(SAVED, checkpoint=saved), report=report(8, checkpoint=old))
    plan, conditions = outcome(before)
    status = apply(plan, before)
    assert (status.step, status.checkpoint) == (9, saved)
    assert conditions["CheckpointAvailable"] == ("True", "Available", f"step 9: {saved.path}")
    later_one = suspending(save=replace(SAVED, checkpoint=old), report=report(9, checkpoint=saved))
    assert apply(decide(later_one), later_one).checkpoint == saved


def test_where_no_checkpoint_is_known_nothing_is_claimed_about_the_volume() -> None:
    _, conditions = outcome(fresh(WANTED))
    assert conditions["Suspended"][2] == "spec.suspend is true; the next attempt looks at the volume first"


def test_a_save_that_takes_its_time_is_waited_for() -> None:
    plan, _ = outcome(suspending(90, save=SaveAnswer(accepted=True, saved=False)))
    assert kinds(plan) == [AskSave]


def test_an_unreadable_spec_can_still_be_suspended() -> None:
    broken = {**WANTED, "moon": 3}
    assert kinds(decide(training(job=job(running(), broken)))) == [AskSave]


def test_a_preflight_goes_at_once() -> None:
    plan, _ = outcome(before_cluster(job=job({"attempt": 1, "attemptStartTime": stamp(0)}, WANTED), pods=(preflight(),)))
    assert plan.actions == (DeletePod("copy-1-preflight", "preflight-1"),)


def test_a_run_that_is_done_by_then_is_done() -> None:
    done = suspending(driver=Driver("SUCCEEDED", 0), report=report(500, finished=FINISHED))
    assert outcome(done)[1]["Succeeded"][0] == "True"


def test_it_is_suspended_when_no_pod_is_left() -> None:
    status = running(suspendTime=stamp(60), attemptEndTime=stamp(70))
    left = world(80, job=job(status, WANTED), clusters=(), pods=(pod("worker", deleting=True),))
    _, conditions = outcome(left)
    assert conditions["Suspended"] == ("False", "Suspending", "waiting for pods of attempt 1 to end: copy-1-worker")
    gone = world(90, job=job({**status, "checkpoint": {"step": 50, "path": "x"}}, WANTED), clusters=(), pods=())
    plan, conditions = outcome(gone)
    assert plan.actions == ()
    assert plan.requeue_after is None
    assert conditions["Suspended"][:2] == ("True", "SuspendedByUser")
    assert "the next attempt goes on from step 50 or later, as the volume has it" in conditions["Suspended"][2]
    assert [event.reason for event in plan.events] == ["Suspended"]


def test_a_job_that_is_suspended_from_the_start_makes_nothing() -> None:
    plan, conditions = outcome(fresh(WANTED))
    assert plan.actions == ()
    assert conditions["Suspended"][0] == "True"


def test_a_backoff_ends_in_suspension_too() -> None:
    backing_off = world(1, failed(), clusters=(), pods=())
    assert outcome(backing_off)[1]["Restarting"][:2] == ("True", "BackingOff")
    _, conditions = outcome(world(2, job=job(said_by(backing_off), WANTED), clusters=(), pods=()))
    assert conditions["Suspended"][0] == "True"
    assert conditions["Restarting"][0] == "False"


def test_resuming_is_a_new_attempt_that_does_not_count() -> None:
    status = running(suspendTime=stamp(60), attemptEndTime=stamp(70), startTime=stamp(0), restarts=2, suspendedSeconds=5)
    suspended = said_by(world(90, job=job(status, WANTED), clusters=(), pods=()))
    before = world(160, suspended, clusters=(), pods=())
    plan, conditions = outcome(before)
    assert kinds(plan) == [PersistAttempt]
    after = apply(plan, before)
    assert (after.attempt, after.restarts, after.suspend_time, after.suspended_seconds) == (2, 2, None, 105)
    assert (after.attempt_end_time, after.attempt_start_time) == (None, stamp(160))
    assert conditions["Suspended"][:2] == ("False", "NotSuspended")
    assert [event.reason for event in plan.events] == ["Resumed", "AttemptStarted"]


def test_a_suspension_taken_back_while_it_saves_disturbs_nothing() -> None:
    before = training(job=job(running(suspendTime=stamp(50), startTime=stamp(0))), save=SaveAnswer(accepted=True, saved=False))
    plan, conditions = outcome(before)
    assert plan.actions == ()
    assert apply(plan, before).suspend_time is None
    assert conditions["Succeeded"][1] == "Running"


async def test_a_life_with_a_suspension(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.until_training()
    ray.reports["copy-1"] = report(10)
    await operator.step()
    ray.save_answer = SaveAnswer(accepted=True, saved=False)
    kube.edit("copy", WANTED)
    for _ in range(3):
        await operator.step()
        later(kube, 5)
        operator.restart()
    assert list(kube.clusters) == ["copy-1"]
    ray.save_answer = SAVED
    for _ in range(2):
        await operator.step()
    assert (kube.clusters, state(kube)) == ({}, "Suspended")
    assert kube.condition("Suspended")["reason"] == "Suspending"
    kube.pods_without_cluster_go()
    await operator.step()
    assert kube.condition("Suspended")["status"] == "True"
    before = kube.requests
    later(kube, 1000)
    kube.edit("copy", spec())
    assert before == kube.requests
    await operator.until_training()
    assert (ray.submitted, kube.status()["restarts"], kube.status()["suspendedSeconds"]) == (["copy-1", "copy-2"], 0, 1015)
