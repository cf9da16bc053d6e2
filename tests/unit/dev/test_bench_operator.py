"""The peer of `make bench-operator`'s killed heads is given what ours has."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from benchmarks.recovery import RLJobRun, rayjob

from rljob_api import names
from rljob_api.spec import RLJobSpec
from rljob_operator.render import ray_cluster
from tests.unit.operator.builders import job


def parts(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Of head and worker: image, sizes and Ray's parameters."""
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [group["template"]["spec"]["containers"][0] for group in groups]
    return [
        {
            "image": container["image"],
            "resources": container["resources"],
            "cpus": group["rayStartParams"]["num-cpus"],
            "custom": group["rayStartParams"]["resources"],
            "ports": container.get("ports") or [],
        }
        for group, container in zip(groups, containers, strict=True)
    ]


@pytest.mark.parametrize("mode", ["K8sJobMode", "HTTPMode"])
def test_the_rayjob_runs_the_same_trainer_on_pods_of_the_same_sizes(mode: str) -> None:
    spec = RLJobRun(2).manifest["spec"]
    ours = ray_cluster(job(spec=spec), RLJobSpec.model_validate(spec), 1)["spec"]
    theirs = rayjob(2, mode)["spec"]
    assert parts(theirs["rayClusterSpec"]) == parts(ours)
    assert (theirs["entrypoint"], theirs["backoffLimit"]) == (names.DRIVER_ENTRYPOINT, 2)
    given = json.loads(yaml.safe_load(theirs["runtimeEnvYAML"])["env_vars"][names.ENV_SPEC])
    same = ("model", "parallelism", "generation", "algorithm", "data", "environment")
    wanted = RLJobSpec.model_validate(spec).to_wire()
    assert {part: given[part] for part in same} == {part: wanted[part] for part in same}
