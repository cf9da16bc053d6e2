"""A digest of the weights that does not depend on how they are sharded.

The bits of every parameter element, taken as an integer, go into two power sums modulo 2**64. Sums of parts add up, so ranks
and shards of any layout give the same digest for the same weights; one changed element changes it. It is made to find stale or
exchanged tensors, not an adversary: the bytes of the files are held by the SHA-256 sums in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rljob_workload.core.weight_digest import WeightDigest

_MODULUS = 2**64
#: Elements that are widened to 64 bits at a time: they stay in the cache.
_CHUNK = 1 << 17
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Iterable[Tensor]) -> WeightDigest:
    """The digest of all elements, on whatever device they are."""
    total = WeightDigest()
    for tensor in tensors:
        total += _digest(tensor.detach())
    return total


def _digest(tensor: Tensor) -> WeightDigest:
    bits = tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    first = torch.zeros((), dtype=torch.int64, device=tensor.device)
    second = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, bits.numel(), _CHUNK):
        wide = bits[begin : begin + _CHUNK].to(torch.int64)
        first += wide.sum()
        second += (wide * wide).sum()  # wraps around, as it shall
    # Zeros are not counted: rows that pad the vocabulary differ in number between layouts.
    return WeightDigest(int(bits.count_nonzero()), int(first) % _MODULUS, int(second) % _MODULUS)
