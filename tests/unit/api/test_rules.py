"""The rule table: what is refused, with which words, and what is let through."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.findings import errors
from rljob_api.manifest import judge

from .conftest import Bend

# change of the example -> rule, path, words that the message must hold
REFUSED: list[tuple[dict[str, Any], str, str, tuple[str, ...]]] = [
    ({"parallelism.tensor": 2}, "world-size", "spec.parallelism", ("world size 1", "tensor 2", "world size of 2 would do")),
    (
        {"trainer.ranksPerNode": 3, "parallelism.pipeline": 2},
        "world-size",
        "spec.parallelism",
        ("world size 3", "pipeline 2", "world size of 4"),
    ),
    (
        {"trainer.nodes": 2, "trainer.gpusPerNode": 8, "parallelism.context": 3},
        "world-size",
        "spec.parallelism",
        ("16", "context 3"),
    ),
    (
        {"trainer.ranksPerNode": 2, "parallelism.expert": 4},
        "expert-world-size",
        "spec.parallelism.expert",
        ("world size 2", "expert 4"),
    ),
    (
        {"generation.parallelism.tensor": 4},
        "generation-layout",
        "spec.generation.parallelism.tensor",
        ("4 differs", "spec.parallelism.tensor 1", "set it to 1"),
    ),
    (
        {"trainer.ranksPerNode": 4, "parallelism": {"tensor": 2}, "generation.parallelism.expertTensor": 1},
        "generation-layout",
        "spec.generation.parallelism.expertTensor",
        ("1 differs", "2"),
    ),
    (
        {"algorithm.grpo.microBatchSize": 48},
        "batch-size",
        "spec.algorithm.grpo.microBatchSize",
        ("= 128 answers", "microBatchSize 48"),
    ),
    (
        {"trainer.ranksPerNode": 4},
        "batch-size",
        "spec.algorithm.grpo.microBatchSize",
        ("data-parallel size 4", "512"),
    ),
    ({"parallelism.sequence": True}, "sequence-parallel", "spec.parallelism.sequence", ("tensor > 1",)),
    (
        {"model.shape.hiddenSize": 66},
        "head-size",
        "spec.model.shape.hiddenSize",
        ("66", "attentionHeads 4"),
    ),
    ({"model.shape.queryGroups": 3}, "model-shape", "spec.model.shape.queryGroups", ("4", "3")),
    (
        {"trainer.ranksPerNode": 8, "parallelism.tensor": 8},
        "model-shape",
        "spec.parallelism.tensor",
        ("attentionHeads 4", "tensor 8"),
    ),
    ({"generation.maxNewTokens": 16}, "sequence-length", "spec.generation.maxNewTokens", ("16", "at most 15")),
    ({"model.preset": None}, "exactly-one", "spec.model", ("preset, huggingFace", "found none")),
    ({"data.jsonl.path": "/d"}, "exactly-one", "spec.data", ("builtin and jsonl",)),
    ({"environment.builtin": None}, "exactly-one", "spec.environment", ("exactly one of builtin, agent",)),
]


@pytest.mark.parametrize(("changes", "rule", "path", "words"), REFUSED)
def test_an_impossible_spec_is_refused_naming_path_and_values(
    bent: Bend, changes: dict[str, Any], rule: str, path: str, words: tuple[str, ...]
) -> None:
    findings = [f for f in judge("copy", bent(**changes)).findings if f.rule == rule]
    assert [f.path for f in findings] == [path]
    assert findings[0].severity == "error"
    for word in words:
        assert word in findings[0].message


def test_the_example_passes_without_a_finding(bent: Bend) -> None:
    assert judge("copy", bent()).findings == []


def test_a_generation_layout_equal_to_trainings_passes(bent: Bend) -> None:
    assert judge("copy", bent(**{"generation.parallelism": {"tensor": 1, "pipeline": 1, "expert": 1}})).findings == []


def test_a_different_generation_context_is_a_warning_only(bent: Bend) -> None:
    verdict = judge("copy", bent(**{"generation.parallelism.context": 2}))
    assert [f.rule for f in verdict.findings] == ["generation-context"]
    assert errors(verdict.findings) == []


def test_broken_rules_come_before_what_is_not_supported_yet(bent: Bend) -> None:
    findings = judge("copy", bent(**{"generation.parallelism.tensor": 2, "queueName": "team"})).findings
    assert [f.reason for f in findings] == ["GenerationLayoutMismatch", "NotSupportedYet"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("queueName", "team-a"),
        ("data", {"jsonl": {"path": "/prompts.jsonl"}}),
    ],
)
def test_a_value_that_this_version_does_not_honour_is_refused_by_name(bent: Bend, path: str, value: Any) -> None:
    findings = judge("copy", bent(**{path: value})).findings
    assert {f.reason for f in findings} == {"NotSupportedYet"}
    assert findings[0].path.startswith(f"spec.{path}")


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"trainer.node": 1}, "spec.trainer.node", "no such field"),
        ({"trainer.nodes": "two"}, "spec.trainer.nodes", "found 'two'"),
        ({"algorithm.grpo.steps": "500"}, "spec.algorithm.grpo.steps", "found '500'"),
        ({"trainer.nodes": True}, "spec.trainer.nodes", "found True"),
        ({"data.shuffle": "true"}, "spec.data.shuffle", "found 'true'"),
        ({"algorithm.grpo.prompts_per_step": 8}, "spec.algorithm.grpo.prompts_per_step", "no such field"),
        ({"algorithm.grpo.learningRate": 0.001}, "spec.algorithm.grpo.learningRate", "found 0.001"),
        ({"trainer.image": None}, "spec.trainer.image", "is required"),
        ({"generation.maxRequests": 0}, "spec.generation.maxRequests", "greater than or equal to 1"),
        ({"algorithm.grpo.maxTrajectoryAgeSteps": 0}, "spec.algorithm.grpo.maxTrajectoryAgeSteps", "found 0"),
        ({"algorithm": 3}, "spec.algorithm", "found 3"),
    ],
)
def test_a_misfit_with_the_schema_is_a_finding_that_names_the_field(
    bent: Bend, changes: dict[str, Any], path: str, words: str
) -> None:
    verdict = judge("copy", bent(**changes))
    assert verdict.spec is None
    assert [f.path for f in verdict.findings] == [path]
    assert words in verdict.findings[0].message


@pytest.mark.parametrize("spec", [None, [], "text", 7, {}])
def test_a_spec_that_is_no_object_or_empty_gives_findings_not_a_traceback(spec: Any) -> None:
    assert errors(judge("copy", spec).findings)


@pytest.mark.parametrize("name", ["Copy", "1copy", "copy.v1", "-copy", "copy-", "c" * 41, ""])
def test_a_name_from_which_no_child_name_can_be_made_is_refused(bent: Bend, name: str) -> None:
    assert [f.rule for f in judge(name, bent()).findings] == ["name"]


def test_the_longest_good_name_passes(bent: Bend) -> None:
    assert judge("c" * 40, bent()).findings == []
