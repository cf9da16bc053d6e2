"""Rules on how the ranks are split: the formulas of `megatron.core.parallel_state.initialize_model_parallel` (0.19.2)."""

from __future__ import annotations

from . import sizes as s
from .expr import Expr, field, has
from .rule import Clause, Rule, clause

_WORLD = {
    "world": s.WORLD,
    "nodes": s.NODES,
    "ranks": s.RANKS,
    "per_node": s.RANKS_FIELD,
}


def _same_layout(name: str, training: Expr) -> Clause:
    path = f"generation.parallelism.{name}"
    return clause(
        path,
        ~has(path) | field(path).eq(training),
        f"{{ours}} differs from training's spec.parallelism.{name} {{theirs}}; generation runs on training's weights "
        f"and process "
        "groups, so set it to {theirs} or leave it out",
        ours=field(path),
        theirs=training,
    )


LAYOUT_RULES: tuple[Rule, ...] = (
    Rule(
        "world-size",
        "WorldSizeMismatch",
        "error",
        "All ranks are split into copies of the model: nodes x ranks per node must be divisible by tensor x pipeline x "
        "context.",
        (
            clause(
                "parallelism",
                s.MODEL_RANKS.divides(s.WORLD),
                "world size {world} (trainer.nodes {nodes} x trainer.{per_node} {ranks}) is not divisible by tensor {tensor} x "
                "pipeline {pipeline} x context {context} = {product}; a world size of {would_do} would do",
                **_WORLD,
                tensor=s.TENSOR,
                pipeline=s.PIPELINE,
                context=s.CONTEXT,
                product=s.MODEL_RANKS,
                would_do=s.WORLD.next_multiple(s.MODEL_RANKS),
            ),
        ),
    ),
    Rule(
        "expert-world-size",
        "WorldSizeMismatch",
        "error",
        "Experts have a grid of their own over the same ranks: nodes x ranks per node must be divisible by expert x "
        "expertTensor x "
        "pipeline. expertTensor unset means tensor; with expert 1 and the same tensor size there is nothing beyond world-size.",
        (
            clause(
                "parallelism.expert",
                s.EXPERT_RANKS.divides(s.WORLD) | (s.EXPERT.eq(1) & s.EXPERT_TENSOR.eq(s.TENSOR)),
                "world size {world} (trainer.nodes {nodes} x trainer.{per_node} {ranks}) is not divisible by expert {expert} x "
                "expertTensor {expert_tensor} x pipeline {pipeline} = {product}; a world size of {would_do} would do",
                **_WORLD,
                expert=s.EXPERT,
                expert_tensor=s.EXPERT_TENSOR,
                pipeline=s.PIPELINE,
                product=s.EXPERT_RANKS,
                would_do=s.WORLD.next_multiple(s.EXPERT_RANKS),
            ),
        ),
    ),
    Rule(
        "generation-layout",
        "GenerationLayoutMismatch",
        "error",
        "Generation reads training's weights in place, so its tensor, pipeline, expert and expertTensor sizes are training's.",
        (
            _same_layout("tensor", s.TENSOR),
            _same_layout("pipeline", s.PIPELINE),
            _same_layout("expert", s.EXPERT),
            _same_layout("expertTensor", s.EXPERT_TENSOR),
        ),
        deviation="Megatron can hold a second, resharded copy of the model for generation; RLJob shares one model on purpose.",
    ),
    Rule(
        "batch-size",
        "BatchSizeMismatch",
        "error",
        "Each data-parallel rank trains whole micro-batches: promptsPerStep x generationsPerPrompt must be divisible by "
        "microBatchSize x data-parallel size.",
        (
            clause(
                "algorithm.grpo.microBatchSize",
                ~s.MODEL_RANKS.divides(s.WORLD) | (s.MICRO_BATCH * s.DATA).divides(s.STEP_ANSWERS),
                "promptsPerStep {prompts} x generationsPerPrompt {answers} = {total} answers are not divisible by "
                "microBatchSize "
                "{micro} x data-parallel size {data} = {product}",
                prompts=s.PROMPTS,
                answers=s.ANSWERS,
                total=s.STEP_ANSWERS,
                micro=s.MICRO_BATCH,
                data=s.DATA,
                product=s.MICRO_BATCH * s.DATA,
            ),
        ),
    ),
    Rule(
        "sequence-parallel",
        "SequenceParallelInvalid",
        "error",
        "Sequence parallelism splits over the tensor-parallel group: it needs tensor > 1, and Megatron trains experts under "
        "tensor parallelism only with it.",
        (
            clause(
                "parallelism.sequence",
                ~s.SEQUENCE | (s.TENSOR > 1),
                "true needs parallelism.tensor > 1; it is {tensor}; set it to false",
                tensor=s.TENSOR,
            ),
            clause(
                "parallelism.sequence",
                s.SEQUENCE | ~(s.TENSOR > 1) | ~s.EXPERT_LAYERS,
                "false does not go with model.shape.experts {experts} and parallelism.tensor {tensor}: Megatron trains "
                "experts under "
                "tensor parallelism only with sequence parallelism; set it to true",
                experts=s.EXPERTS,
                tensor=s.TENSOR,
            ),
        ),
    ),
    Rule(
        "virtual-pipeline",
        "PipelineInvalid",
        "error",
        "Generation shares the training model, and Megatron's inference takes one model chunk per pipeline stage.",
        (
            clause(
                "parallelism.virtualPipeline",
                s.VIRTUAL.eq(1),
                "{virtual} model chunks in each of {pipeline} pipeline stages cannot generate: Megatron's inference "
                "takes one chunk "
                "per stage, and the model is shared with training; set it to 1",
                virtual=s.VIRTUAL,
                pipeline=s.PIPELINE,
            ),
        ),
    ),
    Rule(
        "context-parallel",
        "ContextParallelInvalid",
        "error",
        "Context parallelism needs Transformer Engine's attention, and Mamba layers cannot generate under it.",
        (
            clause(
                "parallelism.context",
                s.CONTEXT.eq(1) | s.TRANSFORMER_ENGINE,
                "{context} needs model.transformer TransformerEngine: the {transformer} attention does not split the "
                "sequence; set "
                "it to 1",
                context=s.CONTEXT,
                transformer=field("model.transformer"),
            ),
            clause(
                "parallelism.context",
                s.CONTEXT.eq(1) | ~s.MAMBA,
                "{context} does not go with the Mamba layers of model.shape.hybridPattern: Megatron decodes them with context "
                "parallelism 1 only; set it to 1",
                context=s.CONTEXT,
            ),
        ),
    ),
    Rule(
        "generation-context",
        "GenerationContextIgnored",
        "warning",
        "Decoding handles one new token per answer: there is no sequence to split.",
        (
            clause(
                "generation.parallelism.context",
                ~has("generation.parallelism.context") | field("generation.parallelism.context").eq(s.CONTEXT),
                "{ours} has no effect: decoding does not split the sequence; training's spec.parallelism.context is {theirs}",
                ours=field("generation.parallelism.context"),
                theirs=s.CONTEXT,
            ),
        ),
    ),
    Rule(
        "tensor-across-nodes",
        "TensorAcrossNodes",
        "warning",
        "Every layer communicates over its tensor-parallel group; between nodes that is slow.",
        (
            clause(
                "parallelism.tensor",
                s.TENSOR.divides(s.RANKS) | s.NODES.eq(1),
                "{tensor} ranks of one tensor-parallel group do not fit into nodes of trainer.{per_node} {ranks}: "
                "every layer would "
                "communicate between nodes; a divisor of {ranks} keeps it inside",
                tensor=s.TENSOR,
                ranks=s.RANKS,
                per_node=s.RANKS_FIELD,
            ),
        ),
    ),
)
