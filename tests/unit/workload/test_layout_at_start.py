"""The layout is judged again where the trainer starts: a job may have been stored before a rule, or come from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api import names
from rljob_api.exitcodes import ExitCode
from rljob_operator.webhook_review import review
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.settings import Attempt, attempt_from_environment

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "moe.yaml"


def start(spec: dict[str, Any], volume: Path) -> Attempt:
    variables = {names.ENV_NAME: "moe", names.ENV_NAMESPACE: "team", names.ENV_UID: "u", names.ENV_ATTEMPT: "1"}
    return attempt_from_environment(variables | {names.ENV_SPEC: json.dumps(spec), names.ENV_VOLUME: str(volume)})


@pytest.mark.parametrize(("size", "other"), [("tensor", 2), ("pipeline", 2), ("expert", 1), ("expertTensor", 2)])
def test_another_layout_for_generation_is_refused_at_start_in_the_words_of_admission(
    size: str, other: int, tmp_path: Path
) -> None:
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())["spec"]
    start(spec, tmp_path)
    spec["generation"]["parallelism"] = {size: other}
    with pytest.raises(RunError) as started:
        start(spec, tmp_path)
    kind = {"group": "rljob.dev", "version": "v1alpha1", "kind": "RLJob"}
    job = {"metadata": {"name": "moe"}, "spec": spec}
    asked = {"uid": "1", "kind": kind, "operation": "CREATE", "object": job, "oldObject": None}
    answer = review({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked})
    words = f"spec.generation.parallelism.{size}: {other} differs from training's spec.parallelism.{size}"
    assert started.value.code == ExitCode.INVALID_SPEC
    assert words in str(started.value)
    assert words in answer["response"]["status"]["message"]
