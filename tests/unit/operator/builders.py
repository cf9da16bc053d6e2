"""Short ways to build what the operator observes; tests name only what they are about."""

from __future__ import annotations

import copy
import datetime
from typing import Any

from rljob_api.preflight import Chosen, PreflightReport
from rljob_api.progress import Finished, ProgressReport, PromptCounts, Resume
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus
from rljob_operator.decide import decide
from rljob_operator.plan import Plan
from rljob_operator.reading import read_job
from rljob_operator.render import spec_text
from rljob_operator.times import format_time
from rljob_operator.world import Cluster, Driver, DriverUnknown, Job, Pod, World

T0 = datetime.datetime(2026, 11, 29, 12, 0, 0, tzinfo=datetime.UTC)
UID = "11111111-2222-3333-4444-555555555555"

SPEC: dict[str, Any] = {
    "trainer": {"image": "localhost/rljob-workload:dev"},
    "model": {"preset": "tiny"},
    "generation": {"maxNewTokens": 4, "maxSequenceLength": 16},
    "data": {"builtin": "copy3"},
    "environment": {"builtin": "exactMatch"},
    "algorithm": {"grpo": {"promptsPerStep": 8, "generationsPerPrompt": 8, "microBatchSize": 64, "steps": 500}},
    "checkpoint": {"volume": {"claimName": "copy-checkpoints"}},
}


def at(seconds: float) -> datetime.datetime:
    """A moment after T0."""
    return T0 + datetime.timedelta(seconds=seconds)


def stamp(seconds: float) -> str:
    """The same, as Kubernetes writes it."""
    return format_time(at(seconds))


def spec(**changes: Any) -> dict[str, Any]:
    """The spec with values at dotted paths, such as `trainer.nodes` (dots as double underscores)."""
    value = copy.deepcopy(SPEC)
    for path, what in changes.items():
        *parents, last = path.split("__")
        place = value
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = what
    return value


def job(status: dict[str, Any] | None = None, spec: Any = None, generation: int = 1, name: str = "copy") -> Job:
    """An RLJob."""
    return read_job(
        {
            "metadata": {
                "namespace": "default",
                "name": name,
                "uid": UID,
                "generation": generation,
                "resourceVersion": "7",
            },
            "spec": SPEC if spec is None else spec,
            "status": status or {},
        }
    )


def running(attempt: int = 1, **status: Any) -> dict[str, Any]:
    """The status of a job whose attempt began at T0 and has its cluster."""
    return {"attempt": attempt, "attemptStartTime": stamp(0), "rayClusterName": f"copy-{attempt}", **status}


def failed(attempt: int = 1, seconds: float = 0, restarts: int = 1, **failure: Any) -> dict[str, Any]:
    """The status of a job whose attempt failed and will be followed by another."""
    return running(
        attempt,
        restarts=restarts,
        lastFailure={"attempt": attempt, "reason": "DriverFailed", "time": stamp(seconds), **failure},
    )


def cluster(attempt: int = 1, provisioned: float | None = 20, **changes: Any) -> Cluster:
    """The attempt's RayCluster."""
    values = {
        "name": f"copy-{attempt}",
        "uid": f"cluster-{attempt}",
        "owner_uid": UID,
        "created": T0,
        "deleting": False,
        "workers": 1,
        "provisioned": None if provisioned is None else at(provisioned),
        "observed": True,
        "spec": RLJobSpec.model_validate(SPEC),
    }
    return Cluster(**{**values, **changes})


def pod(role: str = "head", attempt: int = 1, **changes: Any) -> Pod:
    """A ready pod of the attempt."""
    values = {
        "name": f"copy-{attempt}-{role}",
        "cluster": f"copy-{attempt}",
        "job_uid": UID,
        "head": role == "head",
        "created": at(1),
        "ready": True,
        "ended": False,
        "deleting": False,
    }
    return Pod(**{**values, **changes})


def pods(attempt: int = 1) -> tuple[Pod, ...]:
    """Head and worker, ready."""
    return pod("head", attempt), pod("worker", attempt)


def counted(attempt: int = 1, **status: Any) -> dict[str, Any]:
    """The status of a job whose attempt began at T0 and has nothing yet."""
    return {"attempt": attempt, "attemptStartTime": stamp(0), "startTime": stamp(0), **status}


def found(outcome: str = "Resume", **changes: Any) -> PreflightReport:
    """A preflight's report."""
    chosen = None
    if outcome == "Resume":
        path = "runs/default/copy/step-000100-t000001"
        chosen = Chosen(path=path, step=100, token=1, verified="Sizes", handed_out=800)
    values: dict[str, Any] = {"outcome": outcome, "token": 2, "checkpoint": chosen}
    return PreflightReport(**{**values, **changes})


def preflight(told: PreflightReport | None = None, attempt: int = 1, spec_: Any = None, **changes: Any) -> Pod:
    """The attempt's preflight pod; ended where it has a report."""
    text = spec_text(RLJobSpec.model_validate(SPEC if spec_ is None else spec_))
    values = {
        "name": f"copy-{attempt}-preflight",
        "uid": f"preflight-{attempt}",
        "preflight": True,
        "cluster": "",
        "head": False,
        "ready": False,
        "spec_text": text,
        "ended": told is not None,
        "message": "" if told is None else told.model_dump_json(by_alias=True),
        "ended_at": None if told is None else at(8),
    }
    return pod("preflight", attempt, **{**values, **changes})


def before_cluster(seconds: float = 10, **changes: Any) -> World:
    """A moment of an attempt that is counted and has no cluster yet, with a preflight image."""
    values: dict[str, Any] = {
        "status": counted(),
        "clusters": (),
        "pods": (),
        "preflight_image": "example.test/rljob-operator:1",
    }
    return world(seconds, **{**values, **changes})


def report(step: int = 0, attempt: int = 1, **changes: Any) -> ProgressReport:
    """A report of the driver."""
    values: dict[str, Any] = {
        "name": "copy",
        "namespace": "default",
        "uid": UID,
        "attempt": attempt,
        "phase": "Training" if step else "Loading",
        "updated_time": stamp(0),
        "step": step,
        "total_steps": 500,
        "prompts": PromptCounts(handed_out=step * 8, trained=step * 8),
    }
    return ProgressReport(**{**values, **changes})


def world(seconds: float = 30, status: dict[str, Any] | None = None, **changes: Any) -> World:
    """A moment of a job whose attempt runs, unless told otherwise."""
    values: dict[str, Any] = {
        "now": at(seconds),
        "job": job(running() if status is None else status),
        "clusters": (cluster(),),
        "pods": pods(),
        "claim_exists": True,
        "kuberay_present": True,
    }
    return World(**{**values, **changes})


def training(seconds: float = 60, step: int = 5, **changes: Any) -> World:
    """A moment of a job that trains."""
    values: dict[str, Any] = {"driver": Driver("RUNNING"), "report": report(step), "driver_seen": True}
    return world(seconds, **{**values, **changes})


def apply(plan: Plan, before: World) -> RLJobStatus:
    """The status as it stands after the plan's write."""
    merged = merge(before.job.raw_status, plan.status_patch or {})
    return RLJobStatus.model_validate(merged)


def merge(value: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    out = dict(value) if isinstance(value, dict) else {}
    for key, part in patch.items():
        if part is None:
            out.pop(key, None)
        else:
            out[key] = merge(out.get(key), part)
    return out


def outcome(before: World) -> tuple[Plan, dict[str, tuple[str, str, str]]]:
    """The plan, and each condition's status, reason and message after it."""
    plan = decide(before)
    conditions = {one.type: (one.status, one.reason, one.message) for one in apply(plan, before).conditions}
    return plan, conditions


FINISHED = Finished(reason="TargetReached", message="validation reward 0.960 reached stopAtReward 0.95")
RESUMED = Resume(from_step=100, handed_out_before=800)
UNKNOWN = DriverUnknown()


def fresh(spec_: Any = None, status: dict[str, Any] | None = None, **changes: Any) -> World:
    """A job of which nothing exists."""
    values: dict[str, Any] = {"job": job(status, spec_), "clusters": (), "pods": ()}
    return world(0, **{**values, **changes})


def kinds(plan: Plan) -> list[type]:
    return [type(action) for action in plan.actions]
