"""Preflight, suspension and the end of a run, on a real API server with a real KubeRay; the tests play the kubelet."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from rljob_api.preflight import Chosen, PreflightReport
from rljob_api.progress import Finished, ProgressReport

from .conftest import Space, condition, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

POD = "copy-1-preflight"
IMAGE = {"RLJOB_PREFLIGHT_IMAGE": "example.test/rljob-operator:1"}
FRESH = PreflightReport(outcome="Fresh", token=1)
REFUSED = PreflightReport(
    outcome="Incompatible", differs=["spec.model.shape.layers: checkpoint has 4, spec says 2; set it to 4"]
)


async def pods(space: Space) -> set[str]:
    """Names of the pods that no deletion has reached."""
    return {one["metadata"]["name"] for one in await space.items("pods") if "deletionTimestamp" not in one["metadata"]}


async def preflight_ends(space: Space, name: str, told: PreflightReport) -> None:
    """Play the kubelet: the preflight's container has ended and left its report."""

    async def made() -> bool:
        return name in await pods(space)

    await eventually(made, lambda: f"no pod {name}{space.logs()}")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {
        "exitCode": 0,
        "reason": "Completed",
        "message": told.model_dump_json(by_alias=True, exclude_none=True),
        "startedAt": now,
        "finishedAt": now,
    }
    container = {
        "name": "preflight",
        "ready": False,
        "restartCount": 0,
        "image": "x",
        "imageID": "x",
        "state": {"terminated": ended},
    }
    await space.set_pod_status(name, {"phase": "Succeeded", "containerStatuses": [container]})


async def progress(space: Space, attempt: int, **changes: Any) -> ProgressReport:
    values: dict[str, Any] = {
        "name": "copy",
        "namespace": space.name,
        "uid": (await space.job())["metadata"]["uid"],
        "attempt": attempt,
        "phase": "Training",
        "updated_time": "2026-01-01T00:00:00Z",
        "step": 5,
        "total_steps": 500,
    }
    return ProgressReport(**{**values, **changes})


async def test_no_pod_of_a_run_exists_before_its_volume_was_looked_at(space: Space, spec: dict[str, Any]) -> None:
    await space.claim()
    space.start_operator(**IMAGE)
    await space.apply(spec)
    await preflight_ends(space, POD, REFUSED)
    found = await space.condition("CheckpointAvailable", "Incompatible")
    assert "checkpoint has 4, spec says 2; set it to 4" in found["message"]
    job = await space.until(lambda job: condition(job, "Succeeded").get("reason") == "Blocked", "blocked")
    assert job["status"]["attempt"] == 1
    assert (await space.items("rayclusters"), await pods(space)) == ([], {POD})

    uid = next(one["metadata"]["uid"] for one in await space.items("pods"))
    await space.apply({**spec, "trainer": {**spec["trainer"], "seed": 5}})

    async def another() -> bool:
        return any(one["metadata"]["uid"] != uid for one in await space.items("pods"))

    await eventually(another, lambda: f"the edited spec is not looked at{space.logs()}")
    path = f"runs/{space.name}/copy/step-000100-t000001"
    chosen = Chosen(path=path, step=100, token=1, verified="Sizes", handed_out=800)
    told = PreflightReport(outcome="Resume", token=2, checkpoint=chosen)
    await preflight_ends(space, POD, told)
    await space.pods_get_ready()
    job = await space.until(lambda job: condition(job, "DriverRunning").get("reason") == "Running", "running")
    assert job["status"]["resume"]["fromStep"] == 100
    assert job["status"]["checkpoint"]["path"] == path
    assert job["status"]["checkpointVolume"] == {"claimName": "copy-checkpoints", "subPath": ""}
    (post,) = space.ray.posts
    environment = post["runtime_env"]["env_vars"]
    assert PreflightReport.model_validate_json(environment["RLJOB_PREFLIGHT"]) == told
    assert json.loads(environment["RLJOB_SPEC"])["trainer"]["seed"] == 5

    async def gone() -> bool:
        return POD not in await pods(space)

    await eventually(gone, lambda: f"the preflight's pod stays{space.logs()}")


async def test_a_suspension_saves_ends_all_pods_and_goes_on_as_another_attempt(space: Space, spec: dict[str, Any]) -> None:
    await space.claim()
    space.start_operator(**IMAGE)
    await space.apply(spec)
    await preflight_ends(space, POD, FRESH)
    await space.pods_get_ready()
    await space.condition("DriverRunning", "Running")
    space.ray.save_status = 202
    await space.apply({**spec, "suspend": True})

    async def asked() -> bool:
        return len(space.ray.saves) > 1

    await eventually(asked, lambda: f"no save is asked for{space.logs()}")
    assert len(await pods(space)) == 2
    space.ray.save_status = 200
    await space.condition("Suspended", "SuspendedByUser")
    assert (await pods(space), await space.items("rayclusters")) == (set(), [])
    await space.apply(spec)
    await preflight_ends(space, "copy-2-preflight", FRESH)
    await space.pods_get_ready("copy-2")
    job = await space.until(lambda job: condition(job, "DriverRunning").get("reason") == "Running", "running")
    assert (job["status"]["attempt"], job["status"]["restarts"]) == (2, 0)


async def test_a_finished_run_keeps_its_head_and_no_worker(space: Space, spec: dict[str, Any]) -> None:
    await space.claim()
    space.start_operator()
    await space.apply({**spec, "ttlSecondsAfterFinished": 600})
    await space.pods_get_ready()
    await space.condition("DriverRunning", "Running")
    done = Finished(reason="Completed", message="all steps done")
    space.ray.reports["copy-1"] = await progress(space, 1, step=500, phase="Finished", finished=done)
    space.ray.end("copy-1", "SUCCEEDED", 0)
    await space.condition("ClusterReady", "KeptAfterFinish")

    async def only_the_head() -> bool:
        left = await pods(space)
        return len(left) == 1 and "head" in left.pop()

    await eventually(only_the_head, lambda: f"workers stay, or the head goes{space.logs()}", 60)
