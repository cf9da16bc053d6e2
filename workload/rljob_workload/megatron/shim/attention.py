"""Torch versions of the two flash-attention functions that Megatron's dynamic engine calls.

Keys and values are paged: [blocks, block size, heads, dimension], found through a block table [requests, blocks].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    **_: Any,
) -> Tensor:
    """Decode: every request brings the same number of new tokens."""
    _require_plain(window_size, return_softmax_lse, block_table)
    assert block_table is not None
    longest = max(int(cache_seqlens.max()), 1)
    keys, values = _pages(k_cache, block_table, longest), _pages(v_cache, block_table, longest)
    return _attend(q, keys, values, cache_seqlens, softmax_scale, causal)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor | None = None,
    return_attn_probs: bool = False,
    **_: Any,
) -> Tensor:
    """Prefill: requests of different lengths, packed. Those with equal query lengths run as one batch."""
    _require_plain(window_size, return_attn_probs, block_table)
    assert block_table is not None
    out = torch.zeros_like(q)
    starts, lengths, key_lengths = cu_seqlens_q.tolist(), cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff()
    by_length: dict[int, list[int]] = {}
    for request, length in enumerate(lengths):
        if length > 0:
            by_length.setdefault(length, []).append(request)
    for length, requests in by_length.items():
        first = torch.tensor([starts[r] for r in requests], device=q.device)
        rows = first.unsqueeze(1) + torch.arange(length, device=q.device)
        lens = key_lengths[requests]
        longest = max(int(lens.max()), 1)
        keys, values = (_pages(cache, block_table[requests], longest) for cache in (k, v))
        out[rows.flatten()] = _attend(q[rows], keys, values, lens, softmax_scale, causal).flatten(0, 1)
    return out


def install() -> None:
    """Give Megatron's attention these functions, and its own torch fallback for appending to the cache."""
    import megatron.core.inference.contexts.dynamic_context as dynamic_context
    import megatron.core.transformer.attention as attention

    attention.flash_attn_varlen_func = flash_attn_varlen_func
    attention.flash_attn_with_kvcache = flash_attn_with_kvcache
    attention.is_fa_min_version = lambda *_, **__: True
    attention.HAVE_FA3 = attention.HAVE_FA4 = False
    dynamic_context.triton_append_key_value_cache = None


def _require_plain(window_size: tuple[int, int], extra_output: bool, block_table: Tensor | None) -> None:
    if tuple(window_size) != (-1, -1) or extra_output or block_table is None:
        raise NotImplementedError(f"the attention stand-in knows full attention over a paged cache only (window {window_size})")


def _pages(cache: Tensor, block_table: Tensor, longest: int) -> Tensor:
    """The cached vectors of every request, side by side: [requests, longest, heads, dimension]."""
    size = cache.shape[1]
    table = block_table[:, : -(-longest // size)].clamp_min(0).long()
    return cache[table].flatten(1, 2)[:, :longest]


def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float | None, causal: bool) -> Tensor:
    """q [B, S, H, D], k and v [B, L, Hk, D], lengths [B]. The causal mask is aligned bottom-right, as flash-attention's."""
    batch, queries, heads, _ = q.shape
    keys, key_heads = k.shape[1], k.shape[2]
    visible = lengths.long()[:, None, None].expand(batch, queries, 1)
    if causal:
        visible = visible - (queries - 1 - torch.arange(queries, device=q.device))[None, :, None]
    mask = (torch.arange(keys, device=q.device)[None, None, :] < visible)[:, None]
    k, v = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    if key_heads != heads:
        k, v = k.repeat_interleave(heads // key_heads, 1), v.repeat_interleave(heads // key_heads, 1)
    out = functional.scaled_dot_product_attention(q.permute(0, 2, 1, 3), k, v, attn_mask=mask, scale=scale)
    return torch.nan_to_num(out).permute(0, 2, 1, 3)  # rows without keys are padding
