"""Layout arithmetic: how many ranks there are and how Megatron splits them. Pure integers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .spec import Model, RLJobSpec, Shape

PRESETS = {
    "tiny": Shape(layers=2, hidden_size=64, attention_heads=4, query_groups=4, ffn_hidden_size=128, vocab_size=64),
}


#: Calls that one of Ray's asyncio actors runs at once by default (measured: 999 are answered, the 1,000th blocks), and how many
#: of them stay free for control calls and retries. Each answer of a group is one call.
ACTOR_CALLS = 1000
CALLS_KEPT_FREE = 100


@dataclass(frozen=True)
class Layout:
    """Resolved sizes of the process groups.

    `world = nodes * ranks_per_node`; the dense data-parallel size is `world / (tensor * pipeline * context)`
    (Megatron's `parallel_state.initialize_model_parallel`), 0 where it does not divide.
    """

    nodes: int
    ranks_per_node: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int

    @property
    def world(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense model."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Data-parallel size; 0 when the world is not divisible."""
        return self.world // self.model_ranks if self.world % self.model_ranks == 0 else 0

    def replicas(self) -> list[list[int]]:
        """Ranks that generate together, one list per set; every rank is in exactly one.

        Megatron numbers ranks tensor first, then data, then pipeline, and experts over consecutive ranks of a stage. A set is
        one copy of the model, or several where their ranks share experts: these exchange tokens in every layer, so all of
        them take every step together.
        """
        stage = self.world // self.pipeline
        block = math.lcm(self.tensor * self.context, self.expert_tensor * self.expert)
        return [
            [first + number * stage + rank for number in range(self.pipeline) for rank in range(block)]
            for first in range(0, stage, block)
        ]


def layout_of(spec: RLJobSpec) -> Layout:
    """The layout that the spec describes; unset sizes resolved."""
    sizes = spec.parallelism
    trainer = spec.trainer
    return Layout(
        nodes=trainer.nodes,
        ranks_per_node=trainer.gpus_per_node or trainer.ranks_per_node,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        context=sizes.context,
        expert=sizes.expert,
        expert_tensor=sizes.expert_tensor or sizes.tensor,
    )


def shape_of(model: Model) -> Shape | None:
    """The model's sizes with queryGroups resolved; None when only its config.json knows them."""
    shape = model.shape or (PRESETS[model.preset] if model.preset else None)
    if shape is None:
        return None
    return shape.model_copy(update={"query_groups": shape.query_groups or shape.attention_heads})


def in_flight_prompts(spec: RLJobSpec) -> int:
    """Configured cap on prompts answered at the same time: `promptsPerStep * maxTrajectoryAgeSteps` when unset."""
    grpo = spec.algorithm.grpo
    return spec.generation.max_in_flight_prompts or grpo.prompts_per_step * grpo.max_trajectory_age_steps


def padded_vocabulary(size: int, tensor: int) -> int:
    """Rows of the embedding: the next multiple of the tensor-parallel size, since each of its ranks holds as many."""
    return -(-size // tensor) * tensor


def stage_patterns(shape: Shape, stages: int) -> list[str]:
    """Layer symbols of each pipeline stage as Megatron writes them: `*` attention, `-` feed-forward, `E` experts, `M` Mamba.

    A decoder without a pattern is cut between whole blocks. Raises ValueError where the layers can't be shared out evenly.
    """
    if shape.layers % stages:
        raise ValueError(f"{shape.layers} layers are not divisible by {stages} pipeline stages")
    if shape.hybrid_pattern is not None:
        length = len(shape.hybrid_pattern) // stages
        return [shape.hybrid_pattern[stage * length : (stage + 1) * length] for stage in range(stages)]
    block = "*E" if shape.experts else "*-"
    return [block * (shape.layers // stages)] * stages
