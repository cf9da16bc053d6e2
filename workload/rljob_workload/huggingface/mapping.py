"""The tensors of a Megatron checkpoint as those of a Hugging Face model, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rljob_workload.huggingface.architecture import Architecture
from rljob_workload.huggingface.names import Entry, How


def unpack(of: Architecture, entry: Entry, whole: Tensor) -> dict[str, Tensor]:
    """A checkpoint's tensor as what it becomes, by name."""
    match entry.how:
        case How.SAME:
            parts: Sequence[Tensor] = [whole]
        case How.VOCABULARY:
            parts = [whole[: entry.size[0]]]
        case How.QKV:
            grouped = _by_group(of, whole)
            per_group = of.shape.attention_heads // of.groups
            parts = [part.flatten(0, 2) for part in (grouped[:, :per_group], grouped[:, per_group:-1], grouped[:, -1:])]
        case How.GATED:
            parts = whole.chunk(2)
        case How.EXPERTS:
            parts = whole.unbind()
        case How.GATED_EXPERTS:
            parts = [half for expert in whole.unbind() for half in expert.chunk(2)]
    return dict(zip(entry.parts, parts, strict=True))


def pack(of: Architecture, entry: Entry, parts: Sequence[Tensor]) -> Tensor:
    """The other way: what a checkpoint's tensor became, in the entry's order. Padding of the vocabulary does not come back."""
    match entry.how:
        case How.SAME | How.VOCABULARY:
            return parts[0]
        case How.QKV:
            return torch.cat([_by_group(of, part) for part in parts], 1).flatten(0, 2)
        case How.GATED:
            return torch.cat(list(parts))
        case How.EXPERTS:
            return torch.stack(list(parts))
        case How.GATED_EXPERTS:
            return torch.cat(list(parts)).view(entry.size)


def _by_group(of: Architecture, rows: Tensor) -> Tensor:
    """[groups * heads * size, ...] as [groups, heads, size, ...]."""
    return rows.reshape(of.groups, -1, of.head_size, *rows.shape[1:])
