"""The Megatron model of a layout: its configuration, its layers, its first weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rljob_workload.huggingface import pretrained
from rljob_workload.huggingface.weights import PretrainedWeights
from rljob_workload.megatron import device, layers
from rljob_workload.megatron.initial import draw_weights, take_weights
from rljob_workload.megatron.settings import ModelSettings

#: The logit of rows that only pad the vocabulary: no probability, and finite, so that no loss or entropy becomes NaN.
NEVER = -1e9


def transformer_config(settings: ModelSettings) -> Any:
    """Megatron's configuration of the whole model, the same on every rank."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape, layout, details = settings.shape, settings.layout, settings.details
    return TransformerConfig(
        num_layers=len(settings.pattern.replace("|", "")),  # a hybrid model counts attention and feed-forward separately
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.attention_heads,
        num_query_groups=shape.query_groups,
        ffn_hidden_size=shape.ffn_hidden_size,
        kv_channels=details.head_size,
        add_qkv_bias=details.qkv_bias,
        qk_layernorm=details.query_norm,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=settings.sequence,
        pipeline_dtype=settings.dtype,
        params_dtype=settings.dtype,
        bf16=settings.dtype is torch.bfloat16,
        transformer_impl=_implementation(settings),
        use_cpu_initialization=device.kind() == "cpu",
        normalization="RMSNorm",
        layernorm_epsilon=details.norm_epsilon,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Fused kernels gain nothing at these sizes and cost tens of seconds of compilation.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        cuda_graph_impl="local" if settings.cuda_graphs else "none",
        inference_sampling_seed=settings.seed + 1000,
        is_hybrid_model=True,
        **_experts(settings),
    )


def _implementation(settings: ModelSettings) -> str:
    """Megatron's word for the layers' implementation."""
    if settings.inference_optimized:
        return "inference_optimized"
    return "transformer_engine" if settings.transformer == "TransformerEngine" else "local"


def _experts(settings: ModelSettings) -> dict[str, Any]:
    shape = settings.shape
    if shape.experts is None:
        return {}
    chosen = shape.top_k or min(2, shape.experts)
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": chosen,
        # A softmax over one chosen expert is always 1, and its router would learn nothing: Megatron wants it taken before.
        "moe_router_pre_softmax": chosen == 1,
        "moe_router_dtype": "fp32",
        # The reward alone trains the router; no token is dropped, so a step does not depend on how its rows are shared out.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        # One product over all experts is a kernel of Transformer Engine's; the local ones run one after the other.
        "moe_grouped_gemm": settings.transformer == "TransformerEngine",
        # The default exchanges tokens over memory that the GPUs of a node share.
        "inference_moe_token_dispatcher_type": "nccl",
    }


def build_model(settings: ModelSettings, config: Any) -> Any:
    """This rank's part of the model. The same seed gives the same weights in every layout."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    layers.use_final_norm(settings.transformer)
    model = HybridModel(
        config=config,
        hybrid_stack_spec=layers.stack_spec(settings),
        hybrid_layer_pattern=settings.pattern,
        vocab_size=settings.padded_vocabulary,
        max_sequence_length=settings.max_sequence_length,
        position_embedding_type="rope",
        rotary_base=settings.details.rotary_base,
        share_embeddings_and_output_weights=settings.details.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    _stretch_positions(settings, model)
    if settings.dtype is not torch.float32:
        model.to(settings.dtype)  # torch's norms are float32 whatever the configuration says
    if settings.pretrained is None:
        draw_weights(model, seed=settings.seed, vocabulary=settings.shape.vocab_size)
    else:
        of = pretrained.architecture_of(pretrained.describe(settings.pretrained))
        take_weights(model, PretrainedWeights(of, pretrained.find_weights(settings.pretrained, of)))
    if model.post_process and settings.padded_vocabulary > settings.shape.vocab_size:
        model.output_layer.register_forward_hook(_NoPadding(settings.shape.vocab_size))
    return model


def _stretch_positions(settings: ModelSettings, model: Any) -> None:
    """HybridModel does not pass the scaling of rotary positions on to its embedding, which knows it."""
    scaling = settings.details.rope_scaling
    if scaling is not None:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=scaling.factor,
            low_freq_factor=scaling.low,
            high_freq_factor=scaling.high,
            original_max_position_embeddings=scaling.original,
        )


def parameter_buffers(ddp: Any) -> Iterator[Any]:
    """Megatron's gradient buffers of this rank; those of the experts stand apart."""
    yield from ddp.buffers
    yield from ddp.expert_parallel_buffers


class _NoPadding:
    """Takes the vocabulary's padding out of the (gathered) logits, in training and generation alike."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __call__(self, module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        masked = logits.clone()
        masked[..., self._vocabulary :] = NEVER
        return masked, bias
