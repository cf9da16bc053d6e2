"""Saves of a rank: copies while the engine is down, the file while it generates and trains again."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from rljob_workload.megatron import staging, weights
from rljob_workload.megatron.errors import WeightsError
from rljob_workload.megatron.policy import Policy

from .conftest import Loop, copy_spec


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
    first: list[object] = []
    copies = staging.copies

    def cached(buckets: list[object]) -> list[object]:
        first.append(copies(buckets))
        return list(first[0])  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(staging, "copies", cached)
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
