"""What follows a failure: the default table, exit codes, and the user's rules over both."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.exitcodes import ExitCode
from rljob_api.reasons import FAILURES
from rljob_api.spec import Deadlines, FailurePolicy, FailureRule
from rljob_operator.classify import DEFAULTS, DISRUPTIONS, Decision, Failure, classify, matches
from rljob_operator.decide import decide
from rljob_operator.world import Driver

from .builders import apply, at, cluster, job, outcome, pod, pods, running, spec, stamp, training


def decided(failure: Failure, on_stall: str = "Restart", rules: list[dict[str, Any]] | None = None) -> Decision:
    policy = FailurePolicy.model_validate({"rules": rules or []})
    return classify(failure, policy, Deadlines.model_validate({"onStall": on_stall}))


def test_every_failure_reason_has_its_row() -> None:
    assert DEFAULTS.keys() | {"DriverFailed", "StallDeadlineExceeded"} == FAILURES.keys()
    assert set(DISRUPTIONS.values()) <= DEFAULTS.keys()


@pytest.mark.parametrize("code", [*ExitCode, 1, 137, None])
def test_exit_codes_decide_by_whether_another_attempt_may_help(code: int | None) -> None:
    action = decided(Failure("DriverFailed", "x", code)).action
    if code == ExitCode.STOPPED:
        assert action == "RestartUncounted"
    elif isinstance(code, ExitCode) and code is not ExitCode.OK and not code.transient:
        assert action == "Fail"
    else:
        assert action == "Restart"


@pytest.mark.parametrize(("on_stall", "action"), [("Warn", "Restart"), ("Restart", "Restart"), ("Fail", "Fail")])
def test_a_stall_goes_by_its_deadlines_word(on_stall: str, action: str) -> None:
    assert decided(Failure("StallDeadlineExceeded", "x"), on_stall).action == action


RULES = [
    {"name": "nan-once", "action": "Restart", "onExitCodes": [78]},
    {"name": "disk", "action": "Fail", "onReasons": ["HeadLost", "WorkerLost"], "onMessagePattern": "no space|disk"},
    {"name": "heads", "action": "RestartUncounted", "onReasons": ["HeadLost"]},
    {"name": "oom-in-log", "action": "Fail", "onMessagePattern": r"CUDA out of memory\. Tried to allocate \d+"},
]


@pytest.mark.parametrize(
    ("failure", "decision"),
    [
        (Failure("DriverFailed", "x", 78), Decision("Restart", "nan-once")),
        (Failure("HeadLost", "no space left"), Decision("Fail", "disk")),
        (Failure("HeadLost", "gone"), Decision("RestartUncounted", "heads")),
        (Failure("WorkerLost", "gone"), Decision("Restart")),
        (Failure("DriverFailed", "x", 73, logs="CUDA out of memory. Tried to allocate 20 GiB"), Decision("Fail", "oom-in-log")),
        (Failure("DriverFailed", "x", 73, logs="CUDA out of memory. Tried to"), Decision("Restart")),
        (Failure("ActiveDeadlineExceeded", "no space left", 78, final=True), Decision("Fail")),
    ],
)
def test_the_first_rule_that_matches_decides_unless_nothing_can_help(failure: Failure, decision: Decision) -> None:
    assert decided(failure, rules=RULES) == decision


def test_a_rule_without_a_criterion_matches_nothing() -> None:
    """Admission refuses it; one that was stored before there was that rule must not decide every failure."""
    empty = FailureRule.model_construct(name="all", action="Fail", on_exit_codes=[], on_reasons=[], on_message_pattern=None)
    assert not matches(empty, Failure("HeadLost", "gone"))


@pytest.mark.parametrize(
    ("disruption", "reason"), [*DISRUPTIONS.items(), ("SomethingNewer", "Evicted")], ids=lambda value: str(value)
)
def test_what_kubernetes_does_to_a_pod_is_restarted_and_not_counted(disruption: str, reason: str) -> None:
    used_up = job(running(restartsSinceProgress=3))
    before = training(job=used_up, pods=(pod(), pod("worker", deleting=True, disruption=disruption)))
    plan, conditions = outcome(before)
    status = apply(plan, before)
    assert status.last_failure is not None
    assert (status.last_failure.reason, status.last_failure.action) == (reason, "RestartUncounted")
    assert (status.restarts, status.restarts_since_progress, status.finish_time) == (0, 3, None)
    assert conditions["ClusterReady"][1:] == ("WorkerLost", f"worker pod copy-1-worker is gone: {disruption}")
    assert "a restart that is not counted follows" in plan.events[-1].message


def test_uncounted_failures_make_the_wait_longer_too() -> None:
    status = running(2, lastFailure={"attempt": 1, "reason": "Drained", "time": stamp(0), "inARow": 4})
    before = training(
        job=job(status), clusters=(cluster(2),), pods=(pod("head", 2, deleting=True), pod("worker", 2)), report=None
    )
    failure = apply(decide(before), before).last_failure
    assert failure is not None
    assert failure.in_a_row == 5


def test_a_rule_shows_in_the_status() -> None:
    wanted = spec(failurePolicy={"rules": [{"name": "no-heads", "action": "Fail", "onReasons": ["HeadLost"]}]})
    before = training(job=job(running(), wanted), pods=(pod("worker"),))
    plan, conditions = outcome(before)
    status = apply(plan, before)
    assert status.last_failure is not None
    assert (status.last_failure.rule, status.last_failure.action) == ("no-heads", "Fail")
    assert conditions["Succeeded"][:2] == ("False", "HeadLost")
    assert "(rule no-heads)" in conditions["Succeeded"][2]


def test_an_oom_killed_pod_is_told_apart_and_its_log_is_kept() -> None:
    killed = pod("worker", ended=True, end_reason="OOMKilled", last_words="OOMKilled, exit code 137")
    before = training(pods=(pod(), killed), driver=Driver("FAILED", 73, "rank 0 died"))
    failure = apply(decide(before), before).last_failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == ("OutOfMemory", 73)
    assert "copy-1-worker is gone: OOMKilled, exit code 137" in failure.message
    assert failure.message.endswith("rank 0 died")


def test_a_lost_rank_waits_a_moment_for_the_pod_to_tell_how() -> None:
    moment = {"driver": Driver("FAILED", ExitCode.RANK_LOST, "x"), "pods": pods()}
    early, late = (training(60, **moment, ended_since=at(since)) for since in (59, 56))
    assert apply(decide(early), early).last_failure is None
    assert apply(decide(late), late).last_failure is not None


def test_a_permanent_exit_code_wins_over_the_pods_that_go_with_it() -> None:
    before = training(pods=(pod("worker"),), driver=Driver("FAILED", ExitCode.NON_FINITE, "loss is nan"))
    assert outcome(before)[1]["Succeeded"][:2] == ("False", "DriverFailed")
