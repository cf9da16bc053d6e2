"""What the API server itself accepts and refuses: the CRD."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from dev.kube import ROOT, Kubectl

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_operator.api import ApiError

from .conftest import Space

pytestmark = pytest.mark.cluster


async def test_the_example_is_accepted_and_its_defaults_are_those_of_the_models(space: Space) -> None:
    example = yaml.safe_load((ROOT / "examples/copy.yaml").read_text())["spec"]
    stored = (await space.apply(example))["spec"]
    assert RLJobSpec.model_validate(stored) == judge("copy", example).spec


async def test_a_spec_of_required_fields_alone_gets_every_default(space: Space, spec: dict[str, Any]) -> None:
    least = {
        "trainer": {"image": "x"},
        "model": {"preset": "tiny"},
        "generation": {"maxNewTokens": 4, "maxSequenceLength": 16},
        "data": {"builtin": "copy3"},
        "environment": {"builtin": "exactMatch"},
        "algorithm": {"grpo": {"promptsPerStep": 8, "generationsPerPrompt": 8, "microBatchSize": 64, "steps": 5}},
        "checkpoint": {"volume": {"claimName": "c"}},
    }
    stored = (await space.apply(least))["spec"]
    assert stored["parallelism"]["tensor"] == 1
    assert stored["deadlines"]["stallSeconds"] == 300
    assert RLJobSpec.model_validate(stored) == RLJobSpec.model_validate(least)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("trainer.gpus", 8, 'unknown field "spec.trainer.gpus"'),
        ("trainer.nodes", "two", "spec.trainer.nodes"),
        ("trainer.nodes", 0, "spec.trainer.nodes"),
        ("model.dtype", "float64", 'supported values: "float32", "bfloat16"'),
        ("generation.temperature", 0.5, "spec.generation.temperature"),
        ("trainer.image", None, "spec.trainer.image"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(space: Space, spec: dict[str, Any], path: str, value: Any, words: str) -> None:
    parent, field = path.split(".")
    spec[parent][field] = value
    with pytest.raises(ApiError) as refused:
        await space.apply(spec)
    assert refused.value.status in {400, 422}
    assert words in refused.value.message


def test_every_part_of_the_spec_is_explained(environment: dict[str, str]) -> None:
    text = " ".join(Kubectl(environment)("explain", "rljob.spec.parallelism", "--recursive").split())
    assert "Training's parallel layout." in text
    text = Kubectl(environment)("explain", "rljob.spec.parallelism.tensor")
    assert "Tensor-parallel size" in text
