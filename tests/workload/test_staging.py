"""Saves of a rank: copies while the engine is down, the file while it generates and trains again."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_api.spec import RLJobSpec
from rljob_workload.megatron import staging, weights
from rljob_workload.megatron.buffers import Buffers
from rljob_workload.megatron.errors import WeightsError
from rljob_workload.megatron.policy import Policy
from rljob_workload.megatron.shim import optimizer as fixes

from .conftest import Loop, copy_spec
from .many_ranks import ManyRanks, Trainer


@pytest.fixture(scope="module")
def loop(ranks: None) -> Loop:
    made = Loop.of(copy_spec(steps=50))
    made.step()
    return made


def test_what_is_trained_while_the_file_is_written_is_not_in_it(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held until the next step has changed every parameter in place."""
    trained = threading.Event()
    write = staging.StagedSave._write

    def late(self: staging.StagedSave) -> None:
        assert trained.wait(60)
        write(self)

    monkeypatch.setattr(staging.StagedSave, "_write", late)
    loop.engine.suspend()
    saver = weights.Saver(loop.policy, loop.engine.sampler)
    staged = saver.stage(tmp_path)
    before = {name: parameter.clone() for name, parameter in loop.policy.parameters().items()}
    loop.engine.resume(loop.policy.version)
    with pytest.raises(WeightsError, match="has not been ended"):
        saver.stage(tmp_path)
    loop.step()
    assert not any(torch.equal(parameter, before[name]) for name, parameter in loop.policy.parameters().items())
    trained.set()
    saver.finish([saver.written()])

    other = Policy(dataclasses.replace(loop.policy.settings, seed=99))
    assert weights.load(other, None, tmp_path) == staged.digest
    for name, parameter in other.parameters().items():
        assert torch.equal(parameter, before[name]), name


def test_tensors_of_an_earlier_save_are_refused(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL #3312: with a cached structure every save after the first held the first one's tensors, and reported success."""
    first: dict[Any, torch.Tensor] = {}
    copied = staging.copied

    def cached(shard: Any, buffers: Buffers) -> Any:
        if isinstance(getattr(shard, "data", None), torch.Tensor):
            kept = first.setdefault((shard.key, shard.global_offset), shard.data.clone())
            shard = dataclasses.replace(shard, data=kept)
        return copied(shard, buffers)

    monkeypatch.setattr(staging, "copied", cached)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    loop.engine.suspend()
    weights.save(loop.policy, None, tmp_path / "a")
    loop.engine.resume(loop.policy.version)
    loop.step()
    loop.engine.suspend()
    with pytest.raises(WeightsError, match=r"are not the live parameters .*: these are stale tensors, and nothing is saved"):
        weights.save(loop.policy, None, tmp_path / "b")
    loop.engine.resume(loop.policy.version)


def test_a_write_that_fails_is_told_to_whoever_waits_for_it(loop: Loop, tmp_path: Path) -> None:
    loop.engine.suspend()
    saver = weights.Saver(loop.policy, None)
    (tmp_path / weights.WEIGHTS).mkdir()
    with pytest.raises(WeightsError, match=r"cannot write the weights to .*File exists"):
        saver.stage(tmp_path)
    target = tmp_path / "gone"
    target.mkdir()
    held = threading.Event()
    original = staging.StagedSave.start

    def removed_first(self: staging.StagedSave) -> None:
        (target / weights.WEIGHTS).rmdir()
        held.set()
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.StagedSave, "start", removed_first)
        saver.stage(target)
    with pytest.raises(WeightsError, match=r"cannot write the weights to .*No such file or directory"):
        saver.written()
    with pytest.raises(WeightsError, match="no save is under way"):
        saver.finish([])
    loop.engine.resume(loop.policy.version)


@pytest.mark.usefixtures("ranks")
def test_a_policy_that_has_taken_no_step_is_saved_and_goes_on_as_it_would_have(loop: Loop, tmp_path: Path) -> None:
    """Megatron asserts that an optimizer has states; the ones that it is given change no weight and no later step."""
    batch, settings = loop.batches[0], dataclasses.replace(loop.policy.settings, seed=5)
    plain, saved, loaded = (Policy(settings) for _ in range(3))
    weights.save(saved, None, tmp_path)
    with torch.no_grad():
        for parameter in loaded.parameters().values():
            parameter.zero_()
    weights.load(loaded, None, tmp_path)
    for policy in (plain, saved, loaded):
        policy.enter_train()
        for _ in range(2):
            policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
    for name, parameter in plain.parameters().items():
        assert torch.equal(saved.parameters()[name], parameter), name
        assert torch.equal(loaded.parameters()[name], parameter), name


def places(saver: weights.Saver) -> dict[Any, int]:
    return {name: tensor.data_ptr() for name, (tensor, _) in saver._buffers._kept.items()}


def test_all_saves_of_a_run_copy_into_the_same_memory(loop: Loop, tmp_path: Path) -> None:
    saver, found = weights.Saver(loop.policy, None), []
    for name in "abc":
        (tmp_path / name).mkdir()
        loop.engine.suspend()
        saver.stage(tmp_path / name)
        loop.engine.resume(loop.policy.version)
        saver.finish([saver.written()])
        found.append(places(saver))
        loop.step()
    assert found[0] == found[1] == found[2]
    assert len(found[0]) >= 3 + len(loop.policy.parameters()), "Adam's flat states, and each parameter"


def test_what_was_not_copied_is_not_written(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "copied", lambda shard, buffers: shard)
    loop.engine.suspend()
    with pytest.raises(WeightsError, match="what would be written is not the copy"):
        weights.Saver(loop.policy, None).stage(tmp_path)
    loop.engine.resume(loop.policy.version)


def test_memory_that_a_writer_still_reads_is_not_taken_for_the_next_save(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not by a caller who has forgotten the save before."""
    go_on = threading.Event()
    write = staging.StagedSave._write

    def late(self: staging.StagedSave) -> None:
        assert go_on.wait(60)
        write(self)

    monkeypatch.setattr(staging.StagedSave, "_write", late)
    for name in "ab":
        (tmp_path / name).mkdir()
    loop.engine.suspend()
    saver = weights.Saver(loop.policy, None)
    staged = saver.stage(tmp_path / "a")
    assert saver._pending is not None
    (_, save), saver._pending = saver._pending, None
    loop.engine.resume(loop.policy.version)
    loop.step()
    with pytest.raises(WeightsError, match="are still being written"):
        saver.stage(tmp_path / "b")
    go_on.set()
    save.finish([save.written()])
    other = Policy(dataclasses.replace(loop.policy.settings, seed=99))
    assert weights.load(other, None, tmp_path / "a") == staged.digest
    saver.stage(tmp_path / "b")
    saver.finish([saver.written()])


def test_a_save_that_cannot_begin_gives_its_memory_back(loop: Loop, tmp_path: Path) -> None:
    saver = weights.Saver(loop.policy, None)
    (tmp_path / weights.WEIGHTS).mkdir()
    with pytest.raises(WeightsError, match="File exists"):
        saver.stage(tmp_path)
    (tmp_path / weights.WEIGHTS).rmdir()
    saver.stage(tmp_path)
    saver.finish([saver.written()])


def test_the_optimizer_states_are_gathered_as_megatron_gathers_them(loop: Loop) -> None:
    """Where its parameters lie; between them is padding, which nobody reads."""
    ((_, optimizer),) = enumerate(getattr(loop.policy.optimizer, "chained_optimizers", [loop.policy.optimizer]))
    theirs = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    buffers = Buffers()
    buffers.lend()
    with fixes.gathering_into(buffers):
        ours = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    compared = 0
    for index, buffer in enumerate(optimizer.buffers):
        ((dtype, world),) = ours[index].items()
        for key, tensor in world.items():
            assert buffers.owns(tensor)
            for start, end, _ in buffer.param_index_map.values():
                assert torch.equal(tensor[start:end], theirs[index][dtype][key][start:end])
                compared += 1
    assert compared == 3 * len(loop.policy.parameters())


def test_the_second_save_of_ranks_that_share_the_optimizer_is_as_good_as_the_first(
    two_ranks: ManyRanks, tmp_path: Path
) -> None:
    """One of two data-parallel ranks writes, the other one sends it its part."""
    raw = copy_spec(steps=50).to_wire()
    raw["trainer"]["ranksPerNode"] = 2
    raw["algorithm"]["grpo"]["microBatchSize"] = 32
    spec = RLJobSpec.model_validate(raw)
    with Trainer.of(spec, two_ranks, tmp_path) as trainer:
        trainer.step()
        trainer.save(tmp_path / "first")
        trainer.step()
        trainer.save(tmp_path / "second")
        batch, version = trainer.batches[0], trainer.version
        expected = trainer.train(batch)
        trainer.load(tmp_path / "second", version)
        again = trainer.train(batch)
    assert (again.loss, again.grad_norm) == (expected.loss, expected.grad_norm)
