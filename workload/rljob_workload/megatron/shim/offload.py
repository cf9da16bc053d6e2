"""Cache mode Offload on a CPU: at a hand-over only the blocks that some request uses are kept.

Megatron copies the whole cache away and back, which a GPU does beside other work. Here both copies are the processor's, and
half of their time is the system's, which clears the pages of the new cache one by one.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

_originals: tuple[Any, Any] | None = None


def install() -> None:
    """Replace the two functions of the engine's context that free the cache and bring it back."""
    global _originals
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    if _originals is None:
        _originals = (
            DynamicInferenceContext.deallocate_inference_state_buffers,
            DynamicInferenceContext.reinitialize_inference_state_buffers,
        )
        DynamicInferenceContext.deallocate_inference_state_buffers = put_away
        DynamicInferenceContext.reinitialize_inference_state_buffers = bring_back


def put_away(context: Any) -> None:
    """Free the cache; what its used blocks hold stays. Calling it twice changes nothing."""
    assert _originals is not None
    if not _is_plain_offload(context):
        _originals[0](context)
    elif context.is_tensor_state_allocated:
        context.is_tensor_state_allocated = False
        cache, used = context.memory_buffer, _used_blocks(context)
        context.rljob_kept = (cache.shape, used, cache[:, :, used])
        context.memory_buffer = cache.new_empty(0)


def bring_back(context: Any) -> None:
    """A new cache, with the blocks that were kept in their places. Calling it twice changes nothing."""
    assert _originals is not None
    if not _is_plain_offload(context):
        _originals[1](context)
    elif not context.is_tensor_state_allocated:
        context.is_tensor_state_allocated = True
        shape, used, kept = context.rljob_kept
        context.memory_buffer = zeros(shape, kept.dtype)
        context.memory_buffer[:, :, used] = kept
        del context.rljob_kept


def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory that comes from the system as zeros, unwritten: what nobody uses takes no memory, and no time."""
    count = shape.numel() * dtype.itemsize
    return torch.from_numpy(numpy.zeros(count, numpy.uint8)).view(dtype).view(shape)


def _is_plain_offload(context: Any) -> bool:
    """Whether it is about keys and values only: [2, layers, blocks, block size, heads, dimension]."""
    mode, moved = context.kv_cache_management_mode.value, context._offloadable_tensor_names
    return bool(mode == "offload" and moved == {"memory_buffer"} and not context.cache_mla_latent)


def _used_blocks(context: Any) -> Tensor:
    table = context.request_to_kv_block_ids[: context.total_request_count]
    used: Tensor = table[table >= 0].unique().long()
    return used
