"""Torch versions of the two flash-attention functions that Megatron's dynamic engine calls.

Keys and values are paged: [blocks, block size, heads, dimension], found through a block table [requests, blocks].

Decoding (one query per request) on a CPU reads the cache where it lies, as flash-decoding does: attention over each block by
itself, then the blocks of a request joined by their log-sum-exps. Gathering the pages of all requests side by side, padded to
the longest, costs five to ten times as much where lengths differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from rljob_workload.megatron.shim.offload import zeros


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
    if q.shape[1] == 1 and q.device.type == "cpu":
        return _decode(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale)
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
        if length == 1 and q.device.type == "cpu":
            # Requests that decode while others are read in.
            out[first] = _decode(q[rows], k, v, lens, block_table[requests], softmax_scale).flatten(0, 1)
            continue
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
    _clear_new_caches(dynamic_context.DynamicInferenceContext)


def _clear_new_caches(context: Any) -> None:
    """Memory that nobody has written may hold NaN, and a masked NaN is still one: a cache starts as zeros.

    They come from the system unwritten, so that what no request has used yet takes no memory.
    """
    allocate = context._allocate_memory_buffer
    if allocate.__name__ == "cleared":
        return

    def cleared(self: Any) -> None:
        allocate(self)
        if self.memory_buffer.device.type == "cpu":
            self.memory_buffer = zeros(self.memory_buffer.shape, self.memory_buffer.dtype)
        else:
            self.memory_buffer.zero_()

    context._allocate_memory_buffer = cleared


def _require_plain(window_size: tuple[int, int], extra_output: bool, block_table: Tensor | None) -> None:
    if tuple(window_size) != (-1, -1) or extra_output or block_table is None:
        raise NotImplementedError(f"the attention stand-in knows full attention over a paged cache only (window {window_size})")


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which blocks a decoding step reads, and for whom. The same in every layer of the step.

    The cache is read from block `low` to `high`; where the used blocks lie too far apart, they are copied together (`gather`).
    """

    lengths: Tensor
    table: Tensor
    low: int
    high: int
    gather: Tensor | None
    #: Tokens of the fullest block.
    width: int
    #: Of every used block: its request, and its place in what is read.
    owner: Tensor
    place: Tensor
    #: Of every block read: 0 where it holds a token of its request, else -inf.
    mask: Tensor
    #: Whether some request has more than one block.
    joins: bool

    def is_for(self, lengths: Tensor, table: Tensor) -> bool:
        """Whether it was made for this very step."""
        return torch.equal(self.lengths, lengths) and torch.equal(self.table, table)

    @classmethod
    def of(cls, lengths: Tensor, table: Tensor, size: int, dtype: torch.dtype) -> _Plan:
        """lengths [B], table [B, blocks]; at least one length is not 0."""
        counts = (lengths + (size - 1)) // size
        most = int(counts.max())
        index = torch.arange(most)
        used = index < counts.unsqueeze(1)
        owner = torch.arange(len(lengths)).unsqueeze(1).expand_as(used)[used]
        blocks = table[:, :most][used].long()
        tokens = (lengths[owner] - (index * size).expand_as(used)[used]).clamp_max(size)
        low, high = int(blocks.min()), int(blocks.max()) + 1
        spread = high - low > 2 * len(blocks)
        place = torch.arange(len(blocks)) if spread else blocks - low
        width = int(tokens.max())
        # A block of nobody is read as if it had one token: its result is not used, and nothing must be infinite.
        room = torch.ones(len(blocks) if spread else high - low, dtype=tokens.dtype)
        room[place] = tokens
        hidden = torch.arange(width) >= room.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
        return cls(
            lengths.clone(), table.clone(), low, high, blocks if spread else None, width, owner, place, mask, most > 1
        )  # fmt: skip


_plan: _Plan | None = None


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """q [B, 1, H, D], one query at the end of each request; requests of length 0 are padding and get zeros."""
    global _plan
    requests, _, heads, dimension = q.shape
    size, key_heads = k_cache.shape[1], k_cache.shape[2]
    out = torch.zeros_like(q).view(requests, key_heads, heads // key_heads, dimension)
    if not lengths.any():
        return out.view_as(q)
    if _plan is None or not _plan.is_for(lengths, table):
        _plan = _Plan.of(lengths, table, size, q.dtype)
    plan = _plan
    keys, values = (_read(cache, plan) for cache in (k_cache, v_cache))
    # The query heads that share a key head are the queries of one block.
    queries = q.new_zeros(plan.mask.shape[0], *out.shape[1:])
    queries[plan.place] = q.view_as(out)[plan.owner]
    parts, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, False, attn_mask=plan.mask, scale=scale
    )
    parts = parts[plan.place]
    if not plan.joins:
        out[plan.owner] = parts
        return out.view_as(q)
    logs = logs[plan.place]
    owner = plan.owner[:, None, None].expand_as(logs)
    largest = logs.new_full(out.shape[:3], float("-inf")).scatter_reduce_(0, owner, logs, "amax")
    weights = (logs - largest[plan.owner]).exp()
    total = torch.zeros_like(largest).index_add_(0, plan.owner, weights)
    out.index_add_(0, plan.owner, parts * (weights / total[plan.owner]).unsqueeze(-1).to(parts.dtype))
    return out.view_as(q)


def _read(cache: Tensor, plan: _Plan) -> Tensor:
    """The plan's blocks of a cache [blocks, size, heads, dimension], as [blocks, heads, tokens, dimension]."""
    blocks = cache[plan.low : plan.high] if plan.gather is None else cache[plan.gather]
    return blocks[:, : plan.width].transpose(1, 2)


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
