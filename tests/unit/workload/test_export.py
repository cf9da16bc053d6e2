"""Exports without Megatron: checkpoints of the names and sizes that it writes, made by torch."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_cli.main import main
from rljob_workload.core.checkpoint import Checkpoint
from rljob_workload.core.store.facts import LENGTH, SHAPE
from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.architecture import architecture
from rljob_workload.huggingface.errors import ExportError
from rljob_workload.huggingface.export import RECORD, export
from rljob_workload.huggingface.names import table

from .published import published

SIZES = {"layers": 2, "hiddenSize": 8, "attentionHeads": 4, "queryGroups": 2, "ffnHiddenSize": 12, "vocabSize": 5}
EXPERTS = {"experts": 3, "topK": 2}

Rename = Callable[[str], str]


def facts(**sizes: Any) -> dict[str, Any]:
    return {SHAPE + name: value for name, value in (SIZES | sizes).items()} | {LENGTH: 16, "spec.data": "builtin copyv"}


def saved(
    root: Path, told: dict[str, Any], *, rename: Rename = lambda name: name, extra: str | None = None, seed: int = 0
) -> Checkpoint:
    """A checkpoint with random weights; two more rows of vocabulary fill up the ranks, and an optimizer stands beside."""
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for entry in table(architecture(told)):
        rows = entry.size[0] + (2 if entry.how.value == "vocabulary" else 0)
        state[rename(entry.names[0])] = torch.randn(rows, *entry.size[1:], generator=draw)
    state["optimizer.state.exp_avg"] = torch.zeros(3)
    if extra:
        state[extra] = torch.zeros(3)
    return published(root, told, lambda to: save(state, storage_writer=FileSystemWriter(to / "weights"), no_dist=True), step=7)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return saved(tmp_path / "run", facts())


def test_a_dense_model_becomes_a_llama(checkpoint: Checkpoint, tmp_path: Path) -> None:
    done = export(checkpoint, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["architectures"], config["num_key_value_heads"], config["head_dim"]) == (["LlamaForCausalLM"], 2, 2)
    assert (config["eos_token_id"], config["max_position_embeddings"], config["tie_word_embeddings"]) == (2, 16, True)
    weights = tensors.read(tmp_path / "hf/model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (5, 8)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (4, 8)
    assert done.parameters == sum(tensor.numel() for tensor in weights.values())
    card = (tmp_path / "hf/README.md").read_text()
    assert f"from its checkpoint `{checkpoint.name}`" in card


def test_queries_keys_and_values_are_told_apart_by_query_group(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two groups of two queries: rows q0 q1 k v | q2 q3 k v, two per head."""
    export(checkpoint, tmp_path / "hf")
    fused = "decoder.layers.0.self_attention.linear_qkv.weight"
    heads = tensors.SavedWeights(checkpoint.path / "weights").load([fused])[fused].view(8, 2, 8)
    weights = tensors.read(tmp_path / "hf/model.safetensors")
    expected = {"q": heads[[0, 1, 4, 5]], "k": heads[[2, 6]], "v": heads[[3, 7]]}
    for name, rows in expected.items():
        assert torch.equal(weights[f"model.layers.0.self_attn.{name}_proj.weight"], rows.flatten(0, 1)), name


def test_experts_become_a_mixtral(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "run", facts(**EXPERTS))
    export(checkpoint, tmp_path / "hf")
    weights = tensors.read(tmp_path / "hf/model.safetensors")
    fused = "decoder.layers.3.mlp.experts.experts.linear_fc1.weight"
    both = tensors.SavedWeights(checkpoint.path / "weights").load([fused])[fused][2]
    expert = "model.layers.1.block_sparse_moe.experts.2."
    assert torch.equal(torch.cat([weights[expert + "w1.weight"], weights[expert + "w3.weight"]]), both)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 3, 2)


def test_norms_inside_of_fused_layers_are_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Transformer Engine's layers and the inference-optimized ones keep a norm's weight in the layer of the matrix after it."""

    def fused(name: str) -> str:
        name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")

    other = saved(tmp_path / "fused", facts(), rename=fused)
    for source, name in ((checkpoint, "a"), (other, "b")):
        export(source, tmp_path / name)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_inference_optimized_layers_name_their_tensors_as_transformer_engine_does() -> None:
    """Read from Megatron's source, since the classes need a GPU: subclasses that add no parameter and no name of their own."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / "tensor_parallel" / "inference_layers.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    layers = {one.name: ast.unparse(one.bases[0]) for one in classes if one.name.startswith("Inference")}
    assert layers == {
        "InferenceLinear": "TELinear",
        "InferenceLayerNormColumnParallelLinear": "TELayerNormColumnParallelLinear",
        "InferenceColumnParallelLinear": "TEColumnParallelLinear",
        "InferenceRowParallelLinear": "TERowParallelLinear",
    }
    for one in classes:
        code = ast.unparse(one)
        assert "sharded_state_dict" not in code, one.name
        assert "register_parameter" not in code, one.name
        assert "Parameter(" not in code, one.name


def test_large_models_are_cut_into_files_with_an_index(checkpoint: Checkpoint, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    done = export(checkpoint, tmp_path / "hf", shard_bytes=1200, progress=lambda *told: calls.append(told))
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    where = {name: file for file in files for name in tensors.read(tmp_path / "hf" / file)}
    assert index["weight_map"] == where
    assert calls[-1] == (index["metadata"]["total_size"],) * 2 == (4 * done.parameters,) * 2


def test_bfloat16_rounds_each_weight(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        export(checkpoint, tmp_path / dtype, dtype=dtype)
    exact, rounded = (tensors.read(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_again_is_nothing_to_do_and_a_changed_file_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    assert not export(checkpoint, target).already
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert export(checkpoint, target).already
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before
    with pytest.raises(ExportError, match="holds an export with another dtype"):
        export(checkpoint, target, dtype="bfloat16")
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ExportError, match=r"model.safetensors was changed after its export"):
        export(checkpoint, target)
    weights.unlink()
    with pytest.raises(ExportError, match=r"has lost model.safetensors"):
        export(checkpoint, target)


def test_other_peoples_directories_are_not_touched(checkpoint: Checkpoint, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_text("mine")
    with pytest.raises(ExportError, match="holds files that no export has written"):
        export(checkpoint, foreign)
    assert [path.read_text() for path in foreign.iterdir()] == ["mine"]
    with pytest.raises(ExportError, match="is no directory"):
        export(checkpoint, foreign / "model.safetensors")
    assert (foreign / "model.safetensors").read_text() == "mine"


def test_what_a_killed_export_left_is_replaced_and_a_running_one_is_left_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    partial = tmp_path / ".hf.rljob-partial"
    partial.mkdir()
    (partial / "model-00009-of-00009.safetensors").write_text("half")
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ExportError, match=r"another export into .* is going on"):
        export(checkpoint, tmp_path / "hf")
    assert (partial / "model-00009-of-00009.safetensors").exists()
    os.close(held)
    export(checkpoint, tmp_path / "hf")
    assert not partial.exists()
    assert not list((tmp_path / "hf").glob("model-*"))


def test_an_interrupted_export_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, tmp_path / "hf", progress=stop)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "does not say the model's sizes"),
        (facts() | {LENGTH: None}, "give --max-length"),
        (facts(hybridPattern="**--"), r"layers are \*\*-- .*LlamaForCausalLM has attention and feed-forward in turn \(\*-\)"),
        (facts(experts=3, topK=1), "topK is 1"),
        (facts(layers=0), r"spec.model.shape.layers: Input should be greater"),
    ],
)
def test_models_without_an_architecture_are_refused(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        architecture(told)


def test_a_pattern_of_whole_blocks_is_the_same_model(tmp_path: Path) -> None:
    assert architecture(facts(layers=4, hybridPattern="*-*-")).shape == architecture(facts()).shape


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", facts(), extra="decoder.layers.0.self_attention.q_layernorm.weight")
    with pytest.raises(ExportError, match=r"no place in the architecture for decoder.layers.0.self_attention.q_layernorm"):
        export(source, tmp_path / "hf")
    source = saved(tmp_path / "b", facts(), rename=lambda name: name.replace("final_norm", "norm"))
    with pytest.raises(ExportError, match=r"0 tensors called decoder.final_norm.weight; one is needed"):
        export(source, tmp_path / "hf")
    source = saved(tmp_path / "c", facts())
    assert source.manifest is not None
    source.manifest.facts[SHAPE + "ffnHiddenSize"] = 10
    with pytest.raises(ExportError, match=r"linear_fc1.weight has the size \(24, 8\); a model of these sizes has \(20, 8\)"):
        export(source, tmp_path / "hf")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


def test_the_command_takes_a_run_and_reads_every_byte(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "hf")
    assert main(["export", str(checkpoint.path.parent), target]) == 0
    assert capsys.readouterr().out == f"{target} holds {checkpoint.name}: llama, 1,040 parameters\n"
    assert main(["export", str(checkpoint.path), target]) == 0
    assert "already holds" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "none"), target]) == 2
    assert main(["export", str(checkpoint.path), str(tmp_path / "run")]) == 1
    assert "holds files that no export has written" in capsys.readouterr().err
    (shard,) = (checkpoint.path / "weights").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    shutil.rmtree(target)
    assert main(["export", str(checkpoint.path), target]) == 1
    assert "weights/__0_0.distcp" in capsys.readouterr().err
    assert not Path(target).exists()


def test_the_record_says_where_it_is_from(checkpoint: Checkpoint, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "hf")
    record = json.loads((tmp_path / "hf" / RECORD).read_text())
    assert record["source"]["checkpoint"] == checkpoint.name
    assert record["files"]["model.safetensors"] == tensors.digest(tmp_path / "hf/model.safetensors")
    assert set(record["files"]) == {path.name for path in (tmp_path / "hf").iterdir()} - {RECORD}
