"""Deadlines: the whole run, and what a stall waits for."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.exitcodes import ExitCode
from rljob_api.progress import Failed, Handover, OldestPrompt
from rljob_operator.decide import decide
from rljob_operator.plan import DeleteCluster, PersistAttempt, SubmitDriver
from rljob_operator.world import Driver, Unreachable

from .builders import (
    UNKNOWN,
    apply,
    at,
    cluster,
    failed,
    fresh,
    job,
    kinds,
    outcome,
    pods,
    report,
    running,
    spec,
    stamp,
    training,
    world,
)

LIMIT = spec(deadlines__activeSeconds=1000)
BEGAN = stamp(-900)


def test_the_whole_run_is_bounded_over_all_attempts() -> None:
    before = training(
        101, job=job({**failed(2, restarts=0), **running(3, startTime=BEGAN)}, LIMIT), clusters=(cluster(3),), pods=pods(3)
    )
    plan, conditions = outcome(before)
    assert conditions["Succeeded"][:2] == ("False", "ActiveDeadlineExceeded")
    assert "the run took its 1000 s (activeSeconds)" in conditions["Succeeded"][2]
    assert kinds(plan) == [DeleteCluster]
    assert apply(plan, before).restarts == 0
    assert "the last attempt" not in conditions["Succeeded"][2]


def test_a_run_that_has_not_begun_has_all_its_time() -> None:
    assert kinds(decide(fresh(LIMIT))) == [PersistAttempt]


def test_suspensions_do_not_count() -> None:
    status = running(startTime=BEGAN, suspendedSeconds=100)
    assert apply(decide(training(199, job=job(status, LIMIT))), training()).finish_time is None
    late = training(201, job=job(status, LIMIT))
    assert apply(decide(late), late).finish_time is not None


def test_no_attempt_is_started_that_could_not_even_save() -> None:
    status = {**failed(3, 45, message="rank 0 died"), "startTime": BEGAN}
    _, conditions = outcome(world(50, job=job(status, LIMIT), clusters=(), pods=()))
    assert conditions["Succeeded"][:2] == ("False", "ActiveDeadlineExceeded")
    assert "50 s of activeSeconds 1000 are left" in conditions["Succeeded"][2]
    assert "the last attempt had ended: rank 0 died" in conditions["Succeeded"][2]


def test_the_driver_is_told_what_is_left() -> None:
    mine: dict[str, Any] = {"clusters": (cluster(3, spec=None),), "pods": pods(3)}
    before = world(50, job=job(running(3, startTime=BEGAN), LIMIT), driver=UNKNOWN, **mine)
    (submit,) = decide(before).actions
    assert isinstance(submit, SubmitDriver)
    assert submit.environment["RLJOB_ACTIVE_SECONDS_LEFT"] == "50"


def test_a_driver_that_ends_at_the_deadline_ends_the_job_by_its_name() -> None:
    told = report(5, failed=Failed(exit_code=84, message="no time for another step after step 5, which was saved"))
    before = training(driver=Driver("FAILED", ExitCode.DEADLINE, "x"), report=told)
    _, conditions = outcome(before)
    assert conditions["Succeeded"][:2] == ("False", "ActiveDeadlineExceeded")
    assert "after step 5, which was saved" in conditions["Succeeded"][2]


STUCK: dict[str, Any] = {
    "oldest": [OldestPrompt(ordinal=17, age_seconds=312.4, tokens=40, answers=3, attempt=1)],
    "handover": Handover(phase="Draining", seconds=61, absent_ranks=[3, 5]),
    "collector_state": "Draining",
}


def stalled(on_stall: str, **changes: Any) -> Any:
    status = running(step=5, lastStepTime=stamp(60))
    wanted = spec(deadlines__onStall=on_stall)
    return training(**{"seconds": 400, "job": job(status, wanted), "report": report(5, **STUCK), **changes})


def test_a_stall_names_the_phase_the_oldest_prompt_and_the_rank_that_is_missing() -> None:
    _, conditions = outcome(stalled("Restart"))
    assert conditions["Progressing"] == (
        "False",
        "Stalled",
        "no step for 340 s (stallSeconds 300); last known phase Training; oldest prompt in flight 17, for 312 s (40 tokens, "
        "3 answers complete, 1 tries failed before); hand-over in Draining for 61 s, ranks 3, 5 did not arrive; "
        "collector Draining",
    )
    assert conditions["Succeeded"][1] == "Restarting"


def test_a_stall_tells_how_old_the_last_report_is() -> None:
    words = outcome(stalled("Restart", heard=at(61)))[1]["Progressing"][2]
    assert "last known phase Training, as reported 339 s ago; no report since; oldest prompt in flight 17" in words
    assert "ago" not in outcome(stalled("Restart", heard=at(398)))[1]["Progressing"][2]


def test_a_stall_may_only_warn_and_is_over_with_the_next_step() -> None:
    before = stalled("Warn")
    plan, conditions = outcome(before)
    assert plan.actions == ()
    assert conditions["Progressing"][:2] == ("False", "Stalled")
    assert conditions["Succeeded"][1] == "Running"
    assert [(event.type, event.reason) for event in plan.events] == [("Warning", "Stalled")]
    status = apply(plan, before).to_wire()
    later = stalled("Warn", seconds=460, job=job(status, spec(deadlines__onStall="Warn")))
    (turned,) = {one.last_transition_time for one in apply(decide(later), later).conditions if one.type == "Progressing"}
    assert turned == stamp(400)
    assert decide(stalled("Warn", job=job(status, spec(deadlines__onStall="Warn")))).events == ()
    moved = training(410, job=job(status, spec(deadlines__onStall="Warn")), report=report(6))
    assert outcome(moved)[1]["Progressing"][:2] == ("True", "StepAdvanced")


def test_a_stall_may_fail_the_job() -> None:
    _, conditions = outcome(stalled("Fail"))
    assert conditions["Succeeded"][:2] == ("False", "StallDeadlineExceeded")


@pytest.mark.parametrize(("absent", "words"), [([], "for 61 s"), ([0], "for 61 s, rank 0 did not arrive")])
def test_a_hand_over_names_ranks_where_they_are_known(absent: list[int], words: str) -> None:
    stuck = report(5, handover=Handover(phase="Draining", seconds=61, absent_ranks=absent))
    assert outcome(stalled("Restart", report=stuck))[1]["Progressing"][2].endswith(f"hand-over in Draining {words}")


@pytest.mark.parametrize("driver", [Driver("RUNNING"), Driver("PENDING")])
def test_a_report_without_details_stalls_all_the_same(driver: Driver) -> None:
    before = stalled("Restart", driver=driver, report=report(5))
    assert "last known phase Training" in outcome(before)[1]["Progressing"][2]


@pytest.mark.parametrize(
    ("status", "reason"),
    [(running(), "FirstStepDeadlineExceeded"), (running(step=3, lastStepTime=stamp(50)), "StallDeadlineExceeded")],
)
def test_what_ends_an_attempt_that_ray_says_nothing_of_tells_why_ray_could_not_be_asked(
    status: dict[str, Any], reason: str
) -> None:
    """The condition that told it is about the next attempt by then."""
    before = training(1000, job=job(status), driver=Unreachable("403: Ray refuses the attempt's token"), report=None)
    failure = apply(decide(before), before).last_failure
    assert failure is not None
    assert failure.reason == reason
    assert failure.message.endswith("Ray does not answer as it should: 403: Ray refuses the attempt's token")
