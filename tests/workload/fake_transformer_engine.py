"""A Transformer Engine that is none: its layers in plain torch, so that Megatron's own subclasses of them can run on a CPU.

What is under test is everything but the kernels: which of Megatron's classes a job's model is made of, what their parameters
are called, and that the inference-optimized ones compute by one way in training mode and by another outside it. `CALLS`
counts both. `install` comes before the first import of Megatron.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

#: How often a layer was computed: `training` by Transformer Engine's forward, `norm` by the kernel of the inference layers,
#: which `gather` and `scatter` between tensor ranks.
CALLS: Counter[str] = Counter()
VERSION = "2.3.0"


class _Affine(nn.Module):
    """Weight and bias of one tensor-parallel rank."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, tp_size: int, parallel_mode: str | None, params_dtype: Any,
        init_method: Any = None, return_bias: bool = False, sequence_parallel: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not return_bias
        assert tp_size == 1 or sequence_parallel, "this stand-in splits sequences"
        self.split = tp_size > 1
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.parallel_mode = parallel_mode
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=params_dtype)) if bias else None
        if init_method is not None:
            init_method(self.weight)
        self.weight.tensor_model_parallel = parallel_mode is not None
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0


class Linear(_Affine):
    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region

        CALLS["training"] += 1
        out = functional.linear(x, self.weight, self.bias)
        assert not self.split or self.parallel_mode == "row"
        return reduce_scatter_to_sequence_parallel_region(out) if self.split else out


class LayerNormLinear(_Affine):
    def __init__(self, in_features: int, out_features: int, *, eps: float, normalization: str, **rest: Any) -> None:
        super().__init__(in_features, out_features, **rest)
        assert normalization == "RMSNorm"
        self.eps_of_norm = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=rest["params_dtype"]))
        self.layer_norm_weight.sequence_parallel = rest["sequence_parallel"]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        CALLS["training"] += 1
        normed = rms(x, self.layer_norm_weight, self.eps_of_norm)
        whole = gather_from_sequence_parallel_region(normed) if self.split else normed
        return functional.linear(whole, self.weight, self.bias)


class GroupedLinear(nn.Module):
    """One matrix for each expert of this rank, in parameters of their own."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, bias: bool, tp_size: int, params_dtype: Any,
        return_bias: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert tp_size == 1
        assert not bias
        assert not return_bias
        self.num_gemms, self.use_bias = num_gemms, False
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            self.register_parameter(f"weight{number}", weight)

    def init_fp8_metadata(self, num_gemms: int) -> None: ...

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        CALLS["experts"] += 1
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return torch.cat([functional.linear(part, w) for part, w in zip(x.split(m_splits), weights, strict=True)])


class RMSNorm(nn.Module):
    def __init__(self, *, normalized_shape: int, eps: float, params_dtype: Any = None, **rest: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=params_dtype))
        self.weight.sequence_parallel = rest["sequence_parallel"]

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)


class DotProductAttention(nn.Module):
    """Causal attention over [tokens, batch, heads, width]."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any) -> Tensor:
        assert rest["attn_mask_type"] == "causal"
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class _Absent(nn.Module):
    """A class that only has to exist to be subclassed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("this stand-in has no such layer")


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, *_: Any) -> tuple[Tensor, None, None]:
    CALLS["norm"] += 1
    return rms(x, weight, eps), None, None


def gather_along_first_dim(x: Tensor, process_group: Any) -> tuple[Tensor, None]:
    CALLS["gather"] += 1
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, x.contiguous(), group=process_group)
    return torch.cat(parts), None


def reduce_scatter_along_first_dim(x: Tensor, tp_group: Any) -> tuple[Tensor, None]:
    CALLS["scatter"] += 1
    whole = x.clone()
    dist.all_reduce(whole, group=tp_group)
    return whole.chunk(dist.get_world_size(tp_group))[dist.get_rank(tp_group)], None


class _Dtypes(dict[Any, Any]):
    def __missing__(self, key: Any) -> Any:
        return key


def install() -> None:
    """Make `import transformer_engine` find this."""
    module("transformer_engine", __version__=VERSION)
    module(
        "transformer_engine.pytorch", Linear=Linear, LayerNormLinear=LayerNormLinear, RMSNorm=RMSNorm, LayerNorm=_Absent,
        DotProductAttention=DotProductAttention, GroupedLinear=GroupedLinear, __version__=VERSION,
    )  # fmt: skip
    module("transformer_engine.pytorch.cpp_extensions", rmsnorm_fwd=rmsnorm_fwd)
    module("transformer_engine.pytorch.constants", TE_DType=_Dtypes())
    module(
        "transformer_engine.pytorch.distributed", CudaRNGStatesTracker=_Absent, activation_recompute_forward=None,
        gather_along_first_dim=gather_along_first_dim, reduce_scatter_along_first_dim=reduce_scatter_along_first_dim,
    )  # fmt: skip
    module("transformer_engine.pytorch.tensor", QuantizedTensor=_Absent)
    module("transformer_engine.common")
    module("transformer_engine.common.recipe", DelayedScaling=_Absent)
    module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=_Absent, fp8_autocast=None, fp8_model_init=None)


def module(name: str, **content: Any) -> None:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    made.__dict__.update(content)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
