"""Parameters in bfloat16: the optimizer's float32 copies go on over a resume, in every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_workload.core.store.facts import facts_of
from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.export import export
from rljob_workload.megatron import weights
from rljob_workload.megatron.policy import Policy
from tests.unit.workload.published import published

from .conftest import Loop
from .many_ranks import ManyRanks, Trainer
from .test_layouts import DENSE, EXPERTS, spec_of

#: bfloat16 has 8 bits: the engine and training round differently on the way to the same log-probs.
ROUNDING = 0.1


@pytest.mark.usefixtures("ranks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_a_resumed_run_goes_on_bit_for_bit_from_the_optimizers_float32_weights(model: str, tmp_path: Path) -> None:
    spec = spec_of(model, dtype="bfloat16", learningRate="0.001")
    loop = Loop.of(spec)
    for _ in range(3):
        loop.step()
        error = loop.stats[-1].gen_logprob_error
        assert error is not None
        assert error < ROUNDING
    assert {parameter.dtype for parameter in loop.policy.parameters().values()} == {torch.bfloat16}
    loop.engine.suspend()
    checkpoint = published(tmp_path / "run", facts_of(spec), lambda to: weights.save(loop.policy, None, to))
    loaded = Policy(dataclasses.replace(loop.policy.settings, seed=99))
    weights.load(loaded, None, checkpoint.path)
    exact = export(checkpoint, tmp_path / "hf").directory
    for policy in (loop.policy, loaded):
        policy.enter_train()
        batch = loop.batches[-1]
        policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
    for name, parameter in loop.policy.parameters().items():
        assert torch.equal(loaded.parameters()[name], parameter), name
    norm = tensors.read(exact / "model.safetensors")["model.norm.weight"]
    assert torch.equal(norm, norm.bfloat16().float())


def test_layouts_go_on_from_one_anothers_checkpoints(two_ranks: ManyRanks, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"tensor": 2, "sequence": True}, {"pipeline": 2}, {}]
    losses, batch = [], None
    for number, sizes in enumerate(layouts):
        spec = spec_of(DENSE, 2, sizes, dtype="bfloat16")
        with Trainer.of(spec, two_ranks, tmp_path / "logs") as trainer:
            if number:
                trainer.load(tmp_path / "saved-0", 1)
            else:
                trainer.step()
                trainer.save(tmp_path / "saved-0")
                trainer.step()
                batch = trainer.batches[-1]
                trainer.load(tmp_path / "saved-0", 1)
            assert batch is not None
            losses.append(trainer.train(batch).loss)
            assert trainer.step().largest_logprob_change < ROUNDING
    assert losses == [pytest.approx(losses[0], abs=0.02)] * len(losses)
