"""Deadlines with clocks that are wrong, and with an operator that was away: neither ends a healthy run."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.progress import ProgressReport
from rljob_api.spec import FailurePolicy
from rljob_operator.decide import decide
from rljob_operator.ending import next_start
from rljob_operator.plan import PersistAttempt
from rljob_operator.world import Driver, Unreachable, World

from .builders import T0, apply, at, cluster, failed, job, pod, report, running, stamp, training, world
from .fakes import FakeCluster, FakeRay, later
from .life import Operator, state

STEPPED = running(step=10, lastStepTime=stamp(10))


def failure(moment: World) -> str | None:
    found = apply(decide(moment), moment).last_failure
    return found.reason if found else None


async def trained_until(operator: Operator, step: int) -> None:
    await operator.until_training()
    operator.ray.reports["copy-1"] = report(step)
    later(operator.kube, 20)
    await operator.step()
    assert operator.kube.status()["step"] == step


# ---- An operator that was away ----


@pytest.mark.parametrize("silent", ["ray", "report"])
async def test_a_request_that_fails_after_the_operators_downtime_ends_no_run(
    operator: Operator, kube: FakeCluster, ray: FakeRay, silent: str
) -> None:
    await trained_until(operator, 10)
    later(kube, 3600)
    ray.reachable = silent != "ray"
    ray.reports.clear()
    operator.restart()
    await operator.step()
    assert state(kube) == "Running"
    ray.reachable = True
    ray.reports["copy-1"] = report(3000)
    later(kube, 20)
    await operator.step()
    assert (state(kube), kube.status()["step"]) == ("Running", 3000)


async def test_a_process_that_was_halted_takes_no_silence_for_evidence(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await trained_until(operator, 10)
    later(kube, 3600)
    ray.reachable = False
    await operator.step()
    assert state(kube) == "Running"


async def test_a_silence_that_the_operator_has_watched_ends_the_attempt(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await trained_until(operator, 10)
    later(kube, 3600)
    ray.reachable = False
    operator.restart()
    for _ in range(16):
        await operator.step()
        assert state(kube) == "Running"
        later(kube, 20)
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "StallDeadlineExceeded"
    assert "no step for 320 s" in kube.status()["lastFailure"]["message"]


async def test_a_stall_that_a_report_proves_is_found_at_once_after_a_restart(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    await trained_until(operator, 10)
    later(kube, 3600)
    operator.restart()
    await operator.step()
    assert kube.status()["lastFailure"]["reason"] == "StallDeadlineExceeded"


@pytest.mark.parametrize(
    ("watched", "heard", "status", "told", "reason"),
    [
        (1299, None, running(), None, None),
        (600, None, running(), None, "FirstStepDeadlineExceeded"),
        (1299, 1299, running(), report(0), "FirstStepDeadlineExceeded"),
        (1299, None, STEPPED, None, None),
        (999, None, STEPPED, None, "StallDeadlineExceeded"),
        (1299, 1250, STEPPED, report(10), None),
        (1299, 1300, STEPPED, report(10), "StallDeadlineExceeded"),
        (1299, 1300, STEPPED, report(11), None),
    ],
)
def test_only_time_that_was_watched_or_reported_counts(
    watched: float, heard: float | None, status: dict[str, Any], told: ProgressReport | None, reason: str | None
) -> None:
    seen = {"watched_since": at(watched), "heard": None if heard is None else at(heard)}
    moment = world(1300, status, driver=Unreachable("once"), driver_seen=True, report=told, **seen)
    assert failure(moment) == reason


async def test_pods_that_got_ready_during_the_downtime_are_asked_for_before_the_deadline_counts(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    for _ in range(3):
        await operator.step()
    kube.kuberay_makes_pods()
    await operator.step()
    operator.restart()
    kube.pods_get_ready()
    later(kube, 3600)
    await operator.step(told=False)
    assert state(kube) != "Restarting"
    assert "lastFailure" not in kube.status()


def test_a_cluster_that_was_made_late_has_its_whole_time() -> None:
    late = cluster(created=at(5000), provisioned=None)
    waiting = (pod(ready=False),)
    assert failure(world(5500, clusters=(late,), pods=waiting)) is None
    assert failure(world(5601, clusters=(late,), pods=waiting)) == "ProvisioningDeadlineExceeded"


# ---- A pod's clock ----


@pytest.mark.parametrize("skew", [-86400, -600, 0, 600, 86400])
def test_a_pods_wrong_clock_neither_ends_a_run_nor_hides_a_stall(skew: float) -> None:
    status: dict[str, Any] = running()
    for seconds in range(60, 960, 10):
        moment = training(seconds, job=job(status), report=report(seconds, last_step_time=stamp(seconds + skew)))
        after = apply(decide(moment), moment)
        assert (after.last_failure, after.last_step_time) == (None, stamp(seconds))
        status = after.to_wire()
    told = report(950, last_step_time=stamp(950 + skew))
    assert failure(training(1250, job=job(status), report=told)) is None
    assert failure(training(1251, job=job(status), report=told)) == "StallDeadlineExceeded"


def test_a_first_look_after_a_restart_does_not_believe_a_pods_clock() -> None:
    moment = training(
        3600, job=job(STEPPED), report=report(99, last_step_time=stamp(2000)), watched_since=at(3600), heard=at(3600)
    )
    after = apply(decide(moment), moment)
    assert (after.last_failure, after.last_step_time) == (None, stamp(3600))


# ---- This clock, set back ----


def test_numbers_go_on_after_the_clock_was_set_back() -> None:
    first = training(60)
    status = apply(decide(first), first).to_wire()
    patch = decide(training(70, step=50, job=job(status), written=at(3600))).status_patch
    assert patch is not None
    assert patch["step"] == 50


def test_a_lost_pod_shows_after_the_clock_was_set_back() -> None:
    assert failure(training(60, pods=(pod("worker"),), incomplete_since=at(3600))) == "HeadLost"


def test_the_backoff_does_not_wait_for_a_time_before_the_clock_was_set_back() -> None:
    plan = decide(world(60, failed(seconds=3600), clusters=(), pods=()))
    assert plan.actions == (PersistAttempt(2),)
    assert next_start(job(failed(seconds=60)).status, FailurePolicy(), at(60)) > at(60)


def test_the_deadlines_go_on_after_the_clock_was_set_back() -> None:
    status: dict[str, Any] = {**running(step=5, lastStepTime=stamp(3700)), "attemptStartTime": stamp(3600)}
    moment = training(60, job=job(status), report=report(5))
    after = apply(decide(moment), moment)
    assert (after.attempt_start_time, after.last_step_time, after.last_failure) == (stamp(60), stamp(60), None)
    assert failure(training(361, job=job(after.to_wire()), report=report(5))) == "StallDeadlineExceeded"


def test_the_first_step_is_waited_for_from_now_on_after_the_clock_was_set_back() -> None:
    seen = {"clusters": (cluster(provisioned=9000),), "driver": Driver("RUNNING"), "report": report(0)}
    assert failure(world(700, watched_since=at(99), heard=at(700), **seen)) == "FirstStepDeadlineExceeded"
    assert failure(world(699, watched_since=at(99), heard=at(699), **seen)) is None


async def test_kuberays_words_are_asked_for_after_the_clock_was_set_back(
    operator: Operator, kube: FakeCluster, ray: FakeRay
) -> None:
    for _ in range(3):
        await operator.step()
    kube.kuberay_makes_pods()
    later(kube, 20)
    await operator.step()
    later(kube, -3600)
    kube.kube_events = [{"type": "Warning", "reason": "FailedCreate", "message": "quota", "lastTimestamp": stamp(0)}]
    await operator.step()
    later(kube, 20)
    await operator.step()
    assert "FailedCreate: quota" in kube.condition("ClusterReady")["message"]
    assert kube.now < T0
