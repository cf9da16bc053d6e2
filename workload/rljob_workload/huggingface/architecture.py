"""Which Hugging Face architecture a checkpoint's model is, and its config.json. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from rljob_api.layout import stage_patterns
from rljob_api.model_details import SEEDED, Details
from rljob_api.spec import Shape
from rljob_workload.core.store.facts import LENGTH, SHAPE, details_in
from rljob_workload.core.store.manifest import Facts
from rljob_workload.huggingface.errors import ExportError

Family = Literal["llama", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
#: As transformers calls their classes.
_CLASSES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model that Hugging Face has an architecture for. `shape.layers` counts blocks of attention and feed-forward."""

    family: Family
    shape: Shape
    #: Tokens that positions were trained for.
    max_length: int
    details: Details = SEEDED

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.shape.query_groups or self.shape.attention_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.details.head_size or self.shape.hidden_size // self.shape.attention_heads


def architecture(facts: Facts, max_length: int | None = None) -> Architecture:
    """The architecture of a checkpoint with these facts. `max_length` replaces what the facts say. Raises ExportError."""
    shape = _shape(facts)
    try:
        details = details_in(facts)
    except ValueError as err:
        raise ExportError(f"the checkpoint's details of the model: {err}") from None
    family = family_of(shape, details)
    pattern = shape.hybrid_pattern
    if pattern is not None:
        block = stage_patterns(Shape(**{**shape.model_dump(), "layers": 1, "hybrid_pattern": None}), 1)[0]
        blocks = len(pattern) // len(block)
        if pattern != block * blocks:
            raise ExportError(
                f"the model's layers are {pattern} ({SHAPE}hybridPattern): {_CLASSES[family]} has attention and feed-forward "
                f"in turn ({block}), and no other Hugging Face architecture has these layers with gated feed-forwards"
            )
        shape = shape.model_copy(update={"layers": blocks, "hybrid_pattern": None})
    if shape.experts and (shape.top_k or min(2, shape.experts)) == 1:
        raise ExportError(
            f"{SHAPE}topK is 1: its router weighs the one expert by its share among all of them, "
            "which no Hugging Face architecture with gated experts does"
        )
    length = max_length or facts.get(LENGTH)
    if not isinstance(length, int) or length < 1:
        raise ExportError(
            f"the checkpoint does not say how long sequences may be ({LENGTH}; an older release wrote it); give --max-length"
        )
    return Architecture(family, shape, length, details)


def family_of(shape: Shape, details: Details) -> Family:
    """The Hugging Face architecture with these layers."""
    if shape.experts:
        return "qwen3_moe" if details.query_norm else "mixtral"
    if details.query_norm:
        return "qwen3"
    return "qwen2" if details.qkv_bias else "llama"


def _shape(facts: Facts) -> Shape:
    given = {path.removeprefix(SHAPE): value for path, value in facts.items() if path.startswith(SHAPE) and value is not None}
    if not given:
        raise ExportError("the checkpoint does not say the model's sizes (an older release wrote it): save once with this one")
    try:
        return Shape.model_validate(given, by_alias=True, by_name=False)
    except ValidationError as err:
        detail = err.errors(include_url=False)[0]
        raise ExportError(f"the checkpoint's {SHAPE}{'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None


def config(of: Architecture, *, dtype: str, special: Mapping[str, int | None]) -> dict[str, Any]:
    """config.json. `special`: ids of the tokens pad_token_id, bos_token_id, eos_token_id, as far as the task has them."""
    shape, details = of.shape, of.details
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": details.rotary_base}
    if (scaling := details.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.original,
        }
    return {
        "architectures": [_CLASSES[of.family]],
        "model_type": of.family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.attention_heads,
        "num_key_value_heads": of.groups,
        "head_dim": of.head_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": of.max_length,
        "hidden_act": "silu",
        "rms_norm_eps": details.norm_epsilon,
        "rope_parameters": rope,
        # As transformers wrote it up to version 4.
        "rope_theta": details.rotary_base,
        **({"rope_scaling": rope} if scaling is not None else {}),
        "attention_dropout": 0.0,
        "tie_word_embeddings": details.tied,
        "torch_dtype": dtype,
        "use_cache": True,
        **special,
        **_own(of),
    }


def _own(of: Architecture) -> dict[str, Any]:
    """What only this family's file has."""
    shape = of.shape
    chosen = {"num_experts_per_tok": shape.top_k or min(2, shape.experts or 0), "router_aux_loss_coef": 0.0}
    match of.family:
        case "llama":
            return {"attention_bias": False, "mlp_bias": False}
        case "qwen2":
            return {"use_sliding_window": False}
        case "qwen3":
            return {"attention_bias": False, "use_sliding_window": False}
        case "mixtral":
            return {"num_local_experts": shape.experts, **chosen, "sliding_window": None}
        case "qwen3_moe":
            experts = {"num_experts": shape.experts, "moe_intermediate_size": shape.ffn_hidden_size, **chosen}
            return {**experts, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False}
