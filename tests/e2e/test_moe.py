"""A mixture-of-experts model over two worker pods: each holds half of the experts, both answer, both save."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import yaml
from dev.kube import ROOT, Kubectl

from rljob_api import names
from rljob_api.progress import PromptCounts
from rljob_api.reasons import ConditionType
from rljob_cli.watch import condition, ended

from .conftest import wait_until
from .test_run import step

#: The example needs some 300 steps; two worker pods, the operator and the cluster itself share two cores.
TO_THE_TARGET = 1500

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(TO_THE_TARGET + 300)]


def example() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "moe.yaml").read_text())
    if image := os.environ.get("RLJOB_WORKLOAD_IMAGE"):
        job["spec"]["trainer"]["image"] = image
    job["spec"]["ttlSecondsAfterFinished"] = 300
    return job


def test_the_example_with_experts_trains_to_its_target_on_two_worker_pods(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "examples/moe-claim.yaml")
    kubectl("apply", "-f", "-", given=yaml.safe_dump(example()))
    wait_until(kubectl.namespace, "moe", lambda job: step(job) >= 1, 300)
    pods = kubectl.pods(f"{names.LABEL_JOB}=moe")
    workers = [pod for pod in pods if pod["metadata"]["labels"][names.LABEL_RAY_NODE_TYPE] == "worker"]
    assert (len(pods), len(workers)) == (3, 2)

    job = wait_until(kubectl.namespace, "moe", lambda job: ended(job) is not None, TO_THE_TARGET)
    status = job["status"]
    assert condition(job, ConditionType.SUCCEEDED)["reason"] == "TargetReached", status
    assert float(status["validation"]["reward"]) >= 0.95
    assert (status["attempt"], status["restarts"], status["prompts"]["skipped"]) == (1, 0, 0)
    assert PromptCounts.model_validate(status["prompts"]).adds_up()

    (head,) = [pod["metadata"]["name"] for pod in pods if pod not in workers]
    run = f"{names.VOLUME_MOUNT_PATH}/{names.run_directory(kubectl.namespace, 'moe')}"
    last = json.loads(kubectl("exec", head, "--", "tail", "-1", f"{run}/metrics.jsonl"))
    assert (last["step"], last["prompts"]["trained"]) == (status["step"], 16 * status["step"])
    assert last["memory/peak_bytes"]["train"] > 0
    ranks = kubectl("exec", head, "--", "sh", "-c", f"cat {run}/logs/rank-*-attempt-000001.log")
    assert all(f"rank {rank} of 2 is ready" in ranks for rank in range(2))
    newest = kubectl("exec", head, "--", "sh", "-c", f"ls -d {run}/step-*").split()[-1]
    files = kubectl("exec", head, "--", "ls", f"{newest}/weights").split()
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(files)
