"""megatron-bridge on a CPU: beside our own mapping of Hugging Face models, and on its own. `dev/bridge.sh` starts it.

    python -m dev.bridge check [MODEL...]     without MODEL: a tiny one of each architecture that the trainer can begin from
    python -m dev.bridge copy MODEL DIR

Prints a JSON object a model. Exit status 1 when something differs.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rljob_api.model_config import MAX_BYTES, read_config
from rljob_api.spec import HuggingFace, Model, RLJobSpec
from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.architecture import Architecture
from rljob_workload.huggingface.names import table
from rljob_workload.huggingface.pretrained import CONFIG, architecture_of, find_weights
from rljob_workload.huggingface.weights import PretrainedWeights
from rljob_workload.megatron import device, meeting

#: Classes of Megatron's dual mode that megatron-bridge 0.6.2 does not know. A shared expert's fc1 is of the first.
UNKNOWN_TO_BRIDGE = {"InferenceColumnParallelLinear": "column", "InferenceLinear": "replicated"}
DUAL_MODE = UNKNOWN_TO_BRIDGE | {"InferenceLayerNormColumnParallelLinear": "column", "InferenceRowParallelLinear": "row"}
#: The one module that imports Transformer Engine without asking whether it is there; for annotations only.
_WANTS_ENGINE = "megatron.bridge.peft.lora_layers"
#: Our models that megatron-bridge 0.6.2 has no bridge for.
_NOT_IN_BRIDGE = ("mixtral",)
#: GPTModel has the numbers of Llama 3 built in, all but the factor.
_LLAMA_3_TOKENS = 8192
_IDS = torch.arange(3, 40)
#: Of the largest logit.
TOLERANCE = 2e-5


def main(arguments: Sequence[str]) -> int:
    """Do as asked."""
    start()
    match list(arguments):
        case ["copy", model, directory]:
            found = [{"model": model, "exact": copied(Path(model), Path(directory))}]
        case ["check"]:
            from tests.unit.workload.hf_models import MODELS, make

            with tempfile.TemporaryDirectory(prefix="rljob-bridge-") as root:
                for name in MODELS:
                    make(name, Path(root, name))
                found = [checked(Path(root, name)) for name in MODELS if name not in _NOT_IN_BRIDGE]
                found += [beside_transformers(Path(root, name)) for name in MODELS]
            found.append({"dual mode": dual_mode()})
        case ["check", *models]:
            found = [checked(Path(model)) for model in models]
        case _:
            raise SystemExit(__doc__)
    for one in found:
        print(json.dumps(one))
    return int(not all(value not in (False, "") for one in found for value in one.values()))


def start() -> None:
    """Megatron on this machine, one rank, and megatron-bridge taught what it does not know."""
    logging.disable(logging.WARNING)  # megatron-bridge tells every package that is absent, with a traceback
    device.prepare()
    sys.meta_path.insert(0, _LentEngine())
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group(device.backend(), store=meeting.alone(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    for name, how in UNKNOWN_TO_BRIDGE.items():
        AutoMapping.register_module_type(name, how)


def checked(directory: Path) -> dict[str, Any]:
    """A model by both mappings: tensors that differ, logits beside transformers, and the bits after the way back."""
    bridge, model = loaded(directory)
    ours = our_weights(directory)
    rows = json.loads((directory / CONFIG).read_text())["vocab_size"]
    differ = [name for name, parameter in model.named_parameters() if not _same(ours, name, parameter, rows)]
    with tempfile.TemporaryDirectory(prefix="rljob-bridge-") as back:
        save(bridge, model, Path(back))
        exact = same_files(directory, Path(back))
    return {
        "model": directory.name,
        "same tensors": not differ,
        "exact": exact,
        "same logits": same_logits(directory, model, rows),
    }


def copied(directory: Path, target: Path) -> bool:
    """By megatron-bridge alone. Returns whether every tensor came back bit for bit."""
    bridge, model = loaded(directory)
    save(bridge, model, target)
    for file in directory.iterdir():  # config, tokenizer
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, target)
    return same_files(directory, target)


def loaded(directory: Path) -> tuple[Any, Any]:
    """megatron-bridge's bridge and its Megatron model, of local layers where there is no Transformer Engine."""
    from megatron.bridge import AutoBridge
    from megatron.core.transformer.enums import AttnBackend

    bridge = AutoBridge.from_hf_pretrained(str(directory))
    provider = bridge.to_megatron_provider()
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = torch.float32
    provider.bf16 = provider.fp16 = False
    if device.kind() == "cpu":
        provider.transformer_layer_spec = _local_layers
        provider.use_cpu_initialization, provider.attention_backend = True, AttnBackend.local
        provider.moe_grouped_gemm = provider.moe_permute_fusion = provider.moe_router_fusion = False
        for fusion in (
            "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion", "persist_layer_norm",
            "gradient_accumulation_fusion", "cross_entropy_loss_fusion",
        ):  # fmt: skip
            setattr(provider, fusion, False)
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=device.kind() == "cpu")
    return bridge, model.eval()


def save(bridge: Any, model: Any, target: Path) -> None:
    """The weights as Hugging Face has them. megatron-bridge imports modelopt only to ask whether the model is quantized."""
    target.mkdir(parents=True, exist_ok=True)
    with _lent_modelopt():
        bridge.save_hf_weights([model], str(target), show_progress=False)


def our_weights(directory: Path) -> PretrainedWeights:
    """The same files by our table."""
    from rljob_workload.huggingface.headers import read_headers

    of = _architecture(directory)
    slots = {name: slot for file in directory.glob("*.safetensors") for name, slot in read_headers(file).items()}
    return PretrainedWeights(of, {part: slots[part] for entry in table(of) for part in entry.parts})


def our_name(name: str) -> tuple[str, int | None]:
    """What the trainer calls a parameter of GPTModel, and its expert: attention and feed-forward are layers of their own."""
    name = name.replace("decoder.final_layernorm", "decoder.final_norm")
    if not name.startswith("decoder.layers."):
        return name, None
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    layer = 2 * int(number) + rest.startswith(("mlp.", "pre_mlp_layernorm."))
    _, local, after = rest.partition("mlp.experts.local_experts.")
    if not local:
        return f"decoder.layers.{layer}.{rest}", None
    expert, matrix = after.split(".", 1)
    return f"decoder.layers.{layer}.mlp.experts.experts.{matrix}", int(expert)


def _same(ours: PretrainedWeights, name: str, parameter: Tensor, rows: int) -> bool:
    place, expert = our_name(name)
    whole = ours.whole(place)
    mine = whole if expert is None else whole[expert]
    theirs = parameter[:rows] if place in ("embedding.word_embeddings.weight", "output_layer.weight") else parameter
    return torch.equal(mine, theirs)


def same_files(one: Path, other: Path) -> bool:
    """Whether two directories hold the same tensors, bit for bit."""
    before, after = (
        {name: tensor for file in at.glob("*.safetensors") for name, tensor in tensors.read(file).items()}
        for at in (one, other)
    )
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def same_logits(directory: Path, model: Any, rows: int) -> bool | None:
    """Megatron's logits beside transformers'; None where megatron-bridge's model cannot have the model's positions."""
    scaling = json.loads((directory / CONFIG).read_text()).get("rope_scaling") or {}
    if scaling.get("original_max_position_embeddings", _LLAMA_3_TOKENS) != _LLAMA_3_TOKENS:
        return None
    ids = _IDS % rows
    with torch.no_grad():
        ours = model(ids[None], torch.arange(len(ids))[None], None)[0, :, :rows]
    return _close(ours, _of_transformers(directory, ids))


def beside_transformers(directory: Path) -> dict[str, Any]:
    """Whether the reader that our tests compare with computes what transformers does, and whether we read its own files."""
    from tests.workload.hf_reference import logits
    from transformers import AutoModelForCausalLM

    agrees = _close(logits(directory, _IDS), _of_transformers(directory, _IDS))
    with tempfile.TemporaryDirectory(prefix="rljob-bridge-") as theirs:
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(theirs, max_shard_size="100kB")
        read = _architecture(Path(theirs)) == _architecture(directory)
        known: dict[str, Any] = {"model": Model.model_construct(hugging_face=HuggingFace(path=theirs))}
        spec = RLJobSpec.model_construct(**known)  # the rest of a job does not matter to its weights
        whole = bool(find_weights(spec, _architecture(Path(theirs))))
    return {
        "model": directory.name,
        "reader has transformers' logits": agrees,
        "transformers' own files are read": read and whole,
    }


def _architecture(directory: Path) -> Architecture:
    return architecture_of(read_config((directory / CONFIG).read_bytes()[:MAX_BYTES].decode()))


def _of_transformers(directory: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        found: Tensor = model(ids[None]).logits[0]
    return found


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() < TOLERANCE * max(1.0, float(theirs.abs().max())))


def dual_mode() -> bool:
    """Whether megatron-bridge finds how each layer of dual mode is split, also where a shared expert's fc1 has become one."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    mapping = AutoMapping("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "x")
    return all(mapping._detect_parallelism_type(type(name, (torch.nn.Module,), {})()) == how for name, how in DUAL_MODE.items())


def _local_layers(config: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from rljob_workload.megatron.layers import local_norm

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )  # fmt: skip
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = local_norm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = local_norm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=local_norm)


class _LentEngine(importlib.abc.MetaPathFinder):
    """A Transformer Engine of empty classes, there only while the one module is imported that does not ask for it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _WANTS_ENGINE or "transformer_engine" in sys.modules:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None)
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with _lent({"transformer_engine": {}, "transformer_engine.pytorch": _Anything()}):
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Nested(type):
    """A class that has every name, as a class of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nested(name, (torch.nn.Module,), {})


class _Anything(dict[str, Any]):
    """Has every name."""

    def __missing__(self, name: str) -> Any:
        return getattr(_Nested("te", (), {}), name)


def _lent_modelopt() -> contextlib.AbstractContextManager[None]:
    if importlib.util.find_spec("modelopt") is not None:
        return contextlib.nullcontext()
    names = ("modelopt", "modelopt.torch", "modelopt.torch.quantization")
    asked = {"modelopt.torch.quantization.utils": {"is_quantized": lambda model: False}}
    return _lent({name: {} for name in names} | asked)


@contextlib.contextmanager
def _lent(modules: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Modules that are there for a while."""
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__["__getattr__"] = content.__getitem__
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
