"""Matrix products of Megatron's linear layers by oneDNN.

torch multiplies float32 matrices on a CPU with MKL, which leaves AVX-512 unused on processors of other makers: oneDNN is
twice as fast there and no slower elsewhere. torch has no switch for it (its own linear layers have the same limit), but it
ships the operator that its compiler would choose. What is computed stays the same up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Below this many multiplications the call itself costs more than it saves.
_WORTH = 1 << 20

_real_matmul = torch.matmul
_usable: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def matmul(a: Tensor, b: Tensor, **rest: Any) -> Tensor:
    """`torch.matmul` for a [..., K] and b [K, N]; whatever does not fit goes to torch's own."""
    if rest or not _fits(a, b):
        return _real_matmul(a, b, **rest)
    rows = a.numel() // a.shape[-1]
    if rows * b.numel() < _WORTH:
        return _real_matmul(a, b)
    if a.dim() == 2 and a.stride(0) == 1 and rows > b.shape[1]:
        # A transposed left side (the gradient of a weight): oneDNN prefers the product with fewer rows, transposed.
        return _product(b.t(), a.t()).t()
    return _product(a, b)


def _fits(a: Tensor, b: Tensor) -> bool:
    return (
        _usable
        and b.dim() == 2
        and a.dim() >= 2
        and a.numel() > 0  # an expert that got no tokens
        and a.dtype == b.dtype == torch.float32
        and a.device.type == b.device.type == "cpu"
        # The operator has no gradient; Megatron's linear layers bring their own.
        and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return result
