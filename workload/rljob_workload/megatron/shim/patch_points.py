"""Every private name of megatron-core that this package replaces or reads, with the shape it must have.

Read from the source files, without importing them: an import would show names that are already replaced. A test runs
`moved`; whoever updates megatron-core starts there.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """One name: `Class.method` or a module-level name. `parameters` None: its signature does not matter."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None


POINTS = (
    PatchPoint("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", ("new_state", "device", "graph_safe")),
    PatchPoint(
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        ("input_", "group", "output_split_sizes", "use_global_buffer"),
    ),
    PatchPoint(
        "megatron.core.tensor_parallel.mappings",
        "_reduce_scatter_along_first_dim",
        ("input_", "group", "input_split_sizes", "use_global_buffer"),
    ),
    PatchPoint("megatron.core.inference.communication_utils", "_is_cuda", ("tensor",)),
    PatchPoint(
        "megatron.core.transformer.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        ("tensor", "as_numpy", "record_stream"),
    ),
    PatchPoint("megatron.core.models.hybrid.hybrid_block", "TENorm"),
    PatchPoint(
        "megatron.core.models.common.embeddings.rotary_pos_embedding",
        "RotaryEmbedding._apply_scaling",
        ("self", "freqs", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    PatchPoint("megatron.core.transformer.attention", "flash_attn_varlen_func"),
    PatchPoint("megatron.core.transformer.attention", "flash_attn_with_kvcache"),
    PatchPoint("megatron.core.transformer.attention", "is_fa_min_version"),
    PatchPoint("megatron.core.transformer.attention", "HAVE_FA3"),
    PatchPoint("megatron.core.transformer.attention", "HAVE_FA4"),
    PatchPoint("megatron.core.inference.contexts.dynamic_context", "triton_append_key_value_cache"),
    PatchPoint("megatron.core.transformer.transformer_block", "get_num_layers_to_build", ("config", "vp_stage", "pp_rank")),
    PatchPoint(
        "megatron.core.inference.contexts.dynamic_context", "DynamicInferenceContext._allocate_memory_buffer", ("self",)
    ),
    PatchPoint(
        "megatron.core.inference.engines.dynamic_engine",
        "DynamicInferenceEngine.suspend_resume_ctx",
        ("key", "unified_memory_level"),
    ),
    PatchPoint("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE"),
    PatchPoint(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        ("self", "model_param", "tensors"),
    ),
    PatchPoint(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._init_optimizer_states_with_dummy_values",
        ("self",),
    ),
    PatchPoint(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.get_parameter_state_dp_zero",
        ("self", "use_gloo_comm", "empty_data", "return_on_all_ranks"),
    ),
    PatchPoint("megatron.core.dist_checkpointing.strategies.filesystem_async", "_results_queue"),
    PatchPoint("megatron.core.inference.engines.dynamic_engine", "DynamicInferenceEngine.step_modern", ("self",)),
    PatchPoint(
        "megatron.core.inference.engines.dynamic_engine", "DynamicInferenceEngine.schedule_non_chunked_prefill", ("self",)
    ),
    # `admission` leaves the state that these three leave.
    PatchPoint(
        "megatron.core.inference.contexts.dynamic_context",
        "DynamicInferenceContext.add_request",
        ("self", "req", "prefill_chunk_length"),
    ),
    PatchPoint(
        "megatron.core.inference.contexts.dynamic_context", "DynamicInferenceContext.check_availability", ("self", "req")
    ),
    PatchPoint(
        "megatron.core.inference.contexts.kv_block_allocator",
        "KVBlockAllocator.allocate_memory_blocks",
        ("self", "num_blocks"),
    ),
    PatchPoint(
        "megatron.core.inference.contexts.dynamic_context",
        "DynamicInferenceContext.deallocate_inference_state_buffers",
        ("self",),
    ),
    PatchPoint(
        "megatron.core.inference.contexts.dynamic_context",
        "DynamicInferenceContext.reinitialize_inference_state_buffers",
        ("self",),
    ),
    # Multiplies by `torch.matmul` and `Tensor.matmul`, which are oneDNN's for this module.
    PatchPoint(
        "megatron.core.tensor_parallel.layers",
        "LinearWithGradAccumulationAndAsyncCommunication.backward",
        ("ctx", "grad_output"),
    ),
    PatchPoint("megatron.core.inference.engines.dynamic_engine", "DynamicInferenceEngine.suspend", ("self",)),
    PatchPoint("megatron.core.inference.engines.dynamic_engine", "DynamicInferenceEngine.resume", ("self",)),
    PatchPoint(
        "megatron.core.inference.text_generation_controllers.text_generation_controller",
        "TextGenerationController.detokenize",
    ),
    # `megatron.seeds` stands in for the controller's `_sampling`.
    PatchPoint(
        "megatron.core.inference.sampling.torch_sampling",
        "TorchSampling.sample_kernel",
        (
            *("self", "logits", "n", "context", "no_top_k", "no_top_p"),
            *("gather_indices", "token_to_request_index", "output", "eager", "cache_key"),
        ),
    ),
    PatchPoint(
        "megatron.core.inference.sampling.torch_sampling",
        "TorchSampling.sample_from_logits",
        ("last_token_logits", "temperature", "top_k", "top_p", "generator", "vocab_size"),
    ),
    PatchPoint(
        "megatron.core.inference.engines.dynamic_engine",
        "DynamicInferenceEngine._check_stop_words_for_request_post_append",
        ("self", "request"),
    ),
)


def moved(points: tuple[PatchPoint, ...] = POINTS) -> list[str]:
    """What is not where the shim expects it; empty for the release it was written for."""
    return [problem for point in points if (problem := _problem(point))]


def _problem(point: PatchPoint) -> str | None:
    names = _names(point.module)
    if names is None:
        return f"{point.module} does not exist"
    if point.name not in names:
        return f"{point.module} has no {point.name}"
    parameters = names[point.name]
    if point.parameters is not None and parameters != point.parameters:
        return f"{point.module}.{point.name} takes {parameters}, the shim expects {point.parameters}"
    return None


@cache
def _names(module: str) -> dict[str, tuple[str, ...] | None] | None:
    """Names that a module's source binds, `Class.method` included; functions with their parameters."""
    path = _source(module)
    if path is None:
        return None
    found: dict[str, tuple[str, ...] | None] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, _parameters(node))
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found.update({f"{node.name}.{method.name}": _parameters(method) for method in methods})
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, None)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, None)
    return found


def _parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def _source(module: str) -> Path | None:
    """The file of a module of the namespace package `megatron`, without importing `megatron.core`."""
    root = importlib.util.find_spec("megatron")
    for folder in root.submodule_search_locations or () if root else ():
        path = Path(folder, *module.split(".")[1:]).with_suffix(".py")
        if path.is_file():
            return path
    return None
