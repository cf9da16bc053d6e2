"""Exports of the real model: the same function of its tokens, the same bits on the way back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rljob_api.spec import RLJobSpec
from rljob_workload.core.store.facts import facts_of
from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.architecture import architecture
from rljob_workload.huggingface.export import export
from rljob_workload.huggingface.mapping import pack
from rljob_workload.huggingface.names import table
from rljob_workload.megatron import weights
from rljob_workload.megatron.policy import Policy
from tests.unit.workload.published import published

from .conftest import Loop
from .hf_reference import logits
from .test_layouts import DENSE, EXPERTS, spec_of

IDS = torch.tensor([1, 5, 9, 3, 3, 12, 2, 7, 11, 4, 6])


def logits_of(policy: Policy) -> Tensor:
    """What the trainer's model makes of IDS, without the rows that fill up the vocabulary."""
    positions, causal = policy._mask(len(IDS))
    with torch.no_grad():
        out = policy.model(IDS[None], positions, causal, runtime_gather_output=True)
    return out[0, :, : policy.settings.shape.vocab_size]


@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_an_export_computes_what_the_trained_model_does_and_comes_back_bit_for_bit(model: str, tmp_path: Path) -> None:
    spec = spec_of(model)
    loop = Loop.of(spec)
    loop.step()
    policy = loop.policy
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():  # larger than at first, and norms that are not 1: a wrong place of anything shows
        for parameter in policy.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.2)
    checkpoint = published(tmp_path / "run", facts_of(spec), lambda directory: weights.save(policy, None, directory))
    export(checkpoint, tmp_path / "hf")

    ours, theirs = logits_of(policy), logits(tmp_path / "hf", IDS)
    assert ours.abs().max() > 1
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-5 * float(ours.abs().max())), (ours - theirs).abs().max()

    back = Policy(dataclasses.replace(policy.settings, seed=99))
    load(back, tmp_path / "hf", spec)
    for name, parameter in back.parameters().items():
        assert torch.equal(parameter, policy.parameters()[name]), name


def load(policy: Policy, directory: Path, spec: RLJobSpec) -> None:
    """Put a model directory's weights into a rank that holds the whole model; experts are parameters of their own there."""
    of, found = architecture(facts_of(spec)), tensors.read(directory / "model.safetensors")
    named = dict(policy.parameters())
    with torch.no_grad():
        for entry in table(of):
            whole = pack(of, entry, [found[part] for part in entry.parts])
            before, experts, after = entry.names[0].partition("mlp.experts.experts.")
            if not experts:
                named.pop(entry.names[0]).copy_(whole)
                continue
            for number, one in enumerate(whole):
                named.pop(f"{before}mlp.experts.local_experts.{number}.{after}").copy_(one)
    assert not named
