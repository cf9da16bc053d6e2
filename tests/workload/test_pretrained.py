"""Runs that begin from a Hugging Face model: the same function of its tokens, in every layout, and the same bits back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_workload.core.inspection import find
from rljob_workload.core.store.facts import facts_of
from rljob_workload.core.store.manifest import Manifest
from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.export import export
from rljob_workload.huggingface.pretrained import describe
from rljob_workload.megatron import weights
from rljob_workload.megatron.policy import Policy
from rljob_workload.megatron.settings import model_settings
from rljob_workload.runtime.metrics import read_metrics
from tests.unit.workload.hf_models import MODELS, make
from tests.unit.workload.published import copies_of, published

from .conftest import ROOT, Loop
from .hf_reference import logits
from .many_ranks import ManyRanks, Trainer
from .test_export import IDS, logits_of


def spec_from(directory: Path, *, ranks: int = 1, sizes: dict[str, Any] | None = None) -> RLJobSpec:
    raw = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
    raw["trainer"]["ranksPerNode"] = ranks
    raw["model"] = {"huggingFace": {"path": str(directory)}}
    raw["parallelism"] = sizes or {}
    raw["algorithm"]["grpo"] |= {"promptsPerStep": 4, "microBatchSize": 8, "generationsPerPrompt": 4}
    raw["generation"]["maxInFlightPrompts"] = 4
    verdict = judge("pretrained", raw)
    assert verdict.spec is not None, verdict.findings
    return verdict.spec


def same(one: Path, other: Path) -> bool:
    """Whether two directories hold the same model, bit for bit."""
    before, after = (tensors.read(at / "model.safetensors") for at in (one, other))
    told = [json.loads((at / "config.json").read_text()) for at in (one, other)]
    special = ("pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings")
    for config in told:
        for name in special:
            config.pop(name, None)
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before) and told[0] == told[1]


@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_pretrained_model_computes_what_its_files_say_and_is_exported_bit_for_bit(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / "hf")
    spec = spec_from(tmp_path / "hf")
    policy = Policy(model_settings(spec))
    ours, theirs = logits_of(policy), logits(tmp_path / "hf", IDS)
    assert ours.abs().max() > 1
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-5 * float(ours.abs().max())), (ours - theirs).abs().max()
    (tmp_path / "saved").mkdir()
    weights.save(policy, None, tmp_path / "saved")
    export(published(tmp_path / "run", facts_of(spec, describe(spec)), copies_of(tmp_path / "saved")), tmp_path / "back")
    assert same(tmp_path / "hf", tmp_path / "back")


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", ["llama-3", "qwen2", "qwen3"])
def test_the_engine_and_training_agree_on_a_pretrained_model(name: str, tmp_path: Path) -> None:
    """Biases, norms of queries and keys, wide heads and stretched positions go through the paged cache too."""
    make(name, tmp_path / "hf", scale=0.1)
    loop = Loop.of(spec_from(tmp_path / "hf"))
    for _ in range(3):
        loop.step()
        error = loop.stats[-1].gen_logprob_error
        assert error is not None
        assert error < 1e-5


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen2", {"tensor": 2}),
        ("llama-3", {"pipeline": 2}),
        ("qwen3", {"tensor": 2, "sequence": True}),
        ("qwen3_moe", {"expert": 2}),
    ],
)
def test_every_layout_takes_the_same_weights_over(
    name: str, sizes: dict[str, Any], two_ranks: ManyRanks, tmp_path: Path
) -> None:
    make(name, tmp_path / "hf", scale=0.1)
    spec = spec_from(tmp_path / "hf", ranks=2, sizes=sizes)
    with Trainer.of(spec, two_ranks, tmp_path / "logs") as trainer:
        trainer.save(tmp_path / "saved")
        assert trainer.step().largest_logprob_change < 1e-5
    export(published(tmp_path / "run", facts_of(spec, describe(spec)), copies_of(tmp_path / "saved")), tmp_path / "back")
    assert same(tmp_path / "hf", tmp_path / "back")


def run_local(manifest: dict[str, Any], directory: Path) -> tuple[Manifest, float]:
    """A whole run. Returns its newest checkpoint's manifest and its last validation reward."""
    path = directory.parent / f"{directory.name}.yaml"
    path.write_text(yaml.safe_dump(manifest))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "rljob_cli.main", "local", str(path), "--dir", str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = find(directory, "Full").manifest
    assert found is not None
    rewards = [line["validation_reward"] for line in read_metrics(directory / "metrics.jsonl") if "validation_reward" in line]
    return found, rewards[-1]


def test_a_run_begins_from_another_runs_export_and_goes_on_without_it(tmp_path: Path) -> None:
    """With a learning rate of 0 the first validation, and the weights, are those of the run that was exported."""
    manifest = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())
    spec = manifest["spec"]
    spec["algorithm"]["grpo"]["steps"] = 5
    spec["validation"] = {"everySteps": 5, "prompts": 300}
    first, reward = run_local(manifest, tmp_path / "first")
    export(find(tmp_path / "first", "Full"), tmp_path / "hf")

    spec["model"] = {"huggingFace": {"path": str(tmp_path / "hf")}}
    spec["algorithm"]["grpo"] |= {"steps": 1, "learningRate": "0"}
    spec["validation"]["everySteps"] = 1
    second, again = run_local(manifest, tmp_path / "second")
    assert (again, second.weight_digest) == (reward, first.weight_digest)

    (tmp_path / "hf" / "model.safetensors").unlink()
    spec["algorithm"]["grpo"]["steps"] = 2
    third, again = run_local(manifest, tmp_path / "second")
    assert (again, third.weight_digest, third.step) == (reward, first.weight_digest, 2)
