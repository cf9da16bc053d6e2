"""Worlds and their plans, side by side in golden/decisions.yaml; `RLJOB_GOLDEN=write` writes it anew."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from rljob_api.preflight import PassedOver
from rljob_api.progress import CheckpointInfo, Handover, OldestPrompt, PromptCounts
from rljob_api.reasons import ConditionType
from rljob_operator.decide import decide
from rljob_operator.plan import CreateCluster, CreatePreflight, Plan
from rljob_operator.reading import read_status
from rljob_operator.times import format_time
from rljob_operator.world import Driver, Refusal, SaveAnswer, Stage, Unreachable, World

from .builders import (
    FINISHED,
    UNKNOWN,
    apply,
    before_cluster,
    cluster,
    counted,
    failed,
    found,
    fresh,
    job,
    merge,
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
from .test_render import GOLDEN, golden

SUSPENDED = spec(suspend=True)
SKIPPED = PromptCounts(handed_out=480, trained=477, skipped=3, skipped_by={"RetryBudgetExhausted": [17, 90, 113]})
STUCK: dict[str, Any] = {
    "oldest": [OldestPrompt(ordinal=17, age_seconds=312, tokens=40, answers=3)],
    "handover": Handover(phase="Draining", seconds=61, absent_ranks=[3]),
}
STALLED = running(step=5, lastStepTime=stamp(60), startTime=stamp(0))
SAVED = CheckpointInfo(step=50, path="runs/default/copy/step-000050-t000001")
WAITING = pod(ready=False, trouble="ImagePullBackOff: not found")

MOMENTS: dict[str, World] = {
    # One life in the order in which it is lived.
    "a new job": fresh(preflight_image="x"),
    "its attempt is counted": before_cluster(0),
    "the preflight waits for its node": before_cluster(pods=(preflight(trouble="Unschedulable: 0/3 nodes"),)),
    "the volume is empty": before_cluster(pods=(preflight(found("Fresh")),)),
    "pods start": world(clusters=(cluster(provisioned=None),), pods=(*pods()[:1], preflight(found("Fresh")))),
    "pods are ready": world(driver=UNKNOWN),
    "the driver loads": world(60, driver=Driver("RUNNING"), report=report(0), driver_seen=True),
    "it trains": training(report=report(60, checkpoint=SAVED)),
    "a worker's node is drained": training(pods=(pod(), pod("worker", deleting=True, disruption="EvictionByEvictionAPI"))),
    "its pods end": world(60, failed(), clusters=(), pods=(pod("worker", deleting=True),)),
    "it backs off": world(2, failed(), clusters=(), pods=()),
    "the next attempt": world(60, failed(), clusters=(), pods=()),
    "it resumes": before_cluster(status=counted(2), pods=(preflight(found(), 2),)),
    "it is done": training(driver=Driver("SUCCEEDED", 0), report=report(350, finished=FINISHED)),
    # What may go wrong.
    "an invalid spec": fresh(spec(generation__parallelism={"tensor": 2})),
    "an edit makes the spec invalid while it trains": training(job=job(running(), spec(moon=3))),
    "no claim": fresh(claim_exists=False),
    "no volume": fresh(preflight_image="x", claim_wait="ProvisioningFailed: quota"),
    "no KubeRay": fresh(kuberay_present=False),
    "somebody else's cluster has the name": before_cluster(stranger="RayJob theirs (uid 5)"),
    "KubeRay refuses the cluster": world(
        clusters=(cluster(provisioned=None, observed=False),), pods=(), warning="InvalidRayClusterSpec: no head"
    ),
    "a quota refuses the preflight": before_cluster(
        refusal=Refusal("403 Forbidden: exceeded quota", final=False, what="pod copy-1-preflight")
    ),
    "the newest checkpoint is damaged": before_cluster(
        pods=(preflight(found(passed_over=[PassedOver(name="step-000150-t000001", why="weights/0: 10 bytes, not 20")])),)
    ),
    "all checkpoints are damaged": before_cluster(
        pods=(preflight(found("Corrupt", passed_over=[PassedOver(name="step-000050-t000001", why="no MANIFEST.json")])),)
    ),
    "the checkpoint is of another model": before_cluster(
        pods=(preflight(found("Incompatible", differs=["spec.model.shape.layers: checkpoint has 4, spec says 2"])),)
    ),
    "the run's checkpoint is gone": before_cluster(
        status=counted(2, checkpoint={"step": 50, "path": SAVED.path}), pods=(preflight(found("Fresh"), 2),)
    ),
    "the preflight dies": before_cluster(pods=(preflight(ended=True, exit_code=1, message="no such module"),)),
    "an image does not exist": world(601, clusters=(cluster(provisioned=None),), pods=(WAITING, pod("worker"))),
    "the image is mended before it was pulled": world(
        20,
        job=job(counted(), spec(trainer__image="example.test/mended:1")),
        clusters=(cluster(provisioned=None),),
        pods=(WAITING, pod("worker")),
    ),
    "the head is lost": training(pods=(pod("worker"),), warning="DeletedHeadPod: exit 137"),
    "the head is killed for memory": training(
        pods=(pod("worker"), pod(ended=True, end_reason="OOMKilled", last_words="OOMKilled, exit code 137"))
    ),
    "the dashboard does not answer": training(driver=Unreachable("timeout"), report=report(5), seconds=200),
    "a rank is lost": training(driver=Driver("FAILED", 73, "rank 0 died")),
    "the loss is infinite": training(driver=Driver("FAILED", 78, "loss is nan")),
    "a checkpoint can't be loaded": world(
        60,
        driver=Driver("FAILED", 77, "0.distcp"),
        driver_seen=True,
        clusters=(cluster(preflight=found()),),
    ),
    "more prompts are skipped than allowed": training(report=report(60, prompts=SKIPPED)),
    "it stalls": training(400, job=job(STALLED), report=report(5, **STUCK)),
    "it stalls and only a warning is wanted": training(
        400, job=job(STALLED, spec(deadlines__onStall="Warn")), report=report(5, **STUCK)
    ),
    "no first step": training(9999, report=None),
    "the whole run takes too long": training(
        5000, job=job({**STALLED, "startTime": stamp(-5000)}, spec(deadlines__activeSeconds=9000))
    ),
    "restarts are used up": training(job=job(running(restartsSinceProgress=3)), driver=Driver("FAILED", 73, "x")),
    "a rule says no": training(
        job=job(running(), spec(failurePolicy={"rules": [{"name": "no", "action": "Fail", "onExitCodes": [73]}]})),
        driver=Driver("FAILED", 73, "x"),
    ),
    # Suspension.
    "suspend: a save is asked for": training(job=job(running(), SUSPENDED)),
    "suspend: it is saved": training(
        job=job(running(suspendTime=stamp(55)), SUSPENDED), save=SaveAnswer(accepted=True, saved=True, step=5)
    ),
    "suspend: pods end": world(
        70,
        job=job(running(suspendTime=stamp(55), attemptEndTime=stamp(60)), SUSPENDED),
        clusters=(),
        pods=(pod("worker", deleting=True),),
    ),
    "suspend: nothing is left": world(
        90, job=job(running(suspendTime=stamp(55), attemptEndTime=stamp(60)), SUSPENDED), clusters=(), pods=()
    ),
    "suspend: taken back": world(
        900, running(suspendTime=stamp(55), attemptEndTime=stamp(60), startTime=stamp(0)), clusters=(), pods=()
    ),
    # The end.
    "a finished run's cluster is kept": training(
        job=job(running(), spec(ttlSecondsAfterFinished=100)),
        driver=Driver("SUCCEEDED", 0),
        report=report(500, finished=FINISHED),
    ),
}


SETTLES_WITHIN = 3
"""Passes: a failed attempt is one, its pods another, the next attempt the third."""

QUIET = {"Valid", "NotSubmitted", "NotStarted", "NotChecked", "NotReported", "NotSuspended", "NotRestarting"}


def told(moment: World) -> dict[str, Any]:
    """What a plan comes to, for people: actions, events, conditions that say more than at the beginning, lasting fields."""
    plan = decide(moment)
    status = apply(plan, moment)
    wire = status.to_wire()
    lasting = ("attempt", "restarts", "restartsSinceProgress", "resume", "checkpoint", "unloadable", "finishTime")
    failure = wire.get("lastFailure") if status.last_failure != moment.job.status.last_failure else None
    return {
        "actions": [_action(one) for one in plan.actions],
        "conditions": {
            one.type: f"{one.status} {one.reason}: {one.message}" for one in status.conditions if one.reason not in QUIET
        },
        "events": [f"{one.type} {one.reason}: {one.message}" for one in plan.events],
        "status": {name: wire[name] for name in lasting if wire.get(name)} | ({"lastFailure": failure} if failure else {}),
        "again": None if plan.requeue_after is None else round(plan.requeue_after, 1),
    }


def after(plan: Plan, before: World) -> dict[str, Any]:
    """The status as the API server holds it after the plan's write."""
    merged = merge(before.job.raw_status, plan.status_patch or {})
    assert isinstance(merged, dict)
    return merged


def _action(action: Any) -> str:
    if isinstance(action, CreateCluster | CreatePreflight):
        return f"{type(action).__name__} {action.manifest['metadata']['name']}"
    values = (getattr(action, name, "") for name in ("attempt", "name", "cluster"))
    return " ".join([type(action).__name__, *(str(value) for value in values if value)])


def test_each_moment_has_its_golden_plan() -> None:
    golden(GOLDEN / "decisions.yaml", {name: told(moment) for name, moment in MOMENTS.items()})


@pytest.mark.parametrize("name", MOMENTS)
def test_each_plan_is_repeatable_and_settles(name: str) -> None:
    """The same moment with its status written: soon nothing is left to write, nobody is warned again, no pass is at once."""
    moment = MOMENTS[name]
    plan = decide(moment)
    assert plan == decide(moment)
    for _ in range(SETTLES_WITHIN):
        moment = replace(moment, job=replace(moment.job, status=apply(plan, moment), raw_status=after(plan, moment)))
        plan = decide(moment)
    assert plan.status_patch is None
    assert [one for one in plan.events if one.type == "Warning"] == []  # others tell of an action that was carried out
    assert plan.requeue_after is None or plan.requeue_after > 0


LASTING = {"CheckpointAvailable", "PromptsSkipped"}
"""What they tell of is on the volume, and holds over attempts."""
OF_THE_LAST_ATTEMPT = {"ClusterReady", "DriverRunning", "Progressing"}
"""They may tell how it ended until there is another."""


@pytest.mark.parametrize("name", MOMENTS)
def test_no_condition_outlives_what_it_tells_of(name: str) -> None:
    """Whatever an earlier pass has said: this one says anew what it sees, or says that there is nothing."""
    moment = MOMENTS[name]
    stale = [
        {"type": one, "status": "Unknown", "reason": "Stale", "message": "", "lastTransitionTime": stamp(0)}
        for one in ConditionType
    ]
    raw = {**moment.job.raw_status, "conditions": stale}
    moment = replace(moment, job=replace(moment.job, raw_status=raw, status=read_status(raw)))
    left = {one.type for one in apply(decide(moment), moment).conditions if one.reason == "Stale"}
    between = moment.job.stage is Stage.BETWEEN
    assert left <= LASTING | (OF_THE_LAST_ATTEMPT if between else set())


@pytest.mark.parametrize("name", MOMENTS)
def test_a_conditions_time_moves_with_its_status_alone(name: str) -> None:
    moment = MOMENTS[name]
    first = apply(decide(moment), moment)
    wire = first.to_wire()
    again = replace(moment, now=moment.now + timedelta(seconds=1), job=replace(moment.job, status=first, raw_status=wire))
    known = {one.type: one for one in first.conditions}
    moved = [one for one in apply(decide(again), again).conditions if one.last_transition_time != stamp_of(moment)]
    assert [one.type for one in moved if one.status == known[one.type].status] == []


def stamp_of(moment: World) -> str:
    return format_time(moment.now)
