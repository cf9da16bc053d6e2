"""The sizes that rules speak of, as expressions: ranks, process groups, and the model's shape with presets resolved."""

from __future__ import annotations

from .expr import Expr, field, has, or_else, when
from .layout import PRESETS

_PRESET = next(iter(PRESETS.values()))
if len(PRESETS) != 1:
    raise ValueError("with several presets their sizes have to be chosen by model.preset")

NODES = field("trainer.nodes")
GPUS = field("trainer.gpusPerNode")
RANKS = when(GPUS > 0, GPUS, field("trainer.ranksPerNode"))
RANKS_FIELD = when(GPUS > 0, "gpusPerNode", "ranksPerNode")
WORLD = NODES * RANKS

TENSOR = field("parallelism.tensor")
PIPELINE = field("parallelism.pipeline")
VIRTUAL = field("parallelism.virtualPipeline")
CONTEXT = field("parallelism.context")
EXPERT = field("parallelism.expert")
EXPERT_TENSOR = or_else("parallelism.expertTensor", TENSOR)
SEQUENCE = field("parallelism.sequence")
MODEL_RANKS = TENSOR * PIPELINE * CONTEXT
EXPERT_RANKS = EXPERT * EXPERT_TENSOR * PIPELINE
DATA = WORLD // MODEL_RANKS

SHAPE = has("model.shape")
KNOWN = SHAPE | has("model.preset")
"""Whether the sizes are known from the manifest alone."""
UNKNOWN = ~KNOWN
OWN = ~has("model.huggingFace")
"""Whether head size and activation follow from the shape; a config.json may say otherwise."""


def _size(name: str, preset: int | None) -> Expr:
    return when(SHAPE, field(f"model.shape.{name}"), preset) if preset is not None else field(f"model.shape.{name}")


LAYERS = _size("layers", _PRESET.layers)
HIDDEN = _size("hiddenSize", _PRESET.hidden_size)
HEADS = _size("attentionHeads", _PRESET.attention_heads)
FFN = _size("ffnHiddenSize", _PRESET.ffn_hidden_size)
VOCAB = _size("vocabSize", _PRESET.vocab_size)
GROUPS = when(SHAPE, or_else("model.shape.queryGroups", field("model.shape.attentionHeads")), _PRESET.query_groups or 0)
HEAD_SIZE = HIDDEN // HEADS

MOE = has("model.shape.experts")
EXPERTS = field("model.shape.experts")
TOP_K = has("model.shape.topK")
HYBRID = has("model.shape.hybridPattern")
PATTERN = field("model.shape.hybridPattern")
MAMBA = HYBRID & PATTERN.contains("M")
DENSE_FFN = when(HYBRID, PATTERN.contains("-"), ~MOE)
"""Whether any layer's feed-forward is split over the tensor-parallel group; experts' are split over theirs."""

INFERENCE_OPTIMIZED = field("generation.inferenceOptimized")
TRANSFORMER_ENGINE = field("model.transformer").eq("TransformerEngine")

PROMPTS = field("algorithm.grpo.promptsPerStep")
ANSWERS = field("algorithm.grpo.generationsPerPrompt")
MICRO_BATCH = field("algorithm.grpo.microBatchSize")
STEP_ANSWERS = PROMPTS * ANSWERS
IN_FLIGHT = or_else("generation.maxInFlightPrompts", PROMPTS * field("algorithm.grpo.maxTrajectoryAgeSteps"))

MAMBA_GROUPS = 8
"""Megatron's default; a config.json may say otherwise."""
MAMBA_WIDTH = 32 * MAMBA_GROUPS
"""hiddenSize / 32 heads (twice the hidden size in heads of 64) have to fill the groups evenly."""
EXPERT_LAYERS = MOE & (~HYBRID | PATTERN.contains("E"))
