"""Which Hugging Face architecture a checkpoint's model is, and its config.json. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from rljob_api.layout import stage_patterns
from rljob_api.spec import Shape
from rljob_workload.core.store.facts import LENGTH, SHAPE
from rljob_workload.core.store.manifest import Facts
from rljob_workload.huggingface.errors import ExportError
from rljob_workload.megatron.conventions import NORM_EPSILON, ROTARY_BASE

Family = Literal["llama", "mixtral"]
#: As transformers calls their classes.
_CLASSES: dict[Family, str] = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model that Hugging Face has an architecture for. `shape.layers` counts blocks of attention and feed-forward."""

    family: Family
    shape: Shape
    #: Tokens that positions were trained for.
    max_length: int

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.shape.query_groups or self.shape.attention_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.shape.hidden_size // self.shape.attention_heads


def architecture(facts: Facts, max_length: int | None = None) -> Architecture:
    """The architecture of a checkpoint with these facts. `max_length` replaces what the facts say. Raises ExportError."""
    shape = _shape(facts)
    family: Family = "mixtral" if shape.experts else "llama"
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
    return Architecture(family, shape, length)


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
    shape = of.shape
    told: dict[str, Any] = {
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
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": float(ROTARY_BASE),
        # As transformers has written it since version 5; others read the line above.
        "rope_parameters": {"rope_type": "default", "rope_theta": float(ROTARY_BASE)},
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "use_cache": True,
        **special,
    }
    if of.family == "llama":
        return told | {"attention_bias": False, "mlp_bias": False}
    return told | {
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k or min(2, shape.experts or 0),
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
    }
