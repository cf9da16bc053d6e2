"""What happens on the checkpoint volume: full, damaged, written by a ghost, of another model."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from dev.case import SMALL, Case, Job
from dev.kube import ROOT, Kubectl, run

from rljob_api import names
from rljob_api.reasons import ConditionType
from tests.e2e.conftest import EMBEDDED

from .test_pods import lossless

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

Hand = Callable[..., str]

CLAIM = "copy-checkpoints"
SHORT = 12
"""Steps of the first part of a run; a checkpoint every 5 and one at the end."""
PROMPTS_PER_STEP = int(SMALL["algorithm.grpo.promptsPerStep"])

_HELPERS = f"""
import json, pathlib, sys
run = next(pathlib.Path("{names.VOLUME_MOUNT_PATH}/runs").glob("*/*"))
steps = sorted(path for path in run.glob("step-*") if path.is_dir())
def damage(step):
    largest = max((one for one in step.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    return step.name
"""


@pytest.fixture
def hand(kubectl: Kubectl) -> Iterator[Hand]:
    """Runs Python on the volume, in a pod of its own; `run` and `steps` are there to use."""
    image = yaml.safe_load((ROOT / "examples/copy.yaml").read_text())["spec"]["trainer"]["image"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "hand"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
            "containers": [
                {
                    "name": "hand",
                    "image": image,
                    "command": ["sleep", "3600"],
                    "volumeMounts": [{"name": "volume", "mountPath": names.VOLUME_MOUNT_PATH}],
                }
            ],
            "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    }
    there = False

    def call(code: str) -> str:
        nonlocal there
        if not there:
            kubectl("apply", "-f", "-", given=yaml.safe_dump(pod))
            kubectl("wait", "--for=condition=Ready", "pod/hand", "--timeout=100s")
            there = True
        return kubectl("exec", "hand", "--", "python", "-c", _HELPERS + textwrap.dedent(code)).strip()

    yield call
    if there:
        kubectl("delete", "pod", "hand", "--wait=false")


def suspended(case: Case) -> Job:
    """Bring a run to rest with a checkpoint: suspending saves first."""
    case.apply(algorithm__grpo__steps=100_000)
    case.reaches(SHORT)
    case.kubectl("patch", names.RESOURCE, case.name, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    case.shows(ConditionType.SUSPENDED, "SuspendedByUser")
    return case.until(lambda job: bool(job.get("status", {}).get("checkpoint")), "a checkpoint")


def resume(case: Case) -> None:
    case.kubectl("patch", names.RESOURCE, case.name, "--type=merge", "-p", '{"spec": {"suspend": false}}')


def test_newest_checkpoint_truncated(case: Case, hand: Hand) -> None:
    suspended(case)
    damaged, good = hand("print(damage(steps[-1]), steps[-2].name)").split()
    newest = int(damaged.split("-")[1])
    resume(case)
    message = case.shows(ConditionType.CHECKPOINT_AVAILABLE, "PassedOver")
    assert damaged in message
    job = case.reaches(newest + 1, 2)
    assert job["status"]["resume"]["fromStep"] == int(good.split("-")[1]) < newest
    assert job["status"]["prompts"].get("trainedTwice", 0) == 0


def test_all_checkpoints_corrupt(case: Case, hand: Hand) -> None:
    suspended(case)
    hand("for step in steps: damage(step)")
    resume(case)
    message = case.shows(ConditionType.CHECKPOINT_AVAILABLE, "Corrupt")
    case.passed("Suspended=True/SuspendedByUser", "CheckpointAvailable=False/Corrupt")
    assert "step-" in message
    assert case.pods() == [], "a pod of the trainer was made though there is nothing to go on from"


def test_old_writer_that_comes_back(case: Case, hand: Hand) -> None:
    """A process of attempt 1 that was cut off writes its checkpoint after attempt 2 has begun; attempt 3 must not read it."""
    suspended(case)
    aside = f"pathlib.Path('{names.VOLUME_MOUNT_PATH}/aside')"  # attempt 2 will delete it where it lies
    hand(f"import shutil; shutil.copytree(steps[-1], {aside})")
    resume(case)
    second = case.reaches(SHORT + 20, 2)
    ghost = hand(
        f"""
        ghost = run / "step-999990-t000001"
        manifest = json.loads(({aside} / "MANIFEST.json").read_text())
        manifest["step"] = 999990
        ({aside} / "MANIFEST.json").write_text(json.dumps(manifest))
        {aside}.rename(ghost)
        print(ghost.name)
        """
    )
    case.delete_pod("head")
    job = case.reaches(second["status"]["step"] + 1, 3)
    assert 0 < job["status"]["resume"]["fromStep"] < int(ghost.split("-")[1]), f"{ghost} was read: {job['status']['resume']}"
    assert not any("PassedOver" in entry for entry in case.trail), f"{ghost} is nobody's, and not a damaged one of this lineage"
    assert job["status"]["prompts"].get("trainedTwice", 0) == 0


def test_re_created_on_the_same_volume(make_case: Callable[..., Case]) -> None:
    """A job of the same name goes on where the deleted one ended, or is refused where its spec says so."""
    first = make_case()
    first.apply(algorithm__grpo__steps=SHORT)
    lossless(first.ends(), 1, 0, SHORT)
    first.delete()

    second = make_case()
    second.apply(algorithm__grpo__steps=2 * SHORT)
    job = second.ends()
    lossless(job, 1, 0, 2 * SHORT)
    assert job["status"]["resume"]["fromStep"] == SHORT
    assert job["status"]["prompts"]["trained"] + job["status"]["prompts"].get("filtered", 0) >= 2 * SHORT * PROMPTS_PER_STEP
    second.delete()

    third = make_case()
    third.apply(algorithm__grpo__steps=3 * SHORT, checkpoint__onExisting="Refuse")
    message = third.shows(ConditionType.CHECKPOINT_AVAILABLE, "ExistingRefused")
    assert f"step-{2 * SHORT:06d}-" in message, message
    assert third.pods() == [], "a pod of the trainer was made"


def test_saved_layout_that_cannot_be_loaded(make_case: Callable[..., Case]) -> None:
    first = make_case()
    first.apply(algorithm__grpo__steps=SHORT)
    first.ends()
    first.delete()
    case = make_case()
    case.apply(algorithm__grpo__steps=2 * SHORT, model__shape__hiddenSize=128)
    message = case.shows(ConditionType.CHECKPOINT_AVAILABLE, "Incompatible")
    assert "hiddenSize" in message
    assert "64" in message
    assert "128" in message
    assert case.pods() == [], "a pod of the trainer was made"


@pytest.fixture
def small_volume(kubectl: Kubectl) -> Iterator[Callable[[str], None]]:
    """Puts a volume of a given size in the place of the usual one; call again to change its size."""
    if kubectl.environment.get("KUBECONFIG") != EMBEDDED:
        pytest.skip("needs the embedded cluster: the volume is a memory file system of the node")
    node, name = str(ROOT / "dev/cluster.sh"), f"small-{kubectl.namespace}"
    path = f"/var/lib/rljob/{name}"
    mounted = False

    def size(text: str) -> None:
        nonlocal mounted
        if mounted:
            run(node, "exec", "mount", "-o", f"remount,size={text}", path)
            return
        run(node, "exec", "mkdir", "-p", path)
        run(node, "exec", "mount", "-t", "tmpfs", "-o", f"size={text},mode=0777", "rljob-small", path)
        mounted = True
        spec: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
        volume = {
            "capacity": {"storage": "1Gi"},
            "hostPath": {"path": path},
            "claimRef": {"namespace": kubectl.namespace, "name": CLAIM},
        }
        claim = {"volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
        kubectl("delete", "pvc", CLAIM, "--wait=true")
        objects = [
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec | volume},
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec | claim},
        ]
        kubectl("apply", "-f", "-", given=yaml.safe_dump_all(objects))

    yield size
    if mounted:
        kubectl("delete", names.RESOURCE, "--all", "--wait=true")
        kubectl("delete", "pods", "--all", "--wait=true")
        kubectl("delete", "pvc", CLAIM, "--wait=true")
        kubectl("delete", "pv", name, "--wait=true")
        run(node, "exec", "umount", path)
        run(node, "exec", "rmdir", path)


def test_volume_full(case: Case, small_volume: Callable[[str], None]) -> None:
    small_volume("600k")
    case.apply(algorithm__grpo__steps=SHORT, failurePolicy={"maxRestarts": 5, "backoffSeconds": 5})
    job = case.until(lambda job: bool(job.get("status", {}).get("lastFailure")), "the first attempt fails", 300)
    failure = job["status"]["lastFailure"]
    assert failure["exitCode"] == 76, json.dumps(failure)
    assert "No space left" in failure["message"], failure["message"]
    small_volume("256m")
    job = case.ends()
    assert job["status"]["step"] == SHORT
    assert job["status"]["attempt"] > 1
    assert SMALL["checkpoint.everySteps"] == 5
