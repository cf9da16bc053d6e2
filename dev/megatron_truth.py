"""What the real Megatron says of a layout: process groups, configuration, model, one forward pass, engine context.

One process plays one rank of any world: torch's `fake` process group answers every collective at once. The first and the last
rank are asked, which are the first and the last pipeline stage. What needs a GPU is stood in for and named in
`docs/validation.md`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rljob_api.layout import layout_of, padded_vocabulary, shape_of, stage_patterns
from rljob_api.spec import RLJobSpec, Shape
from rljob_workload.megatron import device, layers
from rljob_workload.megatron.policy import quiet_megatron
from rljob_workload.megatron.settings import BLOCK_TOKENS

MAMBA_HEAD = 64


def prepare() -> None:
    """Import Megatron on the CPU. Call once."""
    quiet_megatron()
    device.prepare()
    import megatron.core  # noqa: F401

    device.prepare_attention()
    layers.use_final_norm("Local")


def refusal(spec: RLJobSpec) -> str | None:
    """Megatron's words when it refuses the layout; None when it takes it."""
    world = layout_of(spec).world
    for rank in _asked(spec, world):
        try:
            with _rank(spec, rank, world):
                _build(spec)
        except Exception as error:  # noqa: BLE001 - whatever it raises is its answer
            return f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}{_where(error)}"
    return None


def _asked(spec: RLJobSpec, world: int) -> list[int]:
    """The first and the last rank; one of each pipeline stage where stages differ."""
    stages, shape = spec.parallelism.pipeline, spec.model.shape
    ranks = [0, world - 1]
    if shape is not None and shape.hybrid_pattern is not None and world % stages == 0:
        ranks += [stage * (world // stages) for stage in range(stages)]
    return sorted(set(ranks))


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    name = trace.tb_frame.f_code.co_filename.rsplit("site-packages/", 1)[-1]
    return f" ({name}:{trace.tb_lineno})"


@contextlib.contextmanager
def _rank(spec: RLJobSpec, rank: int, world: int) -> Iterator[None]:
    """Be one rank of the spec's world, with Megatron's process groups."""
    from megatron.core import parallel_state, tensor_parallel

    layout, virtual = layout_of(spec), spec.parallelism.virtual_pipeline
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=spec.parallelism.expert_tensor,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _build(spec: RLJobSpec) -> None:
    shape = shape_of(spec.model)
    if shape is None:
        raise ValueError("no sizes to build from")
    _micro_batches(spec)
    config = _config(spec, shape)
    _count_layers(config, shape)
    model = _model(spec, shape, config)
    _engine(spec, shape, model)
    _forward(spec, shape, model)


def _micro_batches(spec: RLJobSpec) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    grpo = spec.algorithm.grpo
    ConstantNumMicroBatchesCalculator(
        global_batch_size=grpo.prompts_per_step * grpo.generations_per_prompt,
        micro_batch_size=grpo.micro_batch_size,
        data_parallel_size=layout_of(spec).data,
        decrease_batch_size_if_needed=False,
        rank=1,  # rank 0 would print
    )


def _config(spec: RLJobSpec, shape: Shape) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout, hybrid = layout_of(spec), "M" in (shape.hybrid_pattern or "")
    dtype = torch.bfloat16 if spec.model.dtype == "bfloat16" else torch.float32
    values: dict[str, Any] = {
        "num_layers": len(shape.hybrid_pattern) if shape.hybrid_pattern else 2 * shape.layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.attention_heads,
        "num_query_groups": shape.query_groups,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": spec.parallelism.expert_tensor,
        "sequence_parallel": spec.parallelism.sequence,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        # Nemotron-H, the hybrid family that is known, has a squared ReLU and no gate.
        "gated_linear_unit": not hybrid,
        "activation_func": torch.nn.functional.relu if hybrid else torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "is_hybrid_model": True,
    }
    if shape.experts is not None:
        values |= {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.top_k or min(2, shape.experts),
            # With one expert a token the softmax over the chosen ones is always 1: Megatron wants it taken before.
            "moe_router_pre_softmax": shape.top_k == 1 or shape.experts == 1,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
            "inference_moe_token_dispatcher_type": "nccl",
        }
    if spec.generation.inference_optimized:
        values["transformer_impl"] = "inference_optimized"
    config = TransformerConfig(**values)
    # Its checks are done; its layers need a GPU, so the model is built of the local ones.
    return dataclasses.replace(config, transformer_impl="local") if spec.generation.inference_optimized else config


def _count_layers(config: Any, shape: Shape) -> None:
    """A decoder without a pattern is cut between whole blocks, as Megatron's TransformerBlock and engine count them."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    virtual = None
    from megatron.core import parallel_state

    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    blocks = dataclasses.replace(config, num_layers=shape.layers, virtual_pipeline_model_parallel_size=virtual)
    get_num_layers_to_build(blocks, vp_stage=None if virtual is None else 0)


def _model(spec: RLJobSpec, shape: Shape, config: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    if spec.model.transformer == "TransformerEngine" and not spec.trainer.gpus_per_node:
        raise ImportError("Transformer Engine needs a GPU")
    pipeline = spec.parallelism.pipeline
    with contextlib.ExitStack() as stack:
        if "M" in (shape.hybrid_pattern or "") and spec.trainer.gpus_per_node:
            stack.enter_context(_mamba_kernels())
        model = HybridModel(
            config=config,
            hybrid_stack_spec=_stack(spec, shape),
            hybrid_layer_pattern="|".join(stage_patterns(shape, pipeline)),
            vocab_size=padded_vocabulary(shape.vocab_size, spec.parallelism.tensor),
            max_sequence_length=spec.generation.max_sequence_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        )
    # Weights are never read for their values: only shapes matter here.
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    return model.train()


@contextlib.contextmanager
def _mamba_kernels() -> Iterator[None]:
    """mamba-ssm is compiled for GPUs: pretend that it is there while a model for GPUs is built."""
    import megatron.core.ssm.mamba_mixer as mixer

    class Norm(torch.nn.Module):
        def __init__(self, size: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size))

    replaced = {"HAVE_MAMBA_SSM": True, "RMSNormGated": Norm, "ExtendedRMSNorm": Norm}
    saved = {name: getattr(mixer, name, None) for name in replaced}
    for name, value in replaced.items():
        setattr(mixer, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(mixer, name, value)


@contextlib.contextmanager
def _mamba_passes_through() -> Iterator[None]:
    from megatron.core.ssm.mamba_layer import MambaLayer

    forward = MambaLayer.forward
    MambaLayer.forward = lambda self, hidden_states, *_, **__: hidden_states
    try:
        yield
    finally:
        MambaLayer.forward = forward


class _GpuAttention(torch.nn.Module):
    """Stands in for Transformer Engine's attention, which splits the sequence; the sizes are checked as it does."""

    def __init__(self, config: Any, *_: Any, pg_collection: Any = None, **__: Any) -> None:
        super().__init__()
        tensor = pg_collection.tp.size()
        if config.num_query_groups % tensor:
            raise AssertionError(f"the number of GQA groups {config.num_query_groups} must be divisible by tensor {tensor}")

    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return query.flatten(-2)


def _stack(spec: RLJobSpec, shape: Shape) -> Any:
    """The trainer's layers, with experts and Mamba where the shape has them."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    stack = layers.local_stack_spec(shape.experts)
    parts = stack.submodules
    if spec.model.transformer == "TransformerEngine":
        parts.attention_layer.submodules.self_attention.submodules.core_attention = _GpuAttention
    mixer = ModuleSpec(
        module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    )
    parts.mamba_layer = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(norm=layers.local_norm, mixer=mixer, mamba_bda=get_bias_dropout_add),
    )
    return stack


def _engine(spec: RLJobSpec, shape: Shape, model: Any) -> None:
    """The resident engine's context, and its wrapper, which takes one model chunk only."""
    from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper

    slots = spec.generation.max_requests
    context = DynamicInferenceContext(
        model.config,
        InferenceConfig(
            # Enough for the states of Mamba layers, so that shapes alone decide.
            buffer_size_gb=1.0 if "M" in (shape.hybrid_pattern or "") else 0.05,
            block_size_tokens=BLOCK_TOKENS,
            max_sequence_length=spec.generation.max_sequence_length,
            max_requests=slots,
            max_tokens=max(slots, 256),
            num_cuda_graphs=0,
            mamba_inference_state_config=MambaInferenceStateConfig.from_model(model),
        ),
    )
    chunks = spec.parallelism.virtual_pipeline
    GPTInferenceWrapper([model] * chunks if chunks > 1 else model, context)
    if "M" in (shape.hybrid_pattern or "") and spec.parallelism.context > 1:
        raise AssertionError("Context parallel not supported for Mamba inference decode (ssm/mamba_mixer.py)")


def _forward(spec: RLJobSpec, shape: Shape, model: Any) -> None:
    """One forward pass of this stage over zeros; Mamba layers, whose kernels need a GPU, let them through."""
    from megatron.core.inference.utils import InferenceMode

    InferenceMode.unset_active()
    length = 2 * spec.parallelism.tensor
    tokens = torch.zeros(1, length, dtype=torch.long)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    if not model.pre_process:
        rows = length // spec.parallelism.tensor if spec.parallelism.sequence else length
        model.set_input_tensor(torch.zeros(rows, 1, shape.hidden_size, dtype=model.config.params_dtype))
    try:
        with torch.no_grad(), _mamba_passes_through():
            model(tokens, torch.arange(length)[None], mask)
    except RuntimeError as error:
        # The fake group can't play an exchange of tokens between experts' ranks in which this rank has none to send.
        if "alltoall_base" not in str(error):
            raise
