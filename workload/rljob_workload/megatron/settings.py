"""What the Megatron side reads from a job's spec, with its numbers as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rljob_api.base import quantity
from rljob_api.layout import Layout, layout_of, padded_vocabulary, shape_of, stage_patterns
from rljob_api.model_details import SEEDED, Details
from rljob_api.spec import RLJobSpec, Shape
from rljob_workload.algorithm.grpo import LossSettings
from rljob_workload.data.builtin import TaskData
from rljob_workload.huggingface import pretrained
from rljob_workload.megatron import device

#: Tokens in one block of the paged key/value cache at most, on a CPU: larger ones waste reads on short answers, smaller ones
#: cost a call per block (measured: 64 is best from 16 to 512 tokens of context).
BLOCK_TOKENS = 64
#: flash-attn reads paged caches in blocks of this many tokens (and multiples).
FLASH_BLOCK_TOKENS = 256
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: What sequence lengths are rounded up to.
_ROUND = 16


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Model, layout and optimizer."""

    shape: Shape
    layout: Layout
    sequence: bool
    seed: int
    learning_rate: float
    max_sequence_length: int
    micro_batch_size: int
    loss: LossSettings
    #: Layers that can be captured as CUDA graphs; no spec field sets it yet (`dev.gpu_smoke` does).
    cuda_graphs: bool = False
    details: Details = SEEDED
    #: Type of the parameters in the forward pass; the optimizer keeps float32 ones beside others.
    dtype: torch.dtype = torch.float32
    #: Whose layers: Megatron's own, or Transformer Engine's.
    transformer: Literal["Local", "TransformerEngine"] = "Local"
    #: Layers of Transformer Engine that generate by kernels of their own (dual mode).
    inference_optimized: bool = False
    #: Whether the spec gives each rank a GPU.
    gpus: bool = False
    #: The job whose pretrained weights are the first ones; None: they are drawn from the seed.
    pretrained: RLJobSpec | None = None

    @property
    def pattern(self) -> str:
        """Layers of the whole model in Megatron's words, `|` between pipeline stages."""
        return "|".join(stage_patterns(self.shape, self.layout.pipeline))

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding; those beyond the vocabulary are never sampled nor trained."""
        return padded_vocabulary(self.shape.vocab_size, self.layout.tensor)

    @property
    def lengths_may_differ(self) -> bool:
        """Whether micro-batches may have lengths of their own: pipeline stages and experts exchange activations of one size."""
        return self.layout.pipeline == 1 and self.layout.expert == 1

    def padded_length(self, longest: int) -> int:
        """Tokens of a padded row of at least `longest`; sequence parallelism shares all but one out over the tensor ranks."""
        parts = self.layout.tensor if self.sequence else 1
        return -(-(longest - 1) // parts) * parts + 1


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The resident engine."""

    max_requests: int
    #: A multiple of `block_tokens`.
    max_sequence_length: int
    block_tokens: int
    longest_prompt: int
    new_tokens: int
    eos: int | None
    temperature: float
    kv_mode: str
    kv_bytes: int
    #: Decode steps captured for so many batch sizes; None: none. Needs a model whose layers can be captured.
    cuda_graphs: int | None = None


def model_settings(spec: RLJobSpec, *, fresh: bool = True) -> ModelSettings:
    """Model settings of a validated spec. `fresh` False: a checkpoint follows, so no pretrained weights are read.

    Raises PretrainedError.
    """
    grpo, details = spec.algorithm.grpo, SEEDED
    if spec.model.hugging_face is None:
        shape = shape_of(spec.model)
        if shape is None:
            raise ValueError("spec.model names no sizes; a rule refuses that")
    else:
        facts = pretrained.describe(spec)
        shape, details = facts.shape, facts.details
    return ModelSettings(
        shape=shape,
        layout=layout_of(spec),
        sequence=spec.parallelism.sequence,
        seed=spec.trainer.seed,
        learning_rate=float(grpo.learning_rate),
        max_sequence_length=spec.generation.max_sequence_length,
        micro_batch_size=grpo.micro_batch_size,
        loss=LossSettings(
            clip_low=float(grpo.clip_low),
            clip_high=float(grpo.clip_high),
            entropy_coefficient=float(grpo.entropy_coefficient),
            temperature=float(spec.generation.temperature),
        ),
        details=details,
        dtype=_DTYPES[spec.model.dtype],
        transformer=spec.model.transformer,
        inference_optimized=spec.generation.inference_optimized,
        gpus=spec.trainer.gpus_per_node > 0,
        pretrained=spec if fresh and spec.model.hugging_face is not None else None,
    )


def engine_settings(spec: RLJobSpec, task: TaskData) -> EngineSettings:
    """Engine settings of a validated spec and its data."""
    generation = spec.generation
    if device.kind() == "cuda":
        block = FLASH_BLOCK_TOKENS
    else:
        block = min(BLOCK_TOKENS, _rounded(generation.max_sequence_length, _ROUND))
    return EngineSettings(
        max_requests=generation.max_requests,
        max_sequence_length=_rounded(generation.max_sequence_length, block),
        block_tokens=block,
        longest_prompt=task.prompt_tokens,
        new_tokens=task.new_tokens(generation.max_new_tokens),
        eos=task.eos,
        temperature=float(generation.temperature),
        kv_mode=generation.kv_cache.mode.lower(),
        kv_bytes=int(quantity(generation.kv_cache.size)),
    )


def _rounded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
