"""Dual mode without a GPU: Megatron's own inference-optimized classes, over plain torch in place of Transformer Engine."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rljob_api.exitcodes import ExitCode
from rljob_workload.megatron import device, meeting
from rljob_workload.megatron.errors import DeviceError

from .conftest import ROOT


def play(directory: Path, world: int, *more: str) -> list[dict[str, Any]]:
    """What each rank found."""
    (directory / "saved").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.workload.dual_mode", str(directory)]
    listener = meeting.listen("127.0.0.1")
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(listener.fileno()), *more],
            pass_fds=[listener.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(world)
    ]
    listener.close()
    told = []
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=250)
            assert rank.returncode == 0, errors[-3000:]
            told.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return told


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two tensor ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return play(tmp_path_factory.mktemp("dual"), request.param)


def test_the_model_is_made_of_megatrons_inference_optimized_layers(found: list[dict[str, Any]]) -> None:
    wanted = {"InferenceLayerNormColumnParallelLinear", "InferenceRowParallelLinear", "TEDotProductAttention", "RMSNorm"}
    for rank in found:
        assert wanted <= set(rank["layers"])
        assert "RowParallelLinear" not in rank["layers"]


def test_it_generates_by_the_kernels_and_trains_by_transformer_engine(found: list[dict[str, Any]]) -> None:
    """Each layer of each forward; the hand-over is what switches it, with answers in flight."""
    kernels = {"norm"} if len(found) == 1 else {"norm", "gather", "scatter"}
    for rank in found:
        assert all(calls.keys() == kernels for calls in rank["generating"])
        assert all(calls.keys() == {"training"} for calls in rank["training"])


def test_both_ways_compute_the_same_log_probs(found: list[dict[str, Any]]) -> None:
    errors = [error for rank in found for error in rank["errors"] if error is not None]
    assert errors
    assert max(errors) < 0.1  # bfloat16


def test_it_is_saved_resumed_exported_and_begun_from_the_export(found: list[dict[str, Any]]) -> None:
    assert [(rank["resumed"], rank["begun"]) for rank in found] == [([], [])] * len(found)


def test_experts_on_transformer_engine_are_grouped_and_do_the_same(tmp_path: Path) -> None:
    """Without dual mode, which Megatron has for other experts. Their tensors have the names of those that run one by one."""
    (rank,) = play(tmp_path, 1, "experts")
    assert {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TELayerNormColumnParallelLinear"} <= set(rank["layers"])
    assert all(calls.keys() == {"training", "experts"} for calls in [*rank["generating"], *rank["training"]])
    assert max(error for error in rank["errors"] if error is not None) < 0.1
    assert (rank["resumed"], rank["begun"]) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": True, "inference_optimized": False, "transformer": "Local"}, "gpusPerNode is above 0, and this rank sees no"),
        (
            {"gpus": False, "inference_optimized": True, "transformer": "TransformerEngine"},
            "spec.generation.inferenceOptimized true needs a GPU, and this rank sees none",
        ),
        (
            {"gpus": False, "inference_optimized": False, "transformer": "TransformerEngine"},
            "spec.model.transformer TransformerEngine needs a GPU",
        ),
    ],
)
def test_a_rank_without_a_gpu_says_what_it_lacks(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        device.require(**arguments)
    device.require("Local", gpus=False, inference_optimized=False)


def test_a_run_on_a_machine_without_gpus_ends_at_once_and_says_so(tmp_path: Path) -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())
    spec = manifest["spec"]
    spec["trainer"]["gpusPerNode"] = 2
    spec["parallelism"] = {"tensor": 2, "sequence": True}
    spec["model"] |= {"transformer": "TransformerEngine", "dtype": "bfloat16", "allowInferenceOptimizedTraining": True}
    spec["generation"]["inferenceOptimized"] = True
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "rljob_cli.main", "local", str(tmp_path / "job.yaml"), "--dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ExitCode.ENVIRONMENT_MISSING, done.stderr[-2000:]
    assert "spec.trainer.gpusPerNode asks for 2 GPUs in all, and this machine has 0; set it to 0 for CPU ranks" in done.stderr


def test_a_rank_with_a_gpu_says_that_transformer_engine_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="TransformerEngine needs Transformer Engine, which is not installed here"):
        device.require("TransformerEngine", gpus=True, inference_optimized=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(DeviceError, match="this rank is number 3 of its node, which shows it 1 GPUs"):
        device.require("Local", gpus=True, inference_optimized=False)


def test_a_shared_experts_matrix_becomes_an_inference_layer_under_its_own_name() -> None:
    """Read from Megatron's source: its specification gives shared experts the column- and row-parallel inference layers, which
    are subclasses that name no parameter (tests/unit/workload/test_export.py), so a tensor keeps its name."""
    core = importlib.util.find_spec("megatron.core")
    assert core is not None
    assert core.submodule_search_locations is not None
    root = Path(core.submodule_search_locations[0])
    backend = {
        one.name: one for one in ast.parse((root / "models" / "backends.py").read_text()).body if isinstance(one, ast.ClassDef)
    }
    methods = {
        one.name: ast.unparse(one.body[-1]) for one in backend["InferenceSpecProvider"].body if isinstance(one, ast.FunctionDef)
    }
    assert methods["column_parallel_linear"] == "return InferenceColumnParallelLinear"
    assert methods["row_parallel_linear"] == "return InferenceRowParallelLinear"
    source = ast.parse((root / "models" / "gpt" / "moe_module_specs.py").read_text())
    functions = {one.name: ast.unparse(one) for one in source.body if isinstance(one, ast.FunctionDef)}
    spec = functions["get_inference_optimized_moe_spec"]
    assert "_build_shared_experts, submodules=MLPSubmodules(linear_fc1=backend.column_parallel_linear()" in spec
