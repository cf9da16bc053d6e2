"""The digest of the weights: the same in every layout, another one for every change; and the guard against stale tensors."""

from __future__ import annotations

import pytest
import torch

from rljob_workload.core.weight_digest import StaleGuard, WeightDigest
from rljob_workload.megatron.digest import digest_of

WEIGHTS = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000).sin()


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_shards_of_any_layout_add_up_to_the_digest_of_the_whole(dimension: int, parts: int) -> None:
    total = sum((digest_of([shard]) for shard in WEIGHTS.chunk(parts, dimension)), WeightDigest())
    assert total == digest_of([WEIGHTS])
    assert str(total) == str(digest_of([WEIGHTS]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_one_changed_bit_changes_it(dtype: torch.dtype) -> None:
    weights = (WEIGHTS * 100).to(dtype)
    changed = weights.clone()
    changed.view(torch.uint8).view(-1)[123_457] ^= 1
    assert digest_of([weights]) != digest_of([changed])


def test_exchanged_values_of_two_tensors_that_keep_the_sum_are_seen() -> None:
    one, other = torch.tensor([1, 4], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    assert digest_of([one]) != digest_of([other])


def guard(rate: float = 1e-3) -> StaleGuard:
    saved = StaleGuard(rate, "a", 10)
    saved.stepped(0.5)
    return saved


def test_weights_that_stood_still_under_a_gradient_are_refused() -> None:
    assert "the weights of step 12 are those of step 10" in (guard().problem(12, "a") or "")


def test_a_save_is_what_the_next_one_is_compared_with() -> None:
    saved = guard()
    assert saved.problem(12, "b") is None
    saved.stepped(0.5)
    assert saved.problem(14, "b") is not None


@pytest.mark.parametrize(
    ("saved", "step", "digest"),
    [
        (guard(), 12, "b"),
        (guard(), 10, "a"),  # the same step again: a save outside the usual place
        (guard(rate=0.0), 12, "a"),
        (StaleGuard(1e-3, "a", 10), 12, "a"),  # all rewards were equal: nothing was to be learnt
        (StaleGuard(1e-3), 12, "a"),
    ],
)
def test_weights_that_may_stand_still_are_saved(saved: StaleGuard, step: int, digest: str) -> None:
    assert saved.problem(step, digest) is None
