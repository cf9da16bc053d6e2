"""Rules on the model's sizes against the layout: what `TransformerConfig` and the layers of Megatron 0.19.2 demand."""

from __future__ import annotations

from collections.abc import Iterator

from . import sizes as s
from .expr import field, lift
from .layout import shape_of, stage_patterns
from .rule import Rule, clause
from .spec import RLJobSpec


def _stages_without_attention(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    """Megatron's engine keeps a cache per stage and refuses a stage of a Mamba model that has no attention layer."""
    shape, stages = shape_of(spec.model), spec.parallelism.pipeline
    if shape is None or shape.hybrid_pattern is None or "M" not in shape.hybrid_pattern:
        return
    if shape.layers != len(shape.hybrid_pattern) or shape.layers % stages:
        return  # another rule says so
    for number, pattern in enumerate(stage_patterns(shape, stages), 1):
        if "M" in pattern and "*" not in pattern:
            yield (
                "spec.parallelism.pipeline",
                f"stage {number} of {stages} gets the layers {pattern} of model.shape.hybridPattern: none is attention "
                f"(*), and the "
                "engine keeps its cache by attention layers; fewer stages would do",
            )
            return


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "head-size",
        "ModelShapeInvalid",
        "error",
        "A head is hiddenSize / attentionHeads wide, where no config.json says otherwise: a whole, even number.",
        (
            clause(
                "model.shape.hiddenSize",
                s.UNKNOWN | ~s.OWN | s.HEADS.divides(s.HIDDEN),
                "{hidden} is not divisible by attentionHeads {heads}; {would_do} would do",
                hidden=s.HIDDEN,
                heads=s.HEADS,
                would_do=s.HIDDEN.next_multiple(s.HEADS),
            ),
            clause(
                "model.shape.hiddenSize",
                s.UNKNOWN | ~s.OWN | ~s.HEADS.divides(s.HIDDEN) | (s.HEAD_SIZE % 2).eq(0),
                "{hidden} / attentionHeads {heads} gives heads of {size}; rotary positions turn pairs, so it has to be even",
                hidden=s.HIDDEN,
                heads=s.HEADS,
                size=s.HEAD_SIZE,
            ),
        ),
        deviation="Megatron rounds hiddenSize / attentionHeads down without a word; here a model of another size than the one "
        "that was written down is refused.",
    ),
    Rule(
        "model-shape",
        "ModelShapeInvalid",
        "error",
        "Attention heads are shared out evenly over query groups, and both over tensor-parallel ranks.",
        (
            clause(
                "model.shape.queryGroups",
                s.UNKNOWN | s.GROUPS.divides(s.HEADS),
                "attentionHeads {heads} are not divisible by queryGroups {groups}",
                heads=s.HEADS,
                groups=s.GROUPS,
            ),
            clause(
                "parallelism.tensor",
                s.UNKNOWN | s.TENSOR.divides(s.HEADS),
                "model.shape.attentionHeads {heads} are not divisible by tensor {tensor}",
                heads=s.HEADS,
                tensor=s.TENSOR,
            ),
            clause(
                "parallelism.tensor",
                s.UNKNOWN | ~s.TENSOR.divides(s.HEADS) | s.TENSOR.divides(s.GROUPS) | s.GROUPS.divides(s.TENSOR),
                "model.shape.queryGroups {groups} are neither a multiple nor a divisor of tensor {tensor}",
                groups=s.GROUPS,
                tensor=s.TENSOR,
            ),
            clause(
                "parallelism.tensor",
                s.UNKNOWN | ~s.OWN | ~s.TENSOR.divides(s.HEADS) | s.TENSOR.divides(s.HEAD_SIZE * (s.HEADS + s.GROUPS * 2)),
                "queries, keys and values are {total} wide (model.shape: attentionHeads {heads} + 2 x queryGroups "
                "{groups}, times {size}"
                " each), which is not divisible by tensor {tensor}",
                total=s.HEAD_SIZE * (s.HEADS + s.GROUPS * 2),
                heads=s.HEADS,
                groups=s.GROUPS,
                size=s.HEAD_SIZE,
                tensor=s.TENSOR,
            ),
        ),
    ),
    Rule(
        "pipeline-layers",
        "PipelineInvalid",
        "error",
        "Each pipeline stage (and each of its virtual chunks) holds as many layers as the others.",
        (
            clause(
                "parallelism.pipeline",
                s.UNKNOWN | (s.PIPELINE * s.VIRTUAL).divides(s.LAYERS),
                "model.shape.layers {layers} are not divisible by pipeline {pipeline} x virtualPipeline {virtual} = {product}",
                layers=s.LAYERS,
                pipeline=s.PIPELINE,
                virtual=s.VIRTUAL,
                product=s.PIPELINE * s.VIRTUAL,
            ),
        ),
    ),
    Rule(
        "feed-forward",
        "ModelShapeInvalid",
        "error",
        "The feed-forward's inner width is split over the tensor-parallel ranks, an expert's over the "
        "expert-tensor-parallel ones.",
        (
            clause(
                "parallelism.tensor",
                s.UNKNOWN | ~s.DENSE_FFN | s.TENSOR.divides(s.FFN),
                "model.shape.ffnHiddenSize {ffn} is not divisible by tensor {tensor}",
                ffn=s.FFN,
                tensor=s.TENSOR,
            ),
            clause(
                "parallelism.expertTensor",
                ~s.EXPERT_LAYERS | s.EXPERT_TENSOR.divides(s.FFN),
                "model.shape.ffnHiddenSize {ffn} is not divisible by expertTensor {tensor}",
                ffn=s.FFN,
                tensor=s.EXPERT_TENSOR,
            ),
        ),
    ),
    Rule(
        "experts",
        "ExpertsInvalid",
        "error",
        "Experts are shared out evenly over the expert-parallel ranks, and a token is routed to some of them.",
        (
            clause(
                "parallelism.expert",
                s.UNKNOWN | s.MOE | s.EXPERT.eq(1),
                "{expert} shares out experts, and model.shape.experts is unset; set it to 1",
                expert=s.EXPERT,
            ),
            clause(
                "parallelism.expert",
                ~s.EXPERT_LAYERS | s.EXPERT.divides(s.EXPERTS),
                "model.shape.experts {experts} are not divisible by expert {expert}",
                experts=s.EXPERTS,
                expert=s.EXPERT,
            ),
            clause(
                "model.shape.topK",
                ~s.EXPERT_LAYERS | ~s.TOP_K | (field("model.shape.topK") <= s.EXPERTS),
                "{top_k} is more than experts {experts}",
                top_k=field("model.shape.topK"),
                experts=s.EXPERTS,
            ),
        ),
    ),
    Rule(
        "hybrid-pattern",
        "HybridPatternInvalid",
        "error",
        "A hybrid model's pattern names every layer, and its expert layers need experts.",
        (
            clause(
                "model.shape.hybridPattern",
                ~s.HYBRID | s.PATTERN.size().eq(s.LAYERS),
                "names {length} layers, and layers is {layers}",
                length=s.PATTERN.size(),
                layers=s.LAYERS,
            ),
            clause(
                "model.shape.experts",
                ~s.HYBRID | ~s.PATTERN.contains("E") | s.MOE,
                "is unset, and the {length} layers of hybridPattern have expert layers (E) among them",
                length=s.PATTERN.size(),
            ),
        ),
        deviation="Megatron reads the pattern alone; a different number of layers beside it is a contradiction here.",
    ),
    Rule(
        "hybrid-stage",
        "HybridPatternInvalid",
        "error",
        "The engine keeps its cache by attention layers and refuses a pipeline stage of Mamba layers without one.",
        check=_stages_without_attention,
        reads=frozenset({"spec.model.shape.hybridPattern", "spec.parallelism.pipeline"}),
    ),
    Rule(
        "mamba",
        "MambaInvalid",
        "error",
        "Mamba layers generate with GPU kernels only, and their heads and groups are shared out over tensor-parallel ranks.",
        (
            clause(
                "trainer.gpusPerNode",
                ~s.MAMBA | (s.GPUS > 0),
                "{gpus} means CPU ranks, and Mamba layers (M in model.shape.hybridPattern) generate with GPU kernels "
                "only; set it to "
                "the GPUs of a node",
                gpus=s.GPUS,
            ),
            clause(
                "model.shape.hiddenSize",
                ~s.MAMBA | ~s.OWN | lift(s.MAMBA_WIDTH).divides(s.HIDDEN),
                "{hidden} is not divisible by {width}: Mamba layers of this size have hiddenSize / 32 heads of 64 in "
                "{groups} groups",
                hidden=s.HIDDEN,
                width=lift(s.MAMBA_WIDTH),
                groups=lift(s.MAMBA_GROUPS),
            ),
            clause(
                "parallelism.tensor",
                ~s.MAMBA | ~s.OWN | s.TENSOR.divides(s.MAMBA_GROUPS),
                "{tensor} is no divisor of the {groups} groups of the model's Mamba layers",
                tensor=s.TENSOR,
                groups=lift(s.MAMBA_GROUPS),
            ),
        ),
    ),
    Rule(
        "transformer-engine",
        "BackendInvalid",
        "error",
        "Transformer Engine runs on GPUs only.",
        (
            clause(
                "model.transformer",
                ~s.TRANSFORMER_ENGINE | (s.GPUS > 0),
                "TransformerEngine needs GPUs, and trainer.gpusPerNode is {gpus}; Local would do",
                gpus=s.GPUS,
            ),
        ),
    ),
    Rule(
        "vocabulary-padding",
        "VocabularyPadded",
        "warning",
        "Each tensor-parallel rank holds as many rows of the embedding as the others, so it is padded.",
        (
            clause(
                "model.shape.vocabSize",
                s.UNKNOWN | s.TENSOR.divides(s.VOCAB),
                "{vocab} is padded to {padded}, a multiple of tensor {tensor}",
                vocab=s.VOCAB,
                padded=s.VOCAB.next_multiple(s.TENSOR),
                tensor=s.TENSOR,
            ),
        ),
    ),
)
