"""Gather and reduce-scatter of uneven parts: NCCL has them, gloo wants all parts of one size.

Ranks that split an expert's matrices exchange the tokens that each of them was sent, and these differ in number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_along_first_dim(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's function, with parts padded to the longest while they travel."""

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = _whole(output_split_sizes)
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def reduce_scatter_along_first_dim(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's function: everything is reduced, and each rank keeps its part."""

    def reduce_scatter(input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.clone()
        dist.all_reduce(whole, group=group)
        sizes, rank = _whole(input_split_sizes), group.rank()
        start = sum(sizes[:rank])
        return whole[start : start + sizes[rank]]

    return reduce_scatter


def _whole(sizes: Sequence[Any]) -> list[int]:
    return [int(size) for size in sizes]
