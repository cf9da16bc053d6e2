"""What the Megatron side reads from a job's spec, with its numbers as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.base import quantity
from rljob_api.layout import Layout, layout_of, padded_vocabulary, shape_of, stage_patterns
from rljob_api.spec import RLJobSpec, Shape
from rljob_workload.algorithm.grpo import LossSettings
from rljob_workload.data.builtin import TaskData

#: Tokens in one block of the paged key/value cache.
BLOCK_TOKENS = 16


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

    @property
    def pattern(self) -> str:
        """Layers of the whole model in Megatron's words, `|` between pipeline stages."""
        return "|".join(stage_patterns(self.shape, self.layout.pipeline))

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding; those beyond the vocabulary are never sampled nor trained."""
        return padded_vocabulary(self.shape.vocab_size, self.layout.tensor)

    def padded_length(self, longest: int) -> int:
        """Tokens of a padded row of at least `longest`; sequence parallelism shares all but one out over the tensor ranks."""
        parts = self.layout.tensor if self.sequence else 1
        return -(-(longest - 1) // parts) * parts + 1


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The resident engine."""

    max_requests: int
    max_sequence_length: int
    longest_prompt: int
    new_tokens: int
    eos: int | None
    temperature: float
    kv_mode: str
    kv_bytes: int


def model_settings(spec: RLJobSpec) -> ModelSettings:
    """Model settings of a validated spec."""
    shape, grpo = shape_of(spec.model), spec.algorithm.grpo
    if shape is None:
        raise ValueError("spec.model names no sizes: this version builds presets and spec.model.shape only")
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
    )


def engine_settings(spec: RLJobSpec, task: TaskData) -> EngineSettings:
    """Engine settings of a validated spec and its data."""
    generation = spec.generation
    return EngineSettings(
        max_requests=generation.max_requests,
        max_sequence_length=-(-generation.max_sequence_length // BLOCK_TOKENS) * BLOCK_TOKENS,
        longest_prompt=task.prompt_tokens,
        new_tokens=task.new_tokens(generation.max_new_tokens),
        eos=task.eos,
        temperature=float(generation.temperature),
        kv_mode=generation.kv_cache.mode.lower(),
        kv_bytes=int(quantity(generation.kv_cache.size)),
    )
