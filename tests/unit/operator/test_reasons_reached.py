"""Every reason that the contract documents is one that the operator gives at some moment."""

from __future__ import annotations

from typing import Any, get_args

from rljob_api.preflight import Chosen, Outcome, PassedOver
from rljob_api.progress import PromptCounts
from rljob_api.reasons import EVENTS, REASONS, ConditionType
from rljob_operator.classify import DISRUPTIONS
from rljob_operator.decide import decide, defect
from rljob_operator.world import Driver, Refusal, Unreachable, World

from .builders import (
    FINISHED,
    UNKNOWN,
    apply,
    before_cluster,
    cluster,
    counted,
    failed,
    found,
    job,
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

COUNTED = {"attempt": 1, "attemptStartTime": stamp(0)}
SKIPPED = PromptCounts(handed_out=9, trained=8, skipped=1, skipped_by={"BadRow": [3]})
NO_RESTART = spec(failurePolicy={"maxRestarts": 0})
DISRUPTED_FAILS = spec(
    failurePolicy={"rules": [{"name": "x", "action": "Fail", "onReasons": [*DISRUPTIONS.values()]}]},
)
KNOWN = {"step": 1, "path": "runs/default/copy/step-000001-t000001"}
WITHOUT_LEDGER = Chosen(path="runs/default/copy/step-000001-t000001", step=1, token=1, verified="Sizes", ledger=False)
DONE: dict[str, Any] = {"driver": Driver("SUCCEEDED", 0)}


def last(**changes: Any) -> World:
    """A moment of an attempt that no restart follows."""
    no_restart = job(running(), spec(failurePolicy={"maxRestarts": 0}))
    return training(**{"job": no_restart, **changes})


MOMENTS = [
    world(0, {}, clusters=(), pods=()),
    world(0, {}, clusters=(), pods=(), claim_exists=False),
    world(0, {}, clusters=(), pods=(), kuberay_present=False),
    world(0, {}, clusters=(cluster(owner_uid="x"),), pods=()),
    world(0, job=job(spec=spec(generation__parallelism={"tensor": 2})), clusters=(), pods=()),
    world(9, COUNTED, clusters=(), pods=(), refusal=Refusal("422", final=True)),
    world(0, {}, clusters=(), pods=(), claim_wait="x"),
    before_cluster(),
    *(before_cluster(pods=(preflight(found(one)),)) for one in get_args(Outcome)),
    before_cluster(pods=(preflight(found(passed_over=[PassedOver(name="x", why="y")])),)),
    before_cluster(pods=(preflight(found(checkpoint=WITHOUT_LEDGER)),)),
    before_cluster(status=counted(checkpoint=KNOWN), pods=(preflight(found("Fresh")),)),
    before_cluster(job=job(counted(), NO_RESTART), pods=(preflight(spec_=NO_RESTART, ended=True),)),
    training(job=job(running(), spec(suspend=True))),
    world(60, job=job(failed(), spec(suspend=True)), clusters=(), pods=()),
    world(clusters=(cluster(provisioned=None),), pods=()),
    world(job=job(running(), spec(trainer__image="mended")), clusters=(cluster(provisioned=None),)),
    world(driver=UNKNOWN),
    world(driver=Driver("PENDING")),
    world(driver=Unreachable("x")),
    training(),
    training(report=report(1, prompts=SKIPPED)),
    training(job=job(running(), spec(prompts={"maxSkipped": 1})), report=report(1, prompts=SKIPPED)),
    training(**DONE, report=report(500, finished=FINISHED)),
    training(**DONE, step=500),
    training(job=job(running(), spec(ttlSecondsAfterFinished=9)), **DONE, step=500),
    training(driver=Driver("FAILED", 73)),
    world(60, failed(), clusters=(), pods=(pod(),)),
    world(1, failed(), clusters=(), pods=()),
    last(driver=Driver("FAILED", 73)),
    last(driver=UNKNOWN),
    last(pods=(pod("worker"),)),
    last(pods=(pod(),)),
    last(pods=(pod("worker"), pod(ended=True, end_reason="OOMKilled"))),
    *(
        training(job=job(running(), DISRUPTED_FAILS), pods=(pod(), pod("worker", deleting=True, disruption=one)))
        for one in DISRUPTIONS
    ),
    training(job=job(running(startTime=stamp(-9999)), spec(deadlines__activeSeconds=9000))),
    training(pods=(pod("worker"),)),
    training(pods=(pod(),)),
    last(seconds=9999, report=None, clusters=(cluster(provisioned=None),)),
    last(seconds=9999, report=None),
    last(
        seconds=9999,
        job=job(running(step=5, lastStepTime=stamp(60)), spec(failurePolicy={"maxRestarts": 0})),
        report=report(5),
    ),
]


def test_every_event_is_sent() -> None:
    suspended = job(running(suspendTime=stamp(0), attemptEndTime=stamp(0), startTime=stamp(0)))
    edited = job(running(finishTime=stamp(9), observedGeneration=1), generation=2)
    moments = [*MOMENTS, *(world(60, job=one, clusters=(), pods=()) for one in (suspended, edited))]
    sent = {(one.type, one.reason) for moment in moments for one in decide(moment).events}
    assert {(one.type, one.name) for one in EVENTS.values()} - sent == set()
    known = EVENTS.keys() | {name for _, name in REASONS}
    assert {reason for _, reason in sent} <= known


def test_every_reason_is_reached() -> None:
    reached = {(type_, reason) for moment in MOMENTS for type_, (_, reason, _) in outcome(moment)[1].items()}
    reached |= {(one.type, one.reason) for one in apply(defect(training(), ValueError("x")), training()).conditions}
    # The other findings of `judge` come the same way as GenerationLayoutMismatch.
    judged = {(type_.value, name) for type_, name in REASONS if type_ is ConditionType.VALIDATED}
    assert sorted({(type_.value, name) for type_, name in REASONS} - judged - reached) == []
