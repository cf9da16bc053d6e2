"""The memory that saves copy into: the same from save to save, and never in two hands."""

from __future__ import annotations

import pytest
import torch

from rljob_workload.megatron.buffers import Buffers
from rljob_workload.megatron.errors import WeightsError

SMALL, LARGE = (3, 5), (1024, 1025)


def lent() -> Buffers:
    buffers = Buffers()
    buffers.lend()
    return buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SMALL, LARGE, (), (0, 4)])
def test_memory_has_the_shape_that_was_asked_for_and_a_storage_of_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = lent().take("a", shape, dtype).fill_(2)
    assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
    assert tensor.untyped_storage().size() == tensor.numel() * dtype.itemsize
    assert (tensor == 2).all()


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_the_next_save_gets_the_same_memory_and_may_write_all_of_it(shape: tuple[int, ...]) -> None:
    buffers = lent()
    first = buffers.take("a", shape, torch.float32).fill_(1)
    address = first.data_ptr()
    buffers.give_back()
    buffers.lend()
    again = buffers.take("a", shape, torch.float32).fill_(3)
    assert again.data_ptr() == address
    assert (again == 3).all()


def test_another_shape_or_type_is_new_memory() -> None:
    buffers = lent()
    one = buffers.take("a", LARGE, torch.float32)
    buffers.give_back()
    for shape, dtype in ((SMALL, torch.float32), (LARGE, torch.bfloat16)):
        buffers.lend()
        other = buffers.take("a", shape, dtype)
        assert other.data_ptr() != one.data_ptr()
        assert buffers.owns(other)
        assert not buffers.owns(one)
        buffers.give_back()


def test_what_a_save_does_not_take_is_freed() -> None:
    buffers = lent()
    one, other = (buffers.take(name, LARGE, torch.float32) for name in "ab")
    buffers.give_back()
    buffers.lend()
    assert buffers.take("a", LARGE, torch.float32).data_ptr() == one.data_ptr()
    buffers.give_back()
    assert buffers.owns(one)
    assert not buffers.owns(other)


def test_memory_of_one_save_is_not_lent_to_another() -> None:
    buffers = lent()
    with pytest.raises(WeightsError, match="are still being written"):
        buffers.lend()


def test_memory_is_handed_out_once_in_a_save_and_only_there() -> None:
    buffers = lent()
    buffers.take("a", SMALL, torch.float32)
    with pytest.raises(WeightsError, match="a: memory for a copy is handed out once in a save"):
        buffers.take("a", SMALL, torch.float32)
    buffers.give_back()
    with pytest.raises(WeightsError, match="b: memory for a copy is handed out once in a save"):
        buffers.take("b", SMALL, torch.float32)
