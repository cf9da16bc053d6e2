"""What others may do to a job's objects, and odd words in them: the job still comes to an end, or says what it waits for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rljob_api.base import DECIMAL_PATTERN
from rljob_operator.decide import decide
from rljob_operator.metrics import Process, render
from rljob_operator.plan import CreatePreflight
from rljob_operator.world import Refusal

from .builders import apply, at, before_cluster, counted, job, outcome, preflight, report, running, stamp, training, world

# ---- Words that are no words of ours ----


@pytest.mark.parametrize("value", [0.0, -0.5, 99999999999.99996, 1e11, 123456789012.9, 3.4e38, -3.4e38, 9.99995e99, 1e300])
def test_every_finite_reward_leaves_a_status_that_the_api_server_takes(value: float) -> None:
    before = training(report=report(5, reward=value, validation_step=5, validation_reward=value))
    after = apply(decide(before), before)
    told = [after.reward, after.validation.reward if after.validation else None]
    if abs(value) > 9e99:
        assert told == [None, None]
        return
    for text in told:
        assert text is not None
        assert re.fullmatch(DECIMAL_PATTERN, text)
        assert float(text) == pytest.approx(value, rel=1e-3)


ODD_TIMES = ["2026-11-29t12:00:10z", "0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-11-29T12:00:10+99:99"]


@pytest.mark.parametrize("text", ODD_TIMES)
def test_a_time_that_somebody_wrote_into_the_status_stops_no_pass_and_no_metrics(text: str) -> None:
    """The API server takes all of them for a date-time."""
    edits: list[dict[str, Any]] = [
        {"lastStepTime": text, "step": 5},
        {"attemptStartTime": text},
        {"startTime": text, "suspendTime": text},
        {"lastFailure": {"attempt": 1, "reason": "HeadLost", "time": text}},
        {"finishTime": text},
        {"conditions": [{"type": "Validated", "status": "True", "reason": "Valid", "lastTransitionTime": text}]},
    ]
    for edit in edits:
        for spec_ in (None, {"ttlSecondsAfterFinished": 60, "deadlines": {"activeSeconds": 5000}}):
            edited = running(**edit)
            moment = training(60, job=job(edited, None if spec_ is None else job().spec | spec_))
            apply(decide(moment), moment)
            assert "rljob_attempt" in render([moment.job], Process())


# ---- What refuses pods, or holds them ----


def test_a_quota_that_has_no_room_is_asked_now_and_then_and_ends_an_attempt_not_the_job() -> None:
    refusal = Refusal("403 Forbidden: exceeded quota: pods", final=False, what="pod copy-1-preflight")
    plan, conditions = outcome(before_cluster(refusal=refusal))
    assert [type(one) for one in plan.actions] == [CreatePreflight]
    assert plan.requeue_after is not None
    assert plan.requeue_after >= 5
    assert "exceeded quota: pods" in conditions["ClusterReady"][2]
    late = before_cluster(700, refusal=refusal)
    failure = apply(decide(late), late).last_failure
    assert failure is not None
    assert (failure.reason, failure.action) == ("ProvisioningDeadlineExceeded", "Restart")
    assert "pod copy-1-preflight is refused: 403 Forbidden: exceeded quota: pods" in failure.message


def test_a_preflight_that_does_not_go_is_named_and_bounded_from_when_it_should_have_gone() -> None:
    blocked = {"type": "Succeeded", "status": "Unknown", "reason": "Blocked", "lastTransitionTime": stamp(0)}
    held = preflight(deleting=True, ended=True, ended_at=at(8), due_gone=at(1000))
    plan, conditions = outcome(before_cluster(1100, pods=(held,)))
    assert plan.actions == ()
    assert "waiting for pod copy-1-preflight to be gone" in conditions["Succeeded"][2]
    assert apply(decide(before_cluster(1100, status=counted(conditions=[blocked]), pods=(held,))), world()).last_failure is None
    late = before_cluster(1700, pods=(held,))
    failure = apply(decide(late), late).last_failure
    assert failure is not None
    assert failure.reason == "ProvisioningDeadlineExceeded"
    assert "waiting for pod copy-1-preflight to be gone" in failure.message
