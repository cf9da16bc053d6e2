"""The RayCluster, against golden files; `RLJOB_GOLDEN=write` writes them anew."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.spec import RLJobSpec
from rljob_operator.render import TemplateError, lay_under, ray_cluster
from rljob_operator.render_preflight import preflight_pod

from .builders import job, spec

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = {
    "cpu": spec(),
    "gpu-nodes-template": spec(
        trainer={
            "image": "example.test/rljob-workload:1",
            "nodes": 4,
            "gpusPerNode": 8,
            "resources": {"cpu": "32", "memory": "512Gi"},
            "template": {
                "metadata": {"labels": {"team": "a", "rljob.dev/job": "other"}},
                "spec": {
                    "nodeSelector": {"pool": "gpu"},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "restartPolicy": "Always",
                    "securityContext": {"supplementalGroups": [5]},
                    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
                    "containers": [
                        {
                            "name": "trainer",
                            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "RAY_AUTH_MODE", "value": "disabled"}],
                            "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                            "resources": {"limits": {"rdma/hca": "1"}},
                        },
                        {"name": "logs", "image": "example.test/logs:1"},
                    ],
                },
            },
        }
    ),
}


def golden(path: Path, value: Any) -> None:
    """Compare with a golden file, or write it."""
    if os.environ.get("RLJOB_GOLDEN") == "write":
        path.write_text(yaml.safe_dump(json.loads(json.dumps(value)), sort_keys=False, width=120))
    assert yaml.safe_load(path.read_text()) == value


def rendered(case: str) -> dict[str, Any]:
    return ray_cluster(job(spec=CASES[case]), RLJobSpec.model_validate(CASES[case]), 3)


@pytest.mark.parametrize("case", CASES)
def test_the_manifest_is_the_golden_one(case: str) -> None:
    golden(GOLDEN / f"{case}.yaml", rendered(case))


def test_rendering_is_repeatable_and_leaves_the_spec_alone() -> None:
    before = json.dumps(CASES["gpu-nodes-template"])
    assert rendered("gpu-nodes-template") == rendered("gpu-nodes-template")
    assert json.dumps(CASES["gpu-nodes-template"]) == before


def test_ours_wins_over_the_template() -> None:
    head = rendered("gpu-nodes-template")["spec"]["headGroupSpec"]["template"]
    assert head["metadata"]["labels"]["rljob.dev/job"] == "copy"
    assert head["spec"]["restartPolicy"] == "Never"
    environment = {one["name"]: one.get("value") for one in head["spec"]["containers"][0]["env"]}
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["NCCL_DEBUG"] == "INFO"


def test_the_template_wins_where_an_image_may_need_it() -> None:
    theirs = {
        "securityContext": {"runAsUser": 7},
        "containers": [
            {
                "name": "trainer",
                "imagePullPolicy": "Always",
                "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                "readinessProbe": {"exec": {"command": ["true"]}},
            },
        ],
    }
    value = spec(trainer__template={"spec": theirs})
    head = ray_cluster(job(spec=value), RLJobSpec.model_validate(value), 1)["spec"]["headGroupSpec"]["template"]["spec"]
    assert (head["securityContext"]["runAsUser"], head["securityContext"]["runAsGroup"]) == (7, 1000)
    assert head["containers"][0]["imagePullPolicy"] == "Always"
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in head["containers"][0]["env"]
    assert head["containers"][0]["readinessProbe"] == {"exec": {"command": ["true"]}}


@pytest.mark.parametrize(
    ("theirs", "shared"),
    [
        ({}, True),
        ({"initContainers": [{"name": "fetch", "image": "x"}]}, True),
        ({"containers": [{"name": "trainer", "imagePullPolicy": "Always"}]}, True),
        ({"shareProcessNamespace": False}, False),
        ({"hostPID": True}, False),
        ({"containers": [{"name": "logs", "image": "x"}]}, False),
        ({"containers": [{"name": "logs", "image": "x"}], "shareProcessNamespace": True}, True),
        ({"initContainers": [{"name": "logs", "image": "x", "restartPolicy": "Always"}]}, False),
    ],
)
def test_pods_share_process_numbers_where_nobody_else_is_in_them(theirs: dict[str, Any], shared: bool) -> None:
    """A container's first process takes no SIGTERM without a handler. Sidecars are to see nothing of the trainer unless the
    template says so; with hostPID beside it a pod would be refused."""
    value = spec(trainer__template={"spec": theirs})
    parsed = RLJobSpec.model_validate(value)
    worker = ray_cluster(job(spec=value), parsed, 1)["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert worker["shareProcessNamespace"] is shared
    looker = preflight_pod(job(spec=value), parsed, "x")["spec"]
    assert looker["shareProcessNamespace"] is True
    assert "hostPID" not in looker


def test_only_workers_ask_for_gpus_and_every_pod_has_a_memory_limit() -> None:
    manifest = rendered("gpu-nodes-template")["spec"]
    head = manifest["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]
    worker = manifest["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]
    assert "nvidia.com/gpu" not in head["limits"]
    assert worker["limits"]["nvidia.com/gpu"] == worker["requests"]["nvidia.com/gpu"] == "8"
    assert worker["limits"]["memory"] == "512Gi"
    assert "cpu" not in worker["limits"]


def test_the_ray_container_comes_first() -> None:
    names = [one["name"] for one in rendered("gpu-nodes-template")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]]
    assert names == ["trainer", "logs"]


def test_a_list_item_of_ours_takes_the_place_of_the_templates() -> None:
    under = {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "B", "value": "1"}]}
    merged = lay_under(under, {"env": [{"name": "A", "value": "2"}]}, "x")
    assert merged == {"env": [{"name": "A", "value": "2"}, {"name": "B", "value": "1"}]}


def test_a_wrong_shape_is_named_by_path() -> None:
    with pytest.raises(TemplateError, match=r"^x\.env: must be a list; found 'no'$"):
        lay_under({"env": "no"}, {"env": []}, "x")


def test_the_model_of_the_example_is_mounted_in_head_workers_and_preflight() -> None:
    example = yaml.safe_load((Path(__file__).parents[3] / "examples" / "from-hugging-face.yaml").read_text())["spec"]
    made, parsed = job(spec=example), RLJobSpec.model_validate(example)
    cluster = ray_cluster(made, parsed, 1)["spec"]
    pods = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"], preflight_pod(made, parsed, "x")]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
        claims = [one["persistentVolumeClaim"]["claimName"] for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one]
        assert "models" in claims
