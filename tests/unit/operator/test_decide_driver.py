"""What the operator does about the driver: submission, its words, its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.progress import CheckpointInfo, PromptCounts
from rljob_operator.decide import decide
from rljob_operator.plan import SubmitDriver
from rljob_operator.world import Driver, Unreachable

from .builders import (
    RESUMED,
    UID,
    UNKNOWN,
    apply,
    cluster,
    job,
    outcome,
    pod,
    pods,
    report,
    running,
    spec,
    stamp,
    training,
    world,
)

# ---- The driver ----

STARTING = (cluster(provisioned=None),)


def test_the_driver_is_submitted_when_all_pods_are_ready_and_ray_does_not_know_it() -> None:
    plan, _ = outcome(world(driver=UNKNOWN))
    (submit,) = plan.actions
    assert isinstance(submit, SubmitDriver)
    assert (submit.cluster, submit.submission_id) == ("copy-1", "copy-1")
    assert submit.entrypoint == "python -m rljob_workload.runtime.main"
    assert submit.environment["RLJOB_ATTEMPT"] == "1"
    assert submit.environment["RLJOB_UID"] == UID


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": UNKNOWN, "pods": (pod(), pod("worker", ready=False))},
        {"driver": UNKNOWN, "pods": (pod(), pod("worker", deleting=True)), "clusters": STARTING},
        {"driver": UNKNOWN, "pods": (pod(), pod("worker", ended=True)), "clusters": STARTING},
        {"driver": UNKNOWN, "pods": (pod("worker"), pod("other")), "clusters": STARTING},
        {"driver": Driver("PENDING")},
        {"driver": Driver("RUNNING")},
        {"driver": Unreachable("refused")},
        {"driver": None},
    ],
    ids=[
        "a pod is not ready",
        "a pod is going",
        "a pod has ended",
        "no head",
        "pending",
        "running",
        "unreachable",
        "not asked",
    ],
)
def test_the_driver_is_not_submitted_otherwise(changes: dict[str, Any]) -> None:
    assert decide(world(**changes)).actions == ()


@pytest.mark.parametrize(
    ("driver", "status", "reason"),
    [
        (Driver("PENDING"), "Unknown", "Submitted"),
        (Driver("RUNNING"), "True", "Running"),
        (Unreachable("connection refused"), "Unknown", "Unreachable"),
        (None, "False", "NotSubmitted"),
    ],
)
def test_what_ray_says_is_the_drivers_condition(driver: Any, status: str, reason: str) -> None:
    _, conditions = outcome(world(driver=driver))
    assert conditions["DriverRunning"][:2] == (status, reason)


def test_what_was_said_of_the_driver_goes_when_ray_knows_none() -> None:
    silent = world(driver=Unreachable("timeout"))
    status = apply(decide(silent), silent).to_wire()
    starting = world(status=status, driver=UNKNOWN, pods=(pod(), pod("worker", ready=False)))
    assert outcome(starting)[1]["DriverRunning"][:2] == ("False", "NotSubmitted")


def test_a_submission_that_ray_refuses_is_shown() -> None:
    said = "the driver was not taken: Ray answered 500: No available agent"
    _, conditions = outcome(world(driver=UNKNOWN, submit_error=said))
    assert conditions["DriverRunning"][1:] == ("Unreachable", f"{said}; it is submitted again")


def test_the_attempts_own_spec_is_submitted_even_when_the_job_was_edited() -> None:
    edited = job(running(), spec(algorithm__grpo__steps=9))
    (submit,) = decide(world(job=edited, driver=UNKNOWN)).actions
    assert isinstance(submit, SubmitDriver)
    assert '"steps":500' in submit.environment["RLJOB_SPEC"]


def test_numbers_of_the_report_reach_the_status() -> None:
    checkpoint = CheckpointInfo(step=50, path="runs/default/copy/step-000050-t000001")
    told = report(60, reward=0.51234, validation_step=50, validation_reward=0.5, checkpoint=checkpoint)
    before = training(report=told)
    status = apply(decide(before), before)
    assert (status.step, status.total_steps, status.reward) == (60, 500, "0.5123")
    assert status.validation is not None
    assert (status.validation.step, status.validation.reward) == (50, "0.5000")
    assert status.checkpoint == checkpoint
    assert status.prompts is not None
    assert status.prompts.handed_out == 480
    assert status.last_step_time == stamp(60)


def test_the_steps_wanted_are_those_that_the_attempt_was_started_with() -> None:
    edited = spec(algorithm__grpo__steps=900)
    before = world(job=job(running(totalSteps=900), edited), clusters=(cluster(provisioned=None),), pods=())
    assert apply(decide(before), before).total_steps == 500


def test_a_training_job_says_so() -> None:
    _, conditions = outcome(training())
    assert conditions["ClusterReady"][:2] == ("True", "AllPodsReady")
    assert conditions["DriverRunning"][:2] == ("True", "Running")
    assert conditions["Progressing"] == ("True", "StepAdvanced", "phase Training")
    assert conditions["PromptsSkipped"] == ("False", "None", "0 of 40 prompts skipped")
    assert conditions["Succeeded"] == ("Unknown", "Running", "step 5 of 500")


def test_a_resumed_attempt_waits_for_its_own_first_step() -> None:
    told = report(100, attempt=2, resume=RESUMED)
    before = training(job=job(running(2, step=108)), clusters=(cluster(2),), pods=pods(2), report=told)
    _, conditions = outcome(before)
    assert conditions["Progressing"][1] == "WaitingForFirstStep"
    assert conditions["Succeeded"][1] == "Starting"


def test_a_driver_that_has_not_loaded_yet_does_not_set_the_numbers_back() -> None:
    status = running(2, step=54, prompts={"handedOut": 440, "trained": 432, "inFlight": 8})
    before = training(job=job(status), clusters=(cluster(2),), pods=pods(2), report=report(0, attempt=2))
    after = apply(decide(before), before)
    assert after.step == 54
    assert after.prompts is not None
    assert after.prompts.handed_out == 440


@pytest.mark.parametrize(("budget", "reason"), [(3, "WithinBudget"), (2, "BudgetExceeded")])
def test_skipped_prompts_are_counted_with_their_causes(budget: int, reason: str) -> None:
    counts = PromptCounts(handed_out=4096, trained=4093, skipped=3, skipped_by={"RetryBudgetExhausted": [17, 90, 113]})
    before = training(job=job(running(), spec(prompts={"maxSkipped": budget})), report=report(5, prompts=counts))
    plan, conditions = outcome(before)
    status, got, message = conditions["PromptsSkipped"]
    assert (status, got) == ("True", reason)
    assert message.startswith("3 of 4096 prompts skipped")
    assert "RetryBudgetExhausted: 17, 90, 113" in message
    assert [event.reason for event in plan.events] == (["PromptsSkipped"] if reason == "BudgetExceeded" else [])


def test_a_spec_made_invalid_while_training_says_so_and_disturbs_nothing() -> None:
    edited = job(running(), spec(generation__parallelism={"tensor": 2}), generation=2)
    plan, conditions = outcome(training(job=edited))
    assert plan.actions == ()
    assert conditions["Validated"][:2] == ("False", "GenerationLayoutMismatch")
    assert conditions["Succeeded"][:2] == ("Unknown", "Running")
