"""Succeeded=True is said only of a run that did succeed."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.progress import Failed, Finished
from rljob_operator.decide import decide
from rljob_operator.world import Driver, Unreachable

from .builders import FINISHED, apply, at, job, outcome, pod, report, running, spec, stamp, training
from .fakes import FakeCluster, FakeRay, later
from .life import Operator, state

ENDED = Driver("SUCCEEDED", 0)


def test_a_report_of_failure_wins_over_rays_success() -> None:
    told = report(3, phase="Failed", failed=Failed(exit_code=80, message="stopped from outside"))
    before = training(driver=ENDED, report=told)
    _, conditions = outcome(before)
    words = "Ray reports success, but the driver's last report says exit code 80 (Stopped): stopped from outside"
    assert conditions["Succeeded"] == ("Unknown", "Restarting", f"attempt 1: {words}")
    after = apply(decide(before), before)
    assert after.last_failure is not None
    assert (after.last_failure.reason, after.last_failure.exit_code) == ("DriverFailed", 80)


@pytest.mark.parametrize("finished", [FINISHED, None], ids=["finished", "all steps"])
def test_a_report_of_a_permanent_failure_ends_the_job_though_ray_reports_success(finished: Finished | None) -> None:
    told = report(500, phase="Failed", finished=finished, failed=Failed(exit_code=78, message="loss is nan"))
    _, conditions = outcome(training(driver=ENDED, report=told))
    assert conditions["Succeeded"][:2] == ("False", "DriverFailed")


@pytest.mark.parametrize(
    ("told", "status", "at_step"),
    [
        (None, running(), "step 0 of 0"),
        (None, running(step=500, totalSteps=500, lastStepTime=stamp(-9)), "step 0 of 500"),  # an earlier attempt's
        (None, running(step=3, totalSteps=500, lastStepTime=stamp(50)), "step 3 of 500"),
        (report(499), running(), "step 499 of 500"),
    ],
)
def test_an_end_before_the_last_step_without_a_report_of_it_is_a_failure(
    told: Any, status: dict[str, Any], at_step: str
) -> None:
    no_restart = job(status, spec(failurePolicy={"maxRestarts": 0}))
    _, conditions = outcome(training(job=no_restart, driver=ENDED, report=told))
    assert conditions["Succeeded"][:2] == ("False", "DriverFailed")
    assert f"ended with exit code 0 at {at_step} and left no report that it finished" in conditions["Succeeded"][2]
    _, conditions = outcome(training(job=job(status), driver=ENDED, report=told))
    assert conditions["Succeeded"][1] == "Restarting"


REFUSED = Unreachable("403: Ray refuses the attempt's token")


@pytest.mark.parametrize(
    ("told", "seconds", "ends"),
    [
        ({"finished": FINISHED}, 31, ("True", "TargetReached")),
        ({"finished": FINISHED}, 29, ("Unknown", "Running")),
        ({"failed": Failed(exit_code=78, message="loss is nan")}, 31, ("False", "DriverFailed")),
        ({"failed": Failed(exit_code=73, message="a rank is lost")}, 31, ("Unknown", "Restarting")),
        ({"failed": Failed(exit_code=78, message="loss is nan")}, 29, ("Unknown", "Running")),
        ({}, 31, ("Unknown", "Running")),
    ],
)
def test_a_driver_that_reported_its_end_is_believed_where_ray_cannot_be_asked(
    told: dict[str, Any], seconds: float, ends: tuple[str, str]
) -> None:
    """The dashboard is gone, or the operator has another key: the stall deadline would call a finished run failed."""
    _, conditions = outcome(training(60, driver=REFUSED, report=report(500, **told), ended_since=at(60 - seconds)))
    assert conditions["Succeeded"][:2] == ends


async def test_a_run_that_ends_while_ray_cannot_be_asked_has_succeeded() -> None:
    kube = FakeCluster(spec(failurePolicy={"maxRestarts": 0}))
    ray = FakeRay(kube)
    operator = Operator(kube, ray)
    await operator.until_training()
    ray.dashboard = False
    ray.reports["copy-1"] = report(350, finished=FINISHED)
    for _ in range(3):
        await operator.step()
        later(kube, 16)
        ray.reports.pop("copy-1", None)  # it was read, so the driver ends
    assert (state(kube), kube.status()["step"]) == ("TargetReached", 350)


@pytest.mark.parametrize("seconds", [30, -1])
def test_the_last_report_is_waited_for_a_while(seconds: float) -> None:
    plan, conditions = outcome(training(60, driver=ENDED, report=report(3), ended_since=at(31)))
    assert plan.actions == ()
    assert conditions["Succeeded"][1] == "Running"
    assert conditions["DriverRunning"] == ("False", "Exited", "copy-1 ended with exit code 0")
    late = training(60, driver=ENDED, report=report(3), ended_since=at(60 - seconds))
    assert apply(decide(late), late).last_failure is not None


def test_all_steps_done_is_success_also_where_the_last_report_was_missed() -> None:
    for moment in (
        training(driver=ENDED, report=report(500)),
        training(job=job(running(step=500, lastStepTime=stamp(50))), driver=ENDED, report=None),
    ):
        assert outcome(moment)[1]["Succeeded"][:2] == ("True", "Completed")


async def test_a_last_report_that_could_not_be_read_at_once_still_counts() -> None:
    kube = FakeCluster(spec())
    ray = FakeRay(kube)
    operator = Operator(kube, ray)
    await operator.until_training()
    ray.reports["copy-1"] = report(340)
    await operator.step()
    ray.end("copy-1", "SUCCEEDED", 0)
    ray.reports.clear()
    await operator.step()
    assert state(kube) == "Running"
    ray.logged["copy-1"] = report(350, finished=FINISHED)
    later(kube, 5)
    await operator.step()
    assert (state(kube), kube.status()["step"]) == ("TargetReached", 350)


async def test_a_last_report_that_never_comes_fails_the_attempt() -> None:
    kube = FakeCluster(spec())
    ray = FakeRay(kube)
    operator = Operator(kube, ray)
    await operator.until_training()
    ray.end("copy-1", "SUCCEEDED", 0)
    for _ in range(4):
        await operator.step()
        later(kube, 15)
    assert "left no report that it finished" in kube.status()["lastFailure"]["message"]


def test_pods_that_go_explain_an_end_that_was_none() -> None:
    before = training(driver=ENDED, report=report(3), pods=(pod(),), ended_since=at(59))
    assert outcome(before)[1]["ClusterReady"][1] == "WorkerLost"
