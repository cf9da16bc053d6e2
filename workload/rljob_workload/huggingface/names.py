"""Which tensor of a Megatron checkpoint becomes which of a Hugging Face model, and back.

A checkpoint's tensors are whole, however many ranks wrote them, so no layout matters here. Names do: layers that compute a norm
and the matrix after it in one (Transformer Engine's, and the inference-optimized ones, which are subclasses) keep the norm's
weight as `layer_norm_weight` of the matrix. Whether a linear layer is of Megatron's, Transformer Engine's or the inference
classes changes no other name. Without torch: the driver compares names before any rank exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from rljob_workload.huggingface.architecture import Architecture


class How(Enum):
    """How one tensor becomes several."""

    SAME = "same"
    #: The rows beyond the vocabulary, which fill up the tensor-parallel ranks, are cut off.
    VOCABULARY = "vocabulary"
    #: Per query group: its queries, its key, its value.
    QKV = "qkv"
    #: The gate's rows, then the other half's.
    GATED = "gated"
    #: One matrix per expert.
    EXPERTS = "experts"
    #: Both: every expert's gate and other half.
    GATED_EXPERTS = "gated experts"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint."""

    #: Its name, depending on the layer's class; a checkpoint has exactly one of them.
    names: tuple[str, ...]
    #: What it becomes.
    parts: tuple[str, ...]
    how: How
    #: Its size; with VOCABULARY there may be more rows.
    size: tuple[int, ...]


#: The layer of experts, and an expert's gate, other half, and way back.
_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def table(of: Architecture) -> list[Entry]:
    """All tensors of the model, in the order of its layers."""
    shape = of.shape
    matrix = (shape.vocab_size, shape.hidden_size)
    entries = [Entry(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), How.VOCABULARY, matrix)]
    for block in range(shape.layers):
        # The trainer builds hybrid models: attention and feed-forward are layers of their own.
        entries += _attention(of, f"decoder.layers.{2 * block}.", f"model.layers.{block}.")
        entries += _feed_forward(of, f"decoder.layers.{2 * block + 1}.", f"model.layers.{block}.")
    entries.append(Entry(("decoder.final_norm.weight",), ("model.norm.weight",), How.SAME, (shape.hidden_size,)))
    if not of.details.tied:
        entries.append(Entry(("output_layer.weight",), ("lm_head.weight",), How.VOCABULARY, matrix))
    return entries


def _attention(of: Architecture, here: str, there: str) -> Iterator[Entry]:
    hidden, queries = of.shape.hidden_size, of.shape.attention_heads * of.head_size
    wide = queries + 2 * of.groups * of.head_size
    yield Entry(
        (here + "input_layernorm.weight", here + "self_attention.linear_qkv.layer_norm_weight"),
        (there + "input_layernorm.weight",),
        How.SAME,
        (hidden,),
    )
    parts = tuple(f"{there}self_attn.{one}_proj.weight" for one in "qkv")
    yield Entry((here + "self_attention.linear_qkv.weight",), parts, How.QKV, (wide, hidden))
    if of.details.qkv_bias:
        biases = tuple(f"{there}self_attn.{one}_proj.bias" for one in "qkv")
        yield Entry((here + "self_attention.linear_qkv.bias",), biases, How.QKV, (wide,))
    for one in "qk" if of.details.query_norm else "":
        norm = (f"{there}self_attn.{one}_norm.weight",)
        yield Entry((f"{here}self_attention.{one}_layernorm.weight",), norm, How.SAME, (of.head_size,))
    out = here + "self_attention.linear_proj.weight"
    yield Entry((out,), (there + "self_attn.o_proj.weight",), How.SAME, (hidden, queries))


def _feed_forward(of: Architecture, here: str, there: str) -> Iterator[Entry]:
    hidden, inner, experts = of.shape.hidden_size, of.shape.ffn_hidden_size, of.shape.experts
    yield Entry(
        (here + "pre_mlp_layernorm.weight", here + "mlp.linear_fc1.layer_norm_weight"),
        (there + "post_attention_layernorm.weight",),
        How.SAME,
        (hidden,),
    )
    if experts is None:
        gated = (there + "mlp.gate_proj.weight", there + "mlp.up_proj.weight")
        yield Entry((here + "mlp.linear_fc1.weight",), gated, How.GATED, (2 * inner, hidden))
        yield Entry((here + "mlp.linear_fc2.weight",), (there + "mlp.down_proj.weight",), How.SAME, (hidden, inner))
        return
    moe, gate, up, down = _EXPERT_NAMES[of.family]
    yield Entry((here + "mlp.router.weight",), (f"{there}{moe}.gate.weight",), How.SAME, (experts, hidden))
    expert = [f"{there}{moe}.experts.{number}." for number in range(experts)]
    parts = tuple(f"{one}{half}.weight" for one in expert for half in (gate, up))
    yield Entry((here + "mlp.experts.experts.linear_fc1.weight",), parts, How.GATED_EXPERTS, (experts, 2 * inner, hidden))
    parts = tuple(f"{one}{down}.weight" for one in expert)
    yield Entry((here + "mlp.experts.experts.linear_fc2.weight",), parts, How.EXPERTS, (experts, hidden, inner))
