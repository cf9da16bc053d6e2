"""A run that begins from a Hugging Face model on its volume."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from dev.kube import Kubectl

from rljob_api import names
from rljob_api.reasons import ConditionType
from rljob_cli.watch import condition, ended
from tests.unit.workload.hf_models import change, make

from .conftest import Manifest, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

MODELS = f"{names.VOLUME_MOUNT_PATH}/models"


def upload(kubectl: Kubectl, image: str, models: Path) -> None:
    """Put model directories on the claim, through a pod that mounts it."""
    claim = {"name": "volume", "persistentVolumeClaim": {"claimName": "copy-checkpoints"}}
    container = {
        "name": "upload",
        "image": image,
        "command": ["sleep", "900"],
        "volumeMounts": [{"name": "volume", "mountPath": names.VOLUME_MOUNT_PATH}],
    }
    spec = {"containers": [container], "volumes": [claim], "terminationGracePeriodSeconds": 0}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "upload"}, "spec": spec}
    kubectl("apply", "-f", "-", given=json.dumps(pod))
    kubectl("wait", "--for=condition=Ready", "pod/upload", "--timeout=120s", timeout=150)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(models, "models")
    unpack = f"base64 -d | tar -xzm --no-same-owner -C {names.VOLUME_MOUNT_PATH}"
    kubectl("exec", "-i", "upload", "--", "sh", "-c", unpack, given=base64.b64encode(packed.getvalue()).decode())
    kubectl("delete", "pod", "upload", "--wait=true")


def test_a_job_trains_from_the_weights_on_its_volume_and_a_model_that_it_cannot_have_gets_no_pod(
    kubectl: Kubectl, manifest: Manifest, tmp_path: Path
) -> None:
    for name in ("good", "bad"):
        make("qwen2", tmp_path / name)
    change(tmp_path / "bad", hidden_act="gelu")
    upload(kubectl, yaml.safe_load(manifest("x"))["spec"]["trainer"]["image"], tmp_path)
    changes: dict[str, Any] = {"algorithm.grpo.steps": 3, "validation": None, "ttlSecondsAfterFinished": 300}

    kubectl("apply", "-f", "-", given=manifest("bad", **changes, model={"huggingFace": {"path": f"{MODELS}/bad"}}))
    wait_until(kubectl.namespace, "bad", lambda job: "hidden_act is 'gelu'" in json.dumps(job.get("status", {})), 120)
    assert kubectl.json("get", "rayclusters")["items"] == []
    kubectl("delete", "rlj", "bad", "--wait=true")

    kubectl("apply", "-f", "-", given=manifest("good", **changes, model={"huggingFace": {"path": f"{MODELS}/good"}}))
    job = wait_until(kubectl.namespace, "good", lambda job: ended(job) is not None, 500)
    assert condition(job, ConditionType.SUCCEEDED)["reason"] == "Completed", job["status"]
    (head,) = kubectl.pods(f"{names.LABEL_JOB}=good,{names.LABEL_RAY_NODE_TYPE}=head")
    path = f"{names.VOLUME_MOUNT_PATH}/{job['status']['checkpoint']['path']}/MANIFEST.json"
    facts = json.loads(kubectl("exec", head["metadata"]["name"], "--", "cat", path))["facts"]
    assert (facts["model.qkvBias"], facts["spec.model.shape.vocabSize"]) == (True, 65)
