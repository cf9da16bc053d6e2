"""Whole recipes, as people write them: accepted or refused as Megatron would."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.findings import Finding, errors
from rljob_api.manifest import judge

NEMOTRON_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

NEMOTRON: dict[str, Any] = {
    "trainer": {"image": "x", "nodes": 2, "gpusPerNode": 8, "gpuMemory": "80Gi"},
    "model": {
        "huggingFace": {"path": "/models/nemotron-3-nano-30b-a3b"},
        "shape": {
            "layers": 52,
            "hiddenSize": 2688,
            "attentionHeads": 32,
            "queryGroups": 2,
            "ffnHiddenSize": 1856,
            "vocabSize": 131072,
            "experts": 128,
            "topK": 6,
            "hybridPattern": NEMOTRON_PATTERN,
        },
        "dtype": "bfloat16",
        "transformer": "TransformerEngine",
        "allowInferenceOptimizedTraining": True,
    },
    "parallelism": {"tensor": 2, "expert": 8, "expertTensor": 1, "sequence": True},
    "generation": {"maxNewTokens": 8192, "maxSequenceLength": 10240, "maxRequests": 256, "inferenceOptimized": True},
    "data": {"jsonl": {"path": "/data/math.jsonl"}},
    "environment": {"builtin": "exactMatch"},
    "algorithm": {"grpo": {"promptsPerStep": 64, "generationsPerPrompt": 16, "microBatchSize": 1, "steps": 1000}},
    "checkpoint": {"volume": {"claimName": "nemotron"}},
}


def rule_findings(spec: dict[str, Any]) -> list[Finding]:
    """All but what the installed version does not honour yet."""
    return [finding for finding in judge("recipe", spec).findings if finding.rule != "not-supported-yet"]


EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LARGE = "nemotron-3-nano-30b-a3b-2n8g.yaml"


def example(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())["spec"]
    return spec


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_accepted_by_every_rule(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    if manifest["kind"] != "RLJob":
        return
    assert rule_findings(manifest["spec"]) == []
    assert bool(judge(manifest["metadata"]["name"], manifest["spec"]).findings) == (path.name == LARGE), "runs here"


def test_the_twin_has_the_large_models_layers_but_mamba() -> None:
    large, twin = (example(name)["model"]["shape"]["hybridPattern"] for name in (LARGE, "nemotron-twin.yaml"))
    assert large == NEMOTRON_PATTERN
    assert large.replace("M", "").startswith(twin)


def test_nemotron_3_nano_on_two_nodes_of_eight_gpus_is_accepted() -> None:
    assert [finding.rule for finding in rule_findings(NEMOTRON)] == ["in-flight-cap"]
    assert errors(rule_findings(NEMOTRON)) == []


@pytest.mark.parametrize(
    "layout",
    [
        {"expert": 8},
        {"tensor": 4, "expert": 8, "expertTensor": 1, "sequence": True},
        {"tensor": 8, "expert": 16, "expertTensor": 1, "sequence": True},
        {"pipeline": 2, "expert": 8},
        {"tensor": 2, "pipeline": 4, "expert": 4, "expertTensor": 1, "sequence": True},
    ],
)
def test_other_layouts_of_it_are_accepted(layout: dict[str, Any]) -> None:
    assert errors(rule_findings({**NEMOTRON, "parallelism": layout})) == []


@pytest.mark.parametrize(
    ("layout", "rule", "words"),
    [
        ({"tensor": 2, "pipeline": 16, "expert": 8}, "world-size", ("world size 16", "= 32")),
        ({"tensor": 2, "expert": 8, "sequence": True}, "inference-optimized", ("expertTensor to 1",)),
        ({"tensor": 2, "expert": 8, "expertTensor": 1}, "sequence-parallel", ("set it to true",)),
        ({"expert": 3}, "experts", ("experts 128", "expert 3")),
        ({"context": 2, "expert": 8}, "context-parallel", ("Mamba",)),
    ],
)
def test_layouts_of_it_that_cannot_run_are_refused(layout: dict[str, Any], rule: str, words: tuple[str, ...]) -> None:
    findings = [finding for finding in errors(rule_findings({**NEMOTRON, "parallelism": layout})) if finding.rule == rule]
    assert findings
    for word in words:
        assert word in findings[0].message


def test_tensor_2_pipeline_8_of_8_gpus_is_refused_naming_16_and_8(spec: dict[str, Any]) -> None:
    spec["trainer"] |= {"nodes": 1, "gpusPerNode": 8}
    spec["parallelism"] = {"tensor": 2, "pipeline": 8}
    findings = [finding for finding in rule_findings(spec) if finding.rule == "world-size"]
    assert len(findings) == 1
    assert "world size 8" in findings[0].message
    assert "= 16" in findings[0].message


def test_generation_tensor_4_with_training_tensor_2_is_refused_naming_both(spec: dict[str, Any]) -> None:
    spec["trainer"]["ranksPerNode"] = 2
    spec["parallelism"] = {"tensor": 2}
    spec["generation"]["parallelism"] = {"tensor": 4}
    (finding,) = [one for one in rule_findings(spec) if one.rule == "generation-layout"]
    assert finding.path == "spec.generation.parallelism.tensor"
    assert finding.message.startswith("4 differs from training's spec.parallelism.tensor 2")


@pytest.fixture
def spec(bent: Any) -> dict[str, Any]:
    """The example's spec, to change."""
    return copy.deepcopy(bent())
