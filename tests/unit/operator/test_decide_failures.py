"""`decide` on attempts that fail: reason, evidence, and whether another follows."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.progress import CheckpointInfo, Failed
from rljob_operator.decide import decide
from rljob_operator.plan import DeleteCluster, PersistAttempt, SubmitDriver
from rljob_operator.world import Driver, Unreachable, World

from .builders import (
    UNKNOWN,
    apply,
    at,
    before_cluster,
    cluster,
    failed,
    job,
    kinds,
    merge,
    outcome,
    pod,
    pods,
    preflight,
    report,
    running,
    spec,
    stamp,
    training,
    world,
)

# ---- Failures ----


def test_a_permanent_exit_code_fails_the_job_at_once_with_the_log() -> None:
    heading = "Job entrypoint command failed with exit code 78, last available logs (truncated to 20,000 chars):"
    lines = "\n".join([heading, *(f"line {number}" for number in range(30)), "RLJOB-REPORT {}"])
    told = report(7, phase="Failed", failed=Failed(exit_code=78, message="loss is nan at step 8"))
    before = training(driver=Driver("FAILED", 78, lines), report=told)
    plan, conditions = outcome(before)
    status, reason, message = conditions["Succeeded"]
    assert (status, reason) == ("False", "DriverFailed")
    assert "attempt 1: the driver ended with exit code 78 (NonFinite): loss is nan at step 8" in message
    assert message.endswith("line 29")
    assert "line 17" not in message
    failure = apply(plan, before).last_failure
    assert failure is not None
    assert (failure.attempt, failure.exit_code, failure.reason) == (1, 78, "DriverFailed")
    assert kinds(plan) == [DeleteCluster]


def test_a_transient_exit_code_is_followed_by_another_attempt() -> None:
    before = training(driver=Driver("FAILED", 73, "a rank died"))
    plan, conditions = outcome(before)
    status = apply(plan, before)
    assert (status.restarts, status.finish_time) == (1, None)
    assert conditions["Succeeded"][:2] == ("Unknown", "Restarting")
    assert conditions["DriverRunning"] == ("False", "Exited", "copy-1 ended with exit code 73 (RankLost)")
    assert outcome(training(pods=(pod("worker"),)))[1]["DriverRunning"][2] == "copy-1 ended without a known exit code"
    assert kinds(plan) == [DeleteCluster]


@pytest.mark.parametrize(("seen", "reason"), [(False, "NotSubmitted"), (True, "Exited")])
def test_a_failed_attempt_says_whether_it_had_a_driver(seen: bool, reason: str) -> None:
    silent = world(60, driver=Unreachable("timeout"))
    status = apply(decide(silent), silent).to_wire()
    before = world(9999, status, driver=Unreachable("timeout"), driver_seen=seen)
    assert outcome(before)[1]["DriverRunning"][:2] == ("False", reason)


def test_restarts_are_bounded() -> None:
    used_up = running(4, restarts=5, restartsSinceProgress=3)
    before = training(job=job(used_up), clusters=(cluster(4),), pods=pods(4), driver=Driver("FAILED", 73))
    plan, conditions = outcome(before)
    assert conditions["Succeeded"][:2] == ("False", "DriverFailed")
    assert "failurePolicy.maxRestarts 3 allows no other attempt" in conditions["Succeeded"][2]
    assert apply(plan, before).restarts == 5


def test_attempts_that_all_go_on_from_the_same_checkpoint_are_bounded() -> None:
    told = CheckpointInfo(step=100, path="runs/default/copy/step-000100-t000001")
    status: dict[str, Any] = {}
    for attempt in range(1, 5):
        before = training(
            job=job(merge(status, {**running(attempt), "attemptEndTime": None})),
            clusters=(cluster(attempt),),
            pods=pods(attempt),
            driver=Driver("FAILED", 73),
            report=report(150, attempt, checkpoint=told),
        )
        after = apply(decide(before), before)
        status = after.to_wire()
        assert after.last_failure is not None
        assert (after.last_failure.checkpoint_step, after.last_failure.in_a_row) == (100, attempt)
        assert after.restarts == after.restarts_since_progress == min(attempt, 3)
        assert (after.finish_time is not None) == (attempt == 4)


def test_a_newer_checkpoint_resets_the_count_of_restarts() -> None:
    status = running(
        4,
        restarts=3,
        restartsSinceProgress=3,
        checkpoint={"step": 150, "path": "x"},
        lastFailure={"attempt": 3, "reason": "DriverFailed", "time": stamp(0), "checkpointStep": 100},
    )
    before = training(job=job(status), clusters=(cluster(4),), pods=pods(4), driver=Driver("FAILED", 73), report=None)
    after = apply(decide(before), before)
    assert (after.restarts, after.restarts_since_progress) == (4, 1)
    keep = job(status, spec(failurePolicy={"resetAfterProgress": False}))
    before = training(job=keep, clusters=(cluster(4),), pods=pods(4), driver=Driver("FAILED", 73), report=None)
    assert apply(decide(before), before).finish_time is not None


def test_exit_codes_that_are_not_ours_are_transient() -> None:
    _, conditions = outcome(training(driver=Driver("FAILED", 137, "Running entrypoint for job copy-1: x\nmine")))
    assert conditions["Succeeded"][2] == ("attempt 1: the driver ended with exit code 137 (SIGKILL)\nlast log lines:\nmine")
    assert conditions["Succeeded"][1] == "Restarting"


def test_a_lost_head_is_a_failed_attempt_with_its_last_words() -> None:
    gone = pod(ended=True, ready=False, last_words="OOMKilled, exit code 137")
    before = training(pods=(pod("worker"),), departed=(gone,))
    plan, conditions = outcome(before)
    assert conditions["ClusterReady"] == ("False", "HeadLost", "the head pod copy-1-head is gone: OOMKilled, exit code 137")
    assert kinds(plan) == [DeleteCluster]


def test_a_lost_head_quotes_kuberays_event_when_the_pod_was_never_seen_dead() -> None:
    before = training(pods=(pod("worker"),), warning="DeletedHeadPod: exit 137")
    _, conditions = outcome(before)
    assert conditions["ClusterReady"][2] == "the head pod of copy-1 is gone: DeletedHeadPod: exit 137"


def test_a_cluster_that_somebody_deletes_under_the_run_is_a_lost_head() -> None:
    _, conditions = outcome(training(clusters=(cluster(deleting=True),)))
    words = "RayCluster copy-1 is being deleted by someone else"
    assert conditions["ClusterReady"] == ("False", "HeadLost", words)


def test_a_loss_without_a_word_waits_a_moment_for_the_watch_to_tell_how() -> None:
    assert apply(decide(training(pods=(pod(),), incomplete_since=at(58))), training()).last_failure is None
    late = training(pods=(pod(),), incomplete_since=at(56))
    assert apply(decide(late), late).last_failure is not None
    told = (pod("worker", ended=True, last_words="OOMKilled, exit code 137"),)
    early = training(pods=(pod(),), departed=told, incomplete_since=at(59))
    assert "OOMKilled" in apply(decide(early), early).last_failure.message  # type: ignore[union-attr]


def test_a_pod_that_somebody_deleted_while_it_ran_has_no_more_to_tell() -> None:
    gone = training(pods=(pod("worker"),), departed=(pod(deleting=True),), incomplete_since=at(59))
    assert "the head pod copy-1-head is gone: it was deleted" in outcome(gone)[1]["ClusterReady"][2]
    ending = training(pods=(pod(deleting=True), pod("worker")), incomplete_since=at(59))
    assert apply(decide(ending), ending).last_failure is None, "how it ends may be told in a moment"


@pytest.mark.parametrize(
    "left",
    [
        (pod(),),
        (pod(), pod("worker", ended=True, last_words="Error, exit code 1")),
        (pod(), pod("worker", deleting=True)),
        (pod(), pod("worker", created=at(40), ready=False)),
    ],
    ids=["gone", "ended", "deleting", "replaced"],
)
def test_a_lost_worker_is_a_failed_attempt(left: Any) -> None:
    _, conditions = outcome(training(pods=left))
    assert conditions["ClusterReady"][1] == "WorkerLost"
    assert conditions["Succeeded"][1] == "Restarting"


def test_a_worker_replaced_within_the_same_second_is_lost() -> None:
    members = frozenset({"copy-1-head", "copy-1-worker"})
    replaced = training(pods=(pod(), pod("worker", name="copy-1-other", created=at(20))), members=members)
    assert apply(decide(replaced), replaced).last_failure.reason == "WorkerLost"  # type: ignore[union-attr]
    assert apply(decide(training(members=members)), training()).last_failure is None


def test_a_worker_that_is_only_unready_is_not_lost() -> None:
    plan, conditions = outcome(training(pods=(pod(), pod("worker", ready=False))))
    assert plan.actions == ()
    assert conditions["ClusterReady"][1] == "PodsPending"
    assert conditions["Succeeded"][1] == "Running"


def test_ray_forgetting_the_driver_is_a_failed_attempt() -> None:
    before = training(driver=UNKNOWN)
    plan, _ = outcome(before)
    assert apply(plan, before).last_failure.reason == "DriverLost"  # type: ignore[union-attr]
    assert SubmitDriver not in kinds(plan)


def test_a_restarted_operator_knows_from_the_status_that_the_driver_ran() -> None:
    before = world(90, running(step=5, lastStepTime=stamp(60)), driver=UNKNOWN)
    assert apply(decide(before), before).last_failure.reason == "DriverLost"  # type: ignore[union-attr]


def test_a_driver_stopped_through_ray_is_a_failed_attempt() -> None:
    before = training(driver=Driver("STOPPED"))
    assert "stopped through Ray" in apply(decide(before), before).last_failure.message  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("seconds", "told", "reason"),
    [
        (621, report(0), "FirstStepDeadlineExceeded"),
        (621, None, "FirstStepDeadlineExceeded"),
        (619, report(0), None),
        (361, report(5, last_step_time=stamp(60)), "StallDeadlineExceeded"),
        (359, report(5, last_step_time=stamp(60)), None),
    ],
)
def test_time_without_a_step_is_bounded(seconds: float, told: Any, reason: str | None) -> None:
    status = running(step=5, lastStepTime=stamp(60)) if told and told.step else running()
    before = training(seconds, job=job(status), report=told)
    failure = apply(decide(before), before).last_failure
    assert (failure.reason if failure else None) == reason


def test_a_stall_shows_in_progressing() -> None:
    status = running(step=5, lastStepTime=stamp(60))
    _, conditions = outcome(training(400, job=job(status), report=report(5, last_step_time=stamp(60))))
    assert conditions["Progressing"][:2] == ("False", "Stalled")
    assert "no step for 340 s (stallSeconds 300); last known phase Training" in conditions["Progressing"][2]


def test_an_unreachable_driver_is_no_failure_before_the_stall_deadline() -> None:
    status = running(step=5, lastStepTime=stamp(60))
    plan, conditions = outcome(training(300, job=job(status), driver=Unreachable("timeout"), report=report(5)))
    assert plan.actions == ()
    assert conditions["DriverRunning"][1] == "Unreachable"


# ---- Between attempts ----


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (training(driver=Driver("FAILED", 73)), "copy-1-head, copy-1-worker, RayCluster copy-1"),
        (before_cluster(pods=(preflight(ended=True),)), "copy-1-preflight"),
        (world(60, clusters=(), pods=()), "none is known"),
    ],
    ids=["a run", "a preflight", "a cluster that somebody deleted"],
)
def test_a_failure_names_what_is_left_of_its_attempt(before: World, words: str) -> None:
    assert outcome(before)[1]["Restarting"][2] == f"waiting for pods of attempt 1 to end: {words}"


def test_the_next_attempt_waits_for_the_previous_ones_pods_by_name() -> None:
    plan, conditions = outcome(world(60, failed(), clusters=(), pods=(pod("worker", deleting=True),)))
    assert plan.actions == ()
    assert conditions["Restarting"] == ("True", "WaitingForPodsToExit", "waiting for pods of attempt 1 to end: copy-1-worker")


def test_the_previous_cluster_is_deleted_again_when_it_is_still_there() -> None:
    plan, _ = outcome(world(60, failed(), pods=()))
    assert plan.actions == (DeleteCluster("copy-1", "cluster-1"),)


@pytest.mark.parametrize(("in_a_row", "seconds"), [(1, 5), (2, 10), (3, 20), (8, 300)])
def test_the_backoff_doubles_up_to_its_cap(in_a_row: int, seconds: int) -> None:
    status = failed(seconds=0, inARow=in_a_row)
    plan, conditions = outcome(world(1, status, clusters=(), pods=()))
    assert plan.actions == ()
    assert plan.requeue_after == pytest.approx(seconds - 1)
    assert conditions["Restarting"] == ("True", "BackingOff", f"attempt 2 starts at {stamp(seconds)}")
    plan, conditions = outcome(world(seconds, status, clusters=(), pods=()))
    assert kinds(plan) == [PersistAttempt]
    assert conditions["Restarting"][:2] == ("False", "NotRestarting")


def test_the_next_attempt_has_the_next_number() -> None:
    before = world(60, failed(), clusters=(), pods=())
    status = apply(decide(before), before)
    assert (status.attempt, status.ray_cluster_name, status.attempt_start_time) == (2, None, stamp(60))
    assert status.last_failure is not None


def test_a_status_that_was_wiped_starts_nothing_beside_what_runs() -> None:
    plan, conditions = outcome(world(60, {}))
    assert plan.actions == (DeleteCluster("copy-1", "cluster-1"),)
    assert conditions["Restarting"][1] == "WaitingForPodsToExit"


def test_a_spec_made_invalid_between_attempts_starts_nothing() -> None:
    plan, conditions = outcome(world(60, job=job(failed(), spec(generation__parallelism={"tensor": 2})), clusters=(), pods=()))
    assert plan.actions == ()
    assert conditions["Succeeded"][1] == "Invalid"


def test_a_pod_that_was_replaced_while_the_cluster_was_made_lends_a_later_loss_neither_its_name_nor_its_reason() -> None:
    before = pod(name="copy-1-head-first", ended=True, disruption="PreemptionByScheduler", last_words="Error, exit code 1")
    lost = pod(ended=True, ready=False, end_reason="OOMKilled", last_words="OOMKilled, exit code 137")
    members = frozenset({lost.name, "copy-1-worker"})
    moment = training(pods=(pod("worker"),), departed=(before, lost), members=members)
    failure = apply(decide(moment), moment).last_failure
    assert failure is not None
    assert (failure.reason, failure.action) == ("OutOfMemory", "Restart")
    assert failure.message == "the head pod copy-1-head is gone: OOMKilled, exit code 137"
    silent = training(pods=(pod("worker"),), departed=(before,), members=members, incomplete_since=at(0))
    assert outcome(silent)[1]["ClusterReady"] == ("False", "HeadLost", "the head pod of copy-1 is gone")
