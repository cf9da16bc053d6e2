"""The rule table: what makes a spec impossible, judged by arithmetic before any pod exists.

Each rule has a stable id, a condition reason and a check over the whole spec that yields (path, message). Truth is
Megatron: the formulas are those of `megatron.core.parallel_state.initialize_model_parallel` and of
`TransformerConfig.__post_init__` in 0.19.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from .findings import Finding
from .layout import layout_of, shape_of
from .names import MAX_NAME_LENGTH
from .spec import RLJobSpec

Check = Callable[[RLJobSpec], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    id: str
    reason: str
    severity: Literal["error", "warning"]
    check: Check


def _exactly_one(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    choices: dict[str, dict[str, object | None]] = {
        "spec.model": {"preset": spec.model.preset, "huggingFace": spec.model.hugging_face},
        "spec.data": {
            "builtin": spec.data.builtin,
            "jsonl": spec.data.jsonl,
            "parquet": spec.data.parquet,
            "dataset": spec.data.dataset,
        },
        "spec.environment": {"builtin": spec.environment.builtin},
    }
    for path, options in choices.items():
        given = [name for name, value in options.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            wanted = f"exactly one of {', '.join(options)}" if len(options) > 1 else next(iter(options))
            yield path, f"needs {wanted}; found {found}"


def _world(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    layout = layout_of(spec)
    if layout.world % layout.model_ranks:
        per_node = "gpusPerNode" if spec.trainer.gpus_per_node else "ranksPerNode"
        yield (
            "spec.parallelism",
            f"world size {layout.world} (trainer.nodes {layout.nodes} x trainer.{per_node} {layout.ranks_per_node}) is not "
            f"divisible by tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} = "
            f"{layout.model_ranks}; a world size of {_next_multiple(layout.world, layout.model_ranks)} would do",
        )


def _expert_world(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    layout = layout_of(spec)
    product = layout.expert * layout.expert_tensor * layout.pipeline
    if layout.expert > 1 and layout.world % product:
        yield (
            "spec.parallelism.expert",
            f"world size {layout.world} is not divisible by expert {layout.expert} x expertTensor {layout.expert_tensor} x "
            f"pipeline {layout.pipeline} = {product}; a world size of {_next_multiple(layout.world, product)} would do",
        )


def _next_multiple(value: int, factor: int) -> int:
    return -(-value // factor) * factor


def _batch(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    grpo, data = spec.algorithm.grpo, layout_of(spec).data
    answers = grpo.prompts_per_step * grpo.generations_per_prompt
    if data and answers % (grpo.micro_batch_size * data):
        yield (
            "spec.algorithm.grpo.microBatchSize",
            f"promptsPerStep {grpo.prompts_per_step} x generationsPerPrompt {grpo.generations_per_prompt} = {answers} answers "
            f"are not divisible by microBatchSize {grpo.micro_batch_size} x data-parallel size {data} = "
            f"{grpo.micro_batch_size * data}",
        )


def _generation_layout(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    wanted = spec.generation.parallelism
    if wanted is None:
        return
    training = layout_of(spec)
    for field, attribute in (
        ("tensor", "tensor"),
        ("pipeline", "pipeline"),
        ("expert", "expert"),
        ("expertTensor", "expert_tensor"),
    ):
        ours, theirs = getattr(wanted, attribute), getattr(training, attribute)
        if ours is not None and ours != theirs:
            yield (
                f"spec.generation.parallelism.{field}",
                f"{ours} differs from training's spec.parallelism.{field} {theirs}; generation runs on training's weights and "
                f"process groups, so set it to {theirs} or leave it out",
            )


def _generation_context(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    wanted = spec.generation.parallelism
    if wanted and wanted.context is not None and wanted.context != spec.parallelism.context:
        yield (
            "spec.generation.parallelism.context",
            f"{wanted.context} has no effect: decoding does not split the sequence; training's spec.parallelism.context is "
            f"{spec.parallelism.context}",
        )


def _lengths(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    generation = spec.generation
    if generation.max_new_tokens >= generation.max_sequence_length:
        yield (
            "spec.generation.maxNewTokens",
            f"{generation.max_new_tokens} leaves no room for a prompt in maxSequenceLength {generation.max_sequence_length}; "
            f"at most {generation.max_sequence_length - 1} would do",
        )


def _shape(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    shape = shape_of(spec.model)
    if shape is None:
        return
    heads, groups, tensor = shape.attention_heads, shape.query_groups or shape.attention_heads, spec.parallelism.tensor
    if shape.hidden_size % heads:
        yield (
            "spec.model.shape.hiddenSize",
            f"{shape.hidden_size} is not divisible by attentionHeads {heads}",
        )
    if heads % groups:
        yield "spec.model.shape.queryGroups", f"attentionHeads {heads} are not divisible by queryGroups {groups}"
    if heads % tensor:
        yield (
            "spec.parallelism.tensor",
            f"model.shape.attentionHeads {heads} are not divisible by tensor {tensor}",
        )
    elif groups % tensor and tensor % groups:
        yield (
            "spec.parallelism.tensor",
            f"model.shape.queryGroups {groups} are neither a multiple nor a divisor of tensor {tensor}",
        )


def _sequence(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    if spec.parallelism.sequence and spec.parallelism.tensor == 1:
        yield "spec.parallelism.sequence", "true needs parallelism.tensor > 1; it is 1"


def _in_flight(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    cap, wanted = spec.generation.max_in_flight_prompts, spec.algorithm.grpo.prompts_per_step
    if cap is not None and cap < wanted:
        yield (
            "spec.generation.maxInFlightPrompts",
            f"{cap} is less than algorithm.grpo.promptsPerStep {wanted}; each step waits for several rounds of answers",
        )


RULES: tuple[Rule, ...] = (
    Rule("exactly-one", "ChoiceInvalid", "error", _exactly_one),
    Rule("world-size", "WorldSizeMismatch", "error", _world),
    Rule("expert-world-size", "WorldSizeMismatch", "error", _expert_world),
    Rule("generation-layout", "GenerationLayoutMismatch", "error", _generation_layout),
    Rule("batch-size", "BatchSizeMismatch", "error", _batch),
    Rule("sequence-parallel", "SequenceParallelInvalid", "error", _sequence),
    Rule("model-shape", "ModelShapeInvalid", "error", _shape),
    Rule("sequence-length", "SequenceLengthInvalid", "error", _lengths),
    Rule("generation-context", "GenerationContextIgnored", "warning", _generation_context),
    Rule("in-flight-cap", "InFlightCapLow", "warning", _in_flight),
)


def check_spec(spec: RLJobSpec) -> list[Finding]:
    """All findings of the table, in its order."""
    return [Finding(rule.id, rule.reason, rule.severity, path, message) for rule in RULES for path, message in rule.check(spec)]


def check_name(name: str) -> list[Finding]:
    """The job's name becomes part of Ray's and Kubernetes' names: DNS-1035, at most 40 characters."""
    problem = None
    if len(name) > MAX_NAME_LENGTH:
        problem = f"{name!r} has {len(name)} characters; names derived from it leave room for {MAX_NAME_LENGTH}"
    elif not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        problem = f"{name!r} must start with a lower-case letter and hold only lower-case letters, digits and dashes"
    return [Finding("name", "NameInvalid", "error", "metadata.name", problem)] if problem else []
