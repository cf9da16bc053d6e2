"""An RLJob that is deleted leaves nothing behind, whatever it was doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from dev.case import Case

from rljob_api import names
from rljob_api.reasons import ConditionType

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NOWHERE = {"spec": {"nodeSelector": {"rljob.dev/test": "nowhere"}}}


def waiting_for_its_claim(case: Case) -> None:
    case.apply(checkpoint__volume={"claimName": "nowhere"})
    case.shows(ConditionType.CLUSTER_READY, "VolumeMissing")


def looking_at_the_volume(case: Case) -> None:
    case.apply(trainer__template=NOWHERE)
    case.shows(ConditionType.CHECKPOINT_AVAILABLE, "Checking")


def provisioning(case: Case) -> None:
    case.apply(trainer__resources={"cpu": "512", "memory": "3Gi"})
    case.shows(ConditionType.CLUSTER_READY, "PodsPending")


def worker_waiting_for_its_head(case: Case) -> None:
    """Its first container is then a shell of KubeRay's; its place must not be held for a save that nobody makes."""
    case.apply(
        trainer__head={"resources": {"cpu": "512", "memory": "2Gi"}},
        deadlines={"saveSeconds": 600, "stallSeconds": 900},
    )
    deadline = time.monotonic() + 60
    while not any(waits(pod) for pod in case.pods("worker")):
        assert time.monotonic() < deadline, f"no worker waits for its head\n{case.story()}"
        time.sleep(0.5)


def waits(pod: dict[str, Any]) -> bool:
    return any("running" in one["state"] for one in pod["status"].get("initContainerStatuses", []))


def starting(case: Case) -> None:
    case.apply(algorithm__grpo__steps=100_000)
    case.shows(ConditionType.DRIVER_RUNNING, "Running")


def training(case: Case) -> None:
    case.apply(algorithm__grpo__steps=100_000)
    case.reaches(5)


def between_attempts(case: Case) -> None:
    case.apply(
        trainer__image="localhost/no-such-image:dev",
        deadlines__provisioningSeconds=10,
        failurePolicy={"maxRestarts": 3, "backoffSeconds": 300},
    )
    case.shows(ConditionType.RESTARTING, "BackingOff")


def suspended(case: Case) -> None:
    case.apply(suspend=True)
    case.shows(ConditionType.SUSPENDED, "SuspendedByUser")


def finished_and_kept(case: Case) -> None:
    case.apply(algorithm__grpo__steps=2, ttlSecondsAfterFinished=3600)
    case.ends()


QUICK: tuple[Callable[[Case], None], ...] = (
    waiting_for_its_claim,
    looking_at_the_volume,
    provisioning,
    worker_waiting_for_its_head,
)
LONG: tuple[Callable[[Case], None], ...] = (starting, training, between_attempts, suspended, finished_and_kept)
PHASES: list[Any] = [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in LONG)]


@pytest.mark.slow
def test_deleted_in_training_has_saved_first(make_case: Callable[..., Case]) -> None:
    """A job of the same name goes on from the step that the deletion found."""
    first = make_case()
    first.apply(algorithm__grpo__steps=100_000)
    step = first.reaches(22)["status"]["step"]
    first.delete()
    second = make_case()
    second.apply(algorithm__grpo__steps=100_000)
    job = second.reaches(step + 1)
    assert job["status"]["resume"]["fromStep"] >= step
    assert job["status"]["prompts"].get("trainedTwice", 0) == 0


@pytest.mark.parametrize("phase", PHASES, ids=lambda one: one.__name__)
def test_deleted_while(case: Case, phase: Callable[[Case], None]) -> None:
    phase(case)
    case.kubectl("delete", names.RESOURCE, case.name, "--wait=true")
    case.nothing_is_left(120)
