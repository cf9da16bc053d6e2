"""What a Hugging Face config.json says of a model, and whether a spec agrees with it.

Used where the file can be read: by `rljob validate --model DIR`, and on the volume before an attempt. The families are those
whose weights the workload can map.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from .findings import Finding
from .layout import layout_of
from .model_details import SEEDED, Details, ModelConfigError, read_details
from .rule import Rule
from .rules import check_spec
from .spec import RLJobSpec, Shape

MAX_BYTES = 2**20

MODEL_RULE = Rule(
    "model-config",
    "ModelConfigMismatch",
    "error",
    "model.shape says what the model's config.json says, and the layout fits what only that file knows (head size, "
    "Mamba heads, "
    "shared experts, biases). Checked by `rljob validate --model DIR`.",
    reads=frozenset({"spec.model.shape", "spec.parallelism.tensor", "spec.generation.inferenceOptimized"}),
)


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model, and what the shape in a spec does not hold."""

    family: str
    shape: Shape
    head_size: int
    biased: bool = False
    gated: bool = True
    mamba_heads: int = 0
    mamba_groups: int = 0
    shared_ffn: int = 0
    #: How its layers compute; only where `unmapped` is empty.
    details: Details = SEEDED
    #: Tokens that positions were made for; None where the file does not say.
    max_length: int | None = None
    #: Why this version cannot begin from the model's weights; empty where it can.
    unmapped: str = ""


def read_config(text: str) -> ModelFacts:
    """The facts in a config.json. Raises ModelConfigError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelConfigError("not JSON") from None
    if not isinstance(config, dict):
        raise ModelConfigError("not a JSON object")
    family = config.get("model_type")
    read = FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        raise ModelConfigError(f"model_type is {family!r}; known are {', '.join(FAMILIES)}")
    try:
        return read(config)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        what = ".".join(map(str, detail["loc"]))
        raise ModelConfigError(f"{family}: {what} of the model: {detail['msg']}") from None


def _whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these numbers that the file has. Raises ModelConfigError."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelConfigError(f"{name} is {value!r}; it has to be a whole number from 1")
        return value
    if default is None:
        raise ModelConfigError(f"{' or '.join(names)} is missing")
    return default


def _decoder(config: Mapping[str, Any], **more: Any) -> tuple[Shape, int]:
    """Shape and head size of a decoder."""
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    sizes = {
        "layers": _whole(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "attention_heads": heads,
        "query_groups": _whole(config, "num_key_value_heads", default=heads),
        "ffn_hidden_size": _whole(config, "intermediate_size"),
        "vocab_size": _whole(config, "vocab_size"),
    }
    return Shape(**{**sizes, **more}), _whole(config, "head_dim", default=max(1, hidden // heads))


def _mapped(family: str, shape: Shape, head_size: int, config: Mapping[str, Any], *, biased: bool) -> ModelFacts:
    """A model of which the workload maps the tensors, if its details are among those that Megatron's layers have."""
    details, unmapped = read_details(family, config, shape, head_size)
    length = _whole(config, "max_position_embeddings", default=0) or None
    return ModelFacts(family, shape, head_size, biased=biased, details=details, max_length=length, unmapped=unmapped)


def _llama(config: Mapping[str, Any]) -> ModelFacts:
    biased = bool(config.get("attention_bias") or config.get("mlp_bias"))
    return _mapped("llama", *_decoder(config), config, biased=biased)


def _mixtral(config: Mapping[str, Any]) -> ModelFacts:
    shape, head_size = _decoder(
        config, experts=_whole(config, "num_local_experts"), top_k=_whole(config, "num_experts_per_tok")
    )
    return _mapped("mixtral", shape, head_size, config, biased=False)


def _qwen2(config: Mapping[str, Any]) -> ModelFacts:
    return _mapped("qwen2", *_decoder(config), config, biased=True)  # queries, keys and values have one in every Qwen2


def _qwen3(config: Mapping[str, Any]) -> ModelFacts:
    return _mapped("qwen3", *_decoder(config), config, biased=bool(config.get("attention_bias")))


def _qwen3_moe(config: Mapping[str, Any]) -> ModelFacts:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelConfigError("mlp_only_layers and decoder_sparse_step: layers without experts among others are not supported")
    shape, head_size = _decoder(
        config,
        ffn_hidden_size=_whole(config, "moe_intermediate_size"),
        experts=_whole(config, "num_experts", "num_local_experts"),
        top_k=_whole(config, "num_experts_per_tok"),
    )
    return _mapped("qwen3_moe", shape, head_size, config, biased=bool(config.get("attention_bias")))


_BLOCKS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _nemotron_h(config: Mapping[str, Any]) -> ModelFacts:
    pattern = config.get("hybrid_override_pattern")
    if pattern is None and isinstance(config.get("layers_block_type"), list):
        pattern = "".join(_BLOCKS.get(str(block), "?") for block in config["layers_block_type"])
    if not isinstance(pattern, str):
        raise ModelConfigError("hybrid_override_pattern is missing")
    more: dict[str, Any] = {"hybrid_pattern": pattern, "layers": _whole(config, "num_hidden_layers", default=len(pattern) or 1)}
    if "E" in pattern:
        more["experts"] = _whole(config, "n_routed_experts")
        more["top_k"] = _whole(config, "num_experts_per_tok")
        if "-" not in pattern:
            more["ffn_hidden_size"] = _whole(config, "moe_intermediate_size")
    shape, head_size = _decoder({"num_hidden_layers": 1, **config}, **more)
    shared = config.get("n_shared_experts", 1) and "E" in pattern
    return ModelFacts(
        "nemotron_h",
        shape,
        _whole(config, "head_dim", "attention_head_dim", default=head_size),
        biased=any(bool(config.get(name)) for name in ("use_bias", "mlp_bias", "attention_bias")),
        gated=False,
        mamba_heads=_whole(config, "mamba_num_heads") if "M" in pattern else 0,
        mamba_groups=_whole(config, "n_groups", "mamba_n_groups", default=8) if "M" in pattern else 0,
        shared_ffn=_whole(config, "moe_shared_expert_intermediate_size", default=0) if shared else 0,
        unmapped="this version has no mapping for the tensors of a nemotron_h model",
    )


FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelFacts]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "nemotron_h": _nemotron_h,
}


def check_model(spec: RLJobSpec, facts: ModelFacts) -> list[Finding]:
    """Where the spec contradicts the model, and which rules its sizes break where the spec gives none."""
    found = [
        Finding(MODEL_RULE.id, MODEL_RULE.reason, MODEL_RULE.severity, path, message)
        for path, message in _contradictions(spec, facts)
    ]
    if spec.model.hugging_face is not None and facts.unmapped:
        message = f"{spec.model.hugging_face.path} is not supported yet by this version: {facts.unmapped}"
        found.append(Finding("not-supported-yet", "NotSupportedYet", "error", "spec.model.huggingFace.path", message))
    if spec.model.shape is None:
        model = spec.model.model_copy(update={"shape": facts.shape})
        known = {(one.rule, one.path, one.message) for one in check_spec(spec)}
        complete = check_spec(spec.model_copy(update={"model": model}))
        found += [one for one in complete if (one.rule, one.path, one.message) not in known]
    return found


def _contradictions(spec: RLJobSpec, facts: ModelFacts) -> Iterator[tuple[str, str]]:
    ours, theirs = spec.model.shape, facts.shape
    if ours is not None:
        for name, info in Shape.model_fields.items():
            mine, real = getattr(ours, name), getattr(theirs, name)
            if name == "query_groups" and mine is None:
                mine = ours.attention_heads
            if mine != real and not (name == "top_k" and mine is None):
                yield f"spec.model.shape.{info.alias}", f"{_shown(mine)} differs from {_shown(real)} in the model's config.json"
    yield from _beyond_shape(spec, facts)


def _beyond_shape(spec: RLJobSpec, facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """Megatron's demands on what only config.json knows."""
    tensor, shape = layout_of(spec).tensor, facts.shape
    heads, groups = shape.attention_heads, shape.query_groups or shape.attention_heads
    path = "spec.parallelism.tensor"
    width = facts.head_size * (heads + 2 * groups)
    if heads % tensor == 0 and width % tensor:
        yield path, f"queries, keys and values are {width} wide, which is not divisible by tensor {tensor}"
    for what, size in (("Mamba heads", facts.mamba_heads), ("Mamba groups", facts.mamba_groups)):
        if size % tensor:
            yield path, f"the model's {size} {what} are not divisible by tensor {tensor}"
    if facts.shared_ffn % tensor:
        yield path, f"the shared experts' width {facts.shared_ffn} is not divisible by tensor {tensor}"
    if spec.generation.inference_optimized:
        dual = "spec.generation.inferenceOptimized"
        if facts.biased:
            yield dual, f"true does not go with the biases of this {facts.family} model; set it to false"
        if shape.experts and facts.gated:
            yield dual, f"true does not go with the gated experts of this {facts.family} model; set it to false"


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
