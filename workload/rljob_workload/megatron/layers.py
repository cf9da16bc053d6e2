"""The layers that a model is made of: Megatron's local ones, Transformer Engine's, or the inference-optimized ones.

The inference-optimized layers are subclasses of Transformer Engine's, over the same parameters: a module in training mode
computes by its parent, one in inference mode by its own kernels. The hand-over switches the mode (`Policy.enter_train`,
`enter_generate`), so one model does both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rljob_workload.megatron.settings import ModelSettings


def stack_spec(settings: ModelSettings) -> Any:
    """The HybridModel stack that a job asked for."""
    if settings.transformer == "Local":
        return local_stack_spec(settings.shape.experts, query_norm=settings.details.query_norm)
    import megatron.core.models.hybrid.hybrid_layer_specs as specs

    return specs.hybrid_inference_stack_spec if settings.inference_optimized else specs.hybrid_stack_spec


def local_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """A norm like Megatron's torch norm, which however refuses sequence parallelism for no reason that holds here."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm: torch.nn.Module = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        # Marks the weight for the extra gradient reduction that sequence parallelism needs.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def local_stack_spec(experts: int | None = None, *, query_norm: bool = False) -> Any:
    """A HybridModel stack of attention, feed-forward and, where there are `experts`, expert layers: Megatron's own parts.

    `query_norm`: queries and keys have a norm of their own.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=local_norm if query_norm else None,
            k_layernorm=local_norm if query_norm else None,
        ),
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    attention_layer = TransformerLayerSubmodules(
        input_layernorm=local_norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
    )
    mlp_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=local_norm,
        mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
    )
    parts = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention_layer),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp_layer),
    )
    if experts is not None:
        parts.moe_layer = _expert_layer(experts)
    return ModuleSpec(module=HybridStack, submodules=parts)


def _expert_layer(experts: int) -> Any:
    """A layer of experts that run one after the other: the grouped matrix product has no CPU form."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules

    moe = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    parts = TransformerLayerSubmodules(pre_mlp_layernorm=local_norm, mlp=moe, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(module=MoETransformerLayer, submodules=parts)


def use_final_norm(transformer: str) -> None:
    """HybridStack's last norm is hard-coded to Transformer Engine's; local layers get the local one. For models built next."""
    import megatron.core.models.hybrid.hybrid_block as hybrid_block
    from megatron.core.extensions.transformer_engine import TENorm

    hybrid_block.TENorm = local_norm if transformer == "Local" else TENorm
