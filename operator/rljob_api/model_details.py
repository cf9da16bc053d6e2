"""How the layers of a model compute, beside their sizes, as a Hugging Face config.json says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .spec import Shape


class ModelConfigError(ValueError):
    """The file is no config.json of a known family; the message says why."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary positions stretched as in Llama 3: wavelengths above `original / low` by `factor`, below `original / high` not."""

    factor: float
    low: float
    high: float
    original: int

    def __str__(self) -> str:
        return f"llama3 {self.factor!r} {self.low!r} {self.high!r} {self.original}"

    @classmethod
    def parse(cls, text: str) -> RopeScaling:
        """The inverse of `str`. Raises ValueError."""
        kind, factor, low, high, original = text.split()
        if kind != "llama3":
            raise ValueError(f"{text!r} is no scaling of rotary positions")
        return cls(float(factor), float(low), float(high), int(original))


@dataclass(frozen=True, slots=True)
class Details:
    """What a model's layers are. The defaults are those of every model that begins from a seed."""

    #: Width of a head; None: hiddenSize / attentionHeads.
    head_size: int | None = None
    #: Added to the mean square in an RMS norm.
    norm_epsilon: float = 1e-6
    #: Base period of the rotary positions.
    rotary_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    #: Whether the embedding is the output layer too.
    tied: bool = True
    #: Whether queries, keys and values have a bias.
    qkv_bias: bool = False
    #: Whether queries and keys have a norm of their own.
    query_norm: bool = False


#: Of every model that begins from a seed.
SEEDED = Details()

#: Where a config.json does not say them: what transformers takes then.
_BASES = {"mixtral": 1_000_000.0}
_EPSILONS = {"mixtral": 1e-5}


def read_details(family: str, config: Mapping[str, Any], shape: Shape, head_size: int) -> tuple[Details, str]:
    """The details in a config.json, and why Megatron's layers, as the workload builds them, can't have them ("" if they can).

    Raises ModelConfigError for values that are no such details.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelConfigError(f"rope_parameters is {rope!r}; it has to be an object")
    base = _positive(rope if "rope_theta" in rope else config, "rope_theta", _BASES.get(family, 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    usual = shape.hidden_size // shape.attention_heads
    details = Details(
        head_size=None if head_size == usual else head_size,
        norm_epsilon=_positive(config, "rms_norm_eps", _EPSILONS.get(family, 1e-6)),
        rotary_base=base,
        rope_scaling=_scaling(rope) if kind == "llama3" else None,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        query_norm=family in ("qwen3", "qwen3_moe"),
    )
    return details, _beyond(family, config, kind)


def _scaling(rope: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        factor=_positive(rope, "factor"),
        low=_positive(rope, "low_freq_factor"),
        high=_positive(rope, "high_freq_factor"),
        original=int(_positive(rope, "original_max_position_embeddings")),
    )


def _beyond(family: str, config: Mapping[str, Any], rope_kind: object) -> str:
    """What of the file this version's layers do not do; the first."""
    if rope_kind not in ("default", "llama3"):
        return f"rope_type is {rope_kind!r}; default and llama3 are"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {config['hidden_act']!r}; silu is"
    if config.get("quantization_config"):
        return "its weights are quantized (quantization_config)"
    if config.get("partial_rotary_factor", 1) != 1:
        return f"partial_rotary_factor is {config['partial_rotary_factor']!r}; 1 is"
    if family != "qwen2" and (config.get("attention_bias") or config.get("mlp_bias")):
        return "attention_bias or mlp_bias: biases beside those of queries, keys and values of a qwen2 model"
    sliding = config.get("use_sliding_window") if family.startswith("qwen") else config.get("sliding_window")
    if sliding or "sliding_attention" in (config.get("layer_types") or ()):
        return "sliding windows of attention (sliding_window)"
    if family == "qwen3_moe" and not config.get("norm_topk_prob"):
        return "norm_topk_prob is false: weights of the chosen experts that do not add up to 1"
    return ""


def _positive(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelConfigError(f"{name} is {value!r}; it has to be a number above 0")
    return float(value)
