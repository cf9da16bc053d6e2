"""Before any pod that costs something exists, the checkpoint volume was looked at, and what it holds goes with the spec."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from rljob_api.preflight import PassedOver, PreflightReport
from rljob_api.spec import RLJobSpec
from rljob_api.transitions import check_update, how_to_edit
from rljob_operator.decide import decide
from rljob_operator.plan import CreateCluster, CreatePreflight, DeletePod, SubmitDriver
from rljob_operator.reading import read_pod
from rljob_operator.render_preflight import preflight_pod
from rljob_operator.world import Driver, Refusal

from .builders import (
    UID,
    UNKNOWN,
    apply,
    at,
    before_cluster,
    cluster,
    counted,
    found,
    fresh,
    job,
    kinds,
    outcome,
    pods,
    preflight,
    running,
    spec,
    stamp,
    training,
    world,
)
from .test_render import GOLDEN, golden

TEMPLATE = {
    "metadata": {"labels": {"team": "a"}},
    "spec": {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsUser": 7, "fsGroup": 8},
        "hostNetwork": True,
        "initContainers": [{"name": "setup", "image": "x"}],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": "A", "value": "b"}],
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
            },
            {"name": "logs", "image": "example.test/logs:1"},
        ],
    },
}


# ---- The pod ----


def test_the_pod_is_the_golden_one_and_takes_of_the_template_where_it_may_run() -> None:
    source = {"claimName": "other", "path": "runs/a/b/step-000001-t000001"}
    wanted = spec(trainer__template=TEMPLATE, checkpoint__from=source)
    ours = job(counted(unloadable=["step-000100-t000001"]), wanted)
    manifest = preflight_pod(ours, RLJobSpec.model_validate(wanted), "example.test/rljob-operator:1")
    golden(GOLDEN / "preflight.yaml", manifest)
    inner = manifest["spec"]
    assert inner["automountServiceAccountToken"] is False
    assert "hostNetwork" not in inner
    assert "initContainers" not in inner
    assert [one["name"] for one in inner["containers"]] == ["preflight"]
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in inner["containers"][0]["volumeMounts"]}
    assert mounts == {"/rljob/volume": False, "/rljob/source": True, "/tmp": False, "/models": True}
    assert "nvidia.com/gpu" not in yaml.safe_dump(inner["containers"][0]["resources"])


def test_a_pod_of_the_api_server_is_read_with_its_report_and_its_end() -> None:
    text = found().model_dump_json(by_alias=True)
    ended = {"reason": "Completed", "exitCode": 0, "message": text, "finishedAt": "2026-11-29T12:00:08Z"}
    (create,) = decide(before_cluster()).actions
    assert isinstance(create, CreatePreflight)
    made = json.loads(json.dumps(create.manifest))
    made["metadata"] |= {"uid": "preflight-1", "creationTimestamp": "2026-11-29T12:00:01Z"}
    made["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "preflight", "state": {"terminated": ended}}]}
    pod = read_pod(made)
    assert (pod.preflight, pod.ended, pod.exit_code, pod.ended_at, pod.job_uid) == (True, True, 0, at(8), UID)
    plan = decide(before_cluster(pods=(pod,)))
    assert kinds(plan) == [CreateCluster]


# ---- Before it ----


def test_nothing_else_is_made_before_the_volume_was_looked_at() -> None:
    plan, conditions = outcome(before_cluster())
    assert kinds(plan) == [CreatePreflight]
    assert conditions["Succeeded"][:2] == ("Unknown", "Checking")
    assert conditions["CheckpointAvailable"][:2] == ("Unknown", "Checking")


def test_an_unbound_claim_is_waited_for_with_its_own_words() -> None:
    plan, conditions = outcome(fresh(preflight_image="x", claim_wait="ProvisioningFailed: quota"))
    assert plan.actions == ()
    assert conditions["ClusterReady"][1] == "VolumeUnbound"
    assert "copy-checkpoints has no volume yet: ProvisioningFailed: quota" in conditions["ClusterReady"][2]


def test_a_claim_that_waits_for_its_first_pod_gets_one_of_the_runs_own() -> None:
    plan, _ = outcome(before_cluster(claim_unused=True))
    assert kinds(plan) == [CreateCluster]  # it holds nothing, and its first pod chooses the node it will be on


def test_without_an_image_the_driver_looks_itself() -> None:
    plan, _ = outcome(before_cluster(preflight_image=""))
    assert kinds(plan) == [CreateCluster]
    (submit,) = decide(world(driver=UNKNOWN)).actions
    assert isinstance(submit, SubmitDriver)
    assert "RLJOB_PREFLIGHT" not in submit.environment


def test_a_pod_that_is_refused_shows_by_its_name_and_is_tried_again() -> None:
    refusal = Refusal("403 Forbidden: exceeded quota", final=False, what="pod copy-1-preflight")
    plan, conditions = outcome(before_cluster(refusal=refusal))
    assert kinds(plan) == [CreatePreflight]
    assert conditions["ClusterReady"][2] == "pod copy-1-preflight is refused: 403 Forbidden: exceeded quota"
    _, conditions = outcome(before_cluster(refusal=refusal, pods=(preflight(),)))
    assert conditions["ClusterReady"][1] == "NotCreated"  # it is there by now


# ---- While it runs ----


def test_a_pod_that_starts_is_waited_for_with_its_trouble() -> None:
    plan, conditions = outcome(before_cluster(pods=(preflight(trouble="ImagePullBackOff: x"),)))
    assert plan.actions == ()
    assert conditions["Succeeded"][2] == "looking at the checkpoint volume; copy-1-preflight: ImagePullBackOff: x"


def test_a_pod_that_never_starts_fails_the_attempt_at_the_deadline() -> None:
    before = before_cluster(700, pods=(preflight(trouble="Unschedulable: 0/3 nodes", created=at(5)),))
    plan, _ = outcome(before)
    failure = apply(plan, before).last_failure
    assert failure is not None
    assert failure.reason == "ProvisioningDeadlineExceeded"
    assert "Unschedulable: 0/3 nodes" in failure.message
    assert plan.actions == (DeletePod("copy-1-preflight", "preflight-1"),)


def test_a_pod_that_judges_an_older_spec_is_replaced() -> None:
    edited = job(counted(), spec(trainer__seed=5))
    plan, _ = outcome(before_cluster(job=edited, pods=(preflight(found()),)))
    assert plan.actions == (DeletePod("copy-1-preflight", "preflight-1"),)


# ---- What it found ----


def test_what_was_found_reaches_the_status_the_cluster_and_the_driver() -> None:
    before = before_cluster(pods=(preflight(found()),))
    plan, conditions = outcome(before)
    (create,) = plan.actions
    assert isinstance(create, CreateCluster)
    status = apply(plan, before)
    assert status.resume is not None
    assert (status.resume.from_step, status.resume.handed_out_before) == (100, 800)
    assert status.checkpoint is not None
    assert (status.checkpoint.step, status.checkpoint.path) == (100, "runs/default/copy/step-000100-t000001")
    assert status.checkpoint_volume is not None
    assert conditions["CheckpointAvailable"][:2] == ("True", "Available")
    told = PreflightReport.model_validate_json(create.manifest["metadata"]["annotations"]["rljob.dev/preflight"])
    assert told == found()
    (submit,) = decide(world(driver=UNKNOWN, clusters=(cluster(preflight=told),))).actions
    assert isinstance(submit, SubmitDriver)
    assert PreflightReport.model_validate_json(submit.environment["RLJOB_PREFLIGHT"]) == told


def test_the_pod_goes_when_the_cluster_carries_its_report() -> None:
    assert decide(training(pods=(*pods(), preflight(found())))).actions == (DeletePod("copy-1-preflight", "preflight-1"),)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": spec(suspend=True)},
        {"spec": spec(trainer__moon=1)},
        {"status": {**counted(), "finishTime": stamp(9)}},
    ],
    ids=["suspended", "invalid", "ended"],
)
def test_a_look_that_is_over_is_no_longer_told(changes: dict[str, Any]) -> None:
    first = before_cluster()
    status = {**changes.pop("status", counted()), "conditions": apply(decide(first), first).to_wire()["conditions"]}
    later = before_cluster(20, job=job(status, changes.get("spec")), pods=())
    assert outcome(later)[1]["CheckpointAvailable"][:2] == ("Unknown", "NotChecked")


def test_an_empty_volume_starts_at_step_0() -> None:
    plan, conditions = outcome(before_cluster(pods=(preflight(found("Fresh")),)))
    assert kinds(plan) == [CreateCluster]
    assert conditions["CheckpointAvailable"][:2] == ("False", "NoneYet")


def test_a_checkpoint_that_was_passed_over_is_named() -> None:
    passed = [PassedOver(name="step-000150-t000001", why="file weights/0.distcp: 10 bytes, manifest says 20")]
    plan, conditions = outcome(before_cluster(pods=(preflight(found(passed_over=passed)),)))
    assert kinds(plan) == [CreateCluster]
    assert conditions["CheckpointAvailable"][:2] == ("True", "PassedOver")
    assert "passed over: step-000150-t000001: file weights/0.distcp: 10 bytes" in conditions["CheckpointAvailable"][2]


def test_a_checkpoint_without_a_ledger_says_what_is_at_risk() -> None:
    chosen = found().checkpoint
    assert chosen is not None
    legacy = chosen.model_copy(update={"ledger": False, "at_risk": 12})
    _, conditions = outcome(before_cluster(pods=(preflight(found(checkpoint=legacy)),)))
    assert conditions["CheckpointAvailable"][:2] == ("True", "WithoutLedger")
    assert "up to 12 prompts" in conditions["CheckpointAvailable"][2]


def test_another_jobs_checkpoint_is_not_taken_for_our_own() -> None:
    chosen = found().checkpoint
    assert chosen is not None
    theirs = chosen.model_copy(update={"path": "runs/default/other/step-000100-t000001"})
    before = before_cluster(pods=(preflight(found(checkpoint=theirs)),))
    assert apply(decide(before), before).checkpoint is None


BLOCKING: dict[str, tuple[PreflightReport, str]] = {
    "ExistingRefused": (found("OnExisting", message="step 50 is there and checkpoint.onExisting is Refuse"), "is Refuse"),
    "ForeignRun": (found("Foreign", message="belongs to default/other"), "default/other"),
    "Incompatible": (
        found("Incompatible", differs=["spec.model.shape.layers: checkpoint has 4, spec says 2; set it back"]),
        "checkpoint has 4, spec says 2; set it back",
    ),
    "Corrupt": (found("Corrupt", passed_over=[PassedOver(name="step-000050-t000001", why="no MANIFEST.json")]), "MANIFEST"),
    "VolumeUnusable": (found("Unusable", message="read-only file system"), "read-only"),
}


@pytest.mark.parametrize("reason", BLOCKING)
def test_what_does_not_go_with_the_spec_makes_no_pod_and_says_why(reason: str) -> None:
    told, words = BLOCKING[reason]
    before = before_cluster(pods=(preflight(told),))
    plan, conditions = outcome(before)
    assert plan.actions == ()
    assert conditions["CheckpointAvailable"][:2] == ("False", reason)
    assert words in conditions["CheckpointAvailable"][2]
    assert conditions["Succeeded"][:2] == ("Unknown", "Blocked")
    assert words in conditions["Succeeded"][2]
    assert [(event.type, event.reason) for event in plan.events] == [("Warning", reason)]
    assert plan.requeue_after == pytest.approx(118)
    again = before_cluster(20, pods=(preflight(told),), status=apply(plan, before).to_wire())
    assert decide(again).events == ()


SHAPE = "spec.model.shape.layers: checkpoint has 2, spec says 4; set it back"
DATA = "spec.data.seed: checkpoint has 0, spec says 5; set it back"
DTYPE = "spec.model.dtype: checkpoint has float32, spec says bfloat16; set it back"
FIXED = "spec.model.shape can never be edited: delete this RLJob and create it again with the right value"
SIZES = "spec.data can be edited while spec.suspend is true"


@pytest.mark.parametrize(
    ("differs", "advice"),
    [([SHAPE], {FIXED}), ([DATA], {SIZES}), ([DTYPE], set()), ([SHAPE, DATA, DTYPE], {FIXED, SIZES})],
    ids=["shape", "data", "dtype", "all"],
)
def test_what_does_not_fit_is_said_once_with_what_the_api_lets_one_do(differs: list[str], advice: set[str]) -> None:
    _, conditions = outcome(before_cluster(pods=(preflight(found("Incompatible", message="x", differs=differs)),)))
    message = conditions["CheckpointAvailable"][2]
    assert [message.count(line) for line in differs] == [1] * len(differs)
    assert {one for one in (FIXED, SIZES) if one in message} == advice
    assert "looked at again when the spec changes, and every 120 s" in conditions["Succeeded"][2]


@pytest.mark.parametrize(
    ("field", "frozen"), [("spec.model.shape", "for ever"), ("spec.data", "running"), ("spec.model.dtype", "")]
)
def test_the_advice_on_an_edit_is_what_the_api_holds(field: str, frozen: str) -> None:
    change = {"spec.model.shape": {"layers": 4}, "spec.data": {"builtin": "copyv"}, "spec.model.dtype": "bfloat16"}[field]
    old, new = spec(), spec(**{field.removeprefix("spec.").replace(".", "__"): change})
    assert bool(check_update(old, new, 1)) == bool(frozen)
    assert bool(check_update(old | {"suspend": True}, new, 1)) == (frozen == "for ever")
    said = " ".join(how_to_edit([f"{field}.x"]))
    assert ("never be edited" in said, "while spec.suspend is true" in said) == (frozen == "for ever", frozen == "running")


def test_a_checkpoint_that_does_not_fit_is_known_all_the_same() -> None:
    chosen = found().checkpoint
    known = {"step": 50, "path": "runs/default/copy/step-000050-t000001"}
    told = preflight(found("Incompatible", checkpoint=chosen, differs=[SHAPE]), 2)
    before = before_cluster(status=counted(2, step=55, checkpoint=known), pods=(told,))
    blocked = apply(decide(before), before)
    assert blocked.checkpoint is not None
    assert (blocked.step, blocked.checkpoint.step) == (100, 100)
    assert "step-000100" in blocked.checkpoint.path
    asleep = {**blocked.to_wire(), "attemptEndTime": stamp(20), "suspendTime": stamp(20)}
    _, conditions = outcome(world(30, job=job(asleep, spec(suspend=True)), clusters=(), pods=()))
    assert "the next attempt goes on from step 100 or later" in conditions["Suspended"][2]


def test_a_start_from_scratch_after_damage_takes_a_new_job_where_a_checkpoint_is_known() -> None:
    known = {"step": 50, "path": "runs/default/copy/step-000050-t000001"}
    before = before_cluster(status=counted(checkpoint=known), pods=(preflight(found("Corrupt", message="x")),))
    assert "delete it, create it again" in outcome(before)[1]["CheckpointAvailable"][2]


@pytest.mark.parametrize(("told", "step"), [(found(), 100), (found("Fresh"), 0)])
def test_the_status_stands_at_the_step_that_is_gone_on_from(told: PreflightReport, step: int) -> None:
    before = before_cluster(status=counted(step=108), pods=(preflight(told),))
    assert apply(decide(before), before).step == step


def test_an_attempt_is_told_before_the_volume_is_looked_at_without_a_cluster_that_may_never_be() -> None:
    (event,) = decide(fresh(preflight_image="x")).events
    assert event.message == "attempt 1 is counted; the volume is looked at, then comes RayCluster copy-1"


def test_a_refusal_is_looked_at_again_now_and_then_and_stays_said_meanwhile() -> None:
    told = BLOCKING["Corrupt"][0]
    first = before_cluster(pods=(preflight(told),))
    status = apply(decide(first), first).to_wire()
    plan, conditions = outcome(before_cluster(129, status=status, pods=(preflight(told),)))
    assert plan.actions == (DeletePod("copy-1-preflight", "preflight-1"),)
    plan, conditions = outcome(before_cluster(130, status=status))
    assert kinds(plan) == [CreatePreflight]
    assert conditions["Succeeded"][1] == "Blocked"
    plan, conditions = outcome(before_cluster(140, status=status, pods=(preflight(found(), ended_at=at(139)),)))
    assert kinds(plan) == [CreateCluster]
    assert conditions["Succeeded"][1] == "Provisioning"


def test_a_refusal_waits_for_people_longer_than_any_deadline_for_pods() -> None:
    told = BLOCKING["Corrupt"][0]
    before = before_cluster(5000, pods=(preflight(told, created=at(4990), ended_at=at(4995)),))
    assert apply(decide(before), before).last_failure is None


@pytest.mark.parametrize("told", [found("Fresh"), found()], ids=["empty", "another run's"])
def test_a_volume_without_the_checkpoint_that_the_status_knows_is_not_started_over(told: PreflightReport) -> None:
    if told.checkpoint is not None:
        theirs = told.checkpoint.model_copy(update={"path": "runs/default/other/step-000100-t000001"})
        told = told.model_copy(update={"checkpoint": theirs})
    known = {"step": 50, "path": "runs/default/copy/step-000050-t000001"}
    plan, conditions = outcome(before_cluster(status=counted(2, checkpoint=known), pods=(preflight(told, 2),)))
    assert plan.actions == ()
    assert conditions["CheckpointAvailable"][:2] == ("False", "Gone")
    assert "runs/default/copy/step-000050-t000001 of this run is not on the volume any more" in conditions["Succeeded"][2]


def test_a_refusal_says_what_the_preflight_found_also_where_the_status_knows_a_checkpoint() -> None:
    known = {"step": 50, "path": "runs/default/copy/step-000050-t000001"}
    before = before_cluster(status=counted(2, checkpoint=known), pods=(preflight(found("Corrupt"), 2),))
    assert outcome(before)[1]["CheckpointAvailable"][:2] == ("False", "Corrupt")


def test_a_checkpoint_of_another_job_is_not_missed() -> None:
    """It was begun with, before the run had its own; nobody promised to keep it."""
    theirs = {"step": 50, "path": "runs/default/other/step-000050-t000001"}
    before = before_cluster(status=counted(2, checkpoint=theirs), pods=(preflight(found("Fresh"), 2),))
    assert kinds(decide(before)) == [CreateCluster]


# ---- How it can fail ----


def test_a_pod_without_a_report_is_a_failed_attempt_with_its_last_words() -> None:
    died = preflight(ended=True, exit_code=1, message="Traceback: no such module", last_words="Error, exit code 1")
    before = before_cluster(pods=(died,))
    plan, _ = outcome(before)
    failure = apply(plan, before).last_failure
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.action) == ("PreflightFailed", 1, "Restart")
    assert "Traceback: no such module" in failure.message


def test_a_pod_that_kubernetes_ended_is_made_again_in_the_same_attempt() -> None:
    plan, _ = outcome(before_cluster(pods=(preflight(ended=True, disruption="EvictionByEvictionAPI"),)))
    assert plan.actions == (DeletePod("copy-1-preflight", "preflight-1"),)


def test_a_checkpoint_that_could_not_be_loaded_is_passed_over_by_name_until_there_is_progress() -> None:
    status = running(2, unloadable=["step-000150-t000001"])
    tried = (cluster(2, preflight=found()),)
    before = training(job=job(status), clusters=tried, pods=pods(2), driver=Driver("FAILED", 77, "x"), report=None)
    after = apply(decide(before), before)
    assert after.unloadable == ["step-000150-t000001", "step-000100-t000001"]
    (create,) = decide(before_cluster(job=job(counted(3, unloadable=after.unloadable)))).actions
    assert isinstance(create, CreatePreflight)
    environment = {one["name"]: one["value"] for one in create.manifest["spec"]["containers"][0]["env"]}
    assert environment["RLJOB_UNLOADABLE"] == "step-000150-t000001,step-000100-t000001"


# ---- Leftovers ----


def test_a_preflight_of_an_earlier_attempt_goes_before_the_next_attempt_starts() -> None:
    status: dict[str, Any] = {**counted(), "attemptEndTime": at(50).isoformat()}
    plan, conditions = outcome(before_cluster(60, status=status, pods=(preflight(found()),)))
    assert plan.actions == (DeletePod("copy-1-preflight", "preflight-1"),)
    assert conditions["Restarting"][1] == "WaitingForPodsToExit"
