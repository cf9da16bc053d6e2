"""An agent in a pod, which knows the model by HTTP only, under the pod's own address; the run learns to its target."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from dev.kube import ROOT, Kubectl

from rljob_api import names
from rljob_api.progress import ProgressReport, PromptCounts
from rljob_api.reasons import ConditionType
from rljob_cli.watch import condition, ended

from .conftest import wait_until
from .test_run import step

#: The example needs some 450 steps of two turns; agent, server and engine share two cores with the operator and the cluster.
TO_THE_TARGET = 1500

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(TO_THE_TARGET + 300)]

#: Prints the status and the body of a request, which has the attempt's token or none.
ASK = f"""
import pathlib, sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1])
if sys.argv[2] == "with":
    request.add_header("Authorization", "Bearer " + pathlib.Path("{names.ACCESS_TOKEN_FILE}").read_text().strip())
try:
    response = urllib.request.urlopen(request, timeout=20)
except urllib.error.HTTPError as error:
    response = error
print(response.status, response.read().decode())
"""


def example() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "http-agent.yaml").read_text())
    if image := os.environ.get("RLJOB_WORKLOAD_IMAGE"):
        job["spec"]["trainer"]["image"] = image
    job["spec"]["ttlSecondsAfterFinished"] = 300
    return job


def ask(kubectl: Kubectl, pod: dict[str, Any], url: str, *, token: bool = True) -> tuple[int, Any]:
    """Status and JSON of a GET from inside a pod of the run."""
    said = kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", ASK, url, "with" if token else "without")
    status, _, body = said.partition(" ")
    return int(status), json.loads(body)


def test_the_example_with_an_agent_trains_to_its_target_over_the_pods_own_address(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "examples/http-agent-claim.yaml")
    kubectl("apply", "-f", "-", given=yaml.safe_dump(example()))
    wait_until(kubectl.namespace, "http-agent", lambda job: step(job) >= 1, 300)
    pods = kubectl.pods(f"{names.LABEL_JOB}=http-agent,{names.LABEL_RAY_NODE_TYPE}")
    of_type = {pod["metadata"]["labels"][names.LABEL_RAY_NODE_TYPE]: pod for pod in pods}
    head, worker = of_type["head"], of_type["worker"]

    status, raw = ask(kubectl, head, f"http://127.0.0.1:{names.PROGRESS_PORT}{names.PROGRESS_PATH}")
    (url,) = ProgressReport.model_validate(raw).dp_openai_server_base_urls
    assert (status, urlsplit(url).hostname) == (200, head["status"]["podIP"])
    status, models = ask(kubectl, worker, f"{url}/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["http-agent"]), "from another pod of the run"
    assert ask(kubectl, worker, f"{url}/models", token=False)[0] == 401

    job = wait_until(kubectl.namespace, "http-agent", lambda job: ended(job) is not None, TO_THE_TARGET)
    told = job["status"]
    assert condition(job, ConditionType.SUCCEEDED)["reason"] == "TargetReached", told
    assert float(told["validation"]["reward"]) >= 0.95
    assert (told["attempt"], told["restarts"], told["prompts"]["skipped"]) == (1, 0, 0)
    assert PromptCounts.model_validate(told["prompts"]).adds_up()

    run = f"{names.VOLUME_MOUNT_PATH}/{names.run_directory(kubectl.namespace, 'http-agent')}"
    lines = kubectl("exec", head["metadata"]["name"], "--", "cat", f"{run}/metrics.jsonl").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, told["step"] + 1))
    assert {row["prompts"]["skipped"] for row in rows} == {0}
    assert rows[-1]["prompts"]["trained"] == 8 * told["step"]
    assert all(row["answer_tokens"] == 6 * row["samples"] for row in rows), "two turns of three tokens each"
    agent = kubectl("exec", head["metadata"]["name"], "--", "cat", f"{run}/logs/agent-attempt-000001.log")
    assert agent == "", "it had nothing to complain about"
