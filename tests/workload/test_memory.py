"""Peaks of memory belong to the phase that had them."""

from __future__ import annotations

import numpy
import pytest

from rljob_workload.megatron import memory
from rljob_workload.megatron.memory import PeakMemory

MIB = 2**20


def use(mebibytes: int) -> None:
    """Touch so much memory and give it back."""
    numpy.ones(mebibytes * MIB, numpy.uint8)


def test_a_phase_is_told_its_own_peak_and_only_once() -> None:
    peaks = PeakMemory()
    if not peaks.by_phase:
        pytest.skip("this kernel does not reset a process's high-water mark")
    peaks.enter("generate")
    peaks.enter("train")
    use(256)
    peaks.enter("save")
    use(64)
    assert peaks.take().keys() == {"generate", "train"}
    peaks.enter("generate")
    use(128)
    peaks.enter("train")
    second = peaks.take()
    assert second.keys() == {"save", "generate"}
    assert second["generate"] - second["save"] > 32 * MIB
    peaks.enter("generate")
    assert second["generate"] - peaks.take()["train"] > 64 * MIB


def test_where_the_mark_cannot_be_reset_peaks_are_those_of_the_whole_life(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(memory, "_RESET", tmp_path_factory.mktemp("proc") / "absent" / "clear_refs")
    peaks = PeakMemory()
    assert not peaks.by_phase
    peaks.enter("train")
    use(128)
    peaks.enter("generate")
    peaks.enter("train")
    taken = peaks.take()
    assert taken["generate"] >= taken["train"]
