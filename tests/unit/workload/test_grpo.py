"""The loss against plain arithmetic, and what it has to do to be GRPO on old answers."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_workload.algorithm.advantages import group_advantages
from rljob_workload.algorithm.batch import TrainBatch, TrainRow
from rljob_workload.algorithm.grpo import LossSettings, grpo_terms

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, entropy_coefficient=0.05)


def reference(
    logits: list[list[list[float]]],
    targets: list[list[int]],
    behaviour: list[list[float]],
    mask: list[list[float]],
    advantages: list[float],
    settings: LossSettings,
) -> tuple[float, float, int]:
    """Policy loss, entropy and clipped tokens, token by token in plain Python."""
    policy = entropy = 0.0
    clipped = 0
    for row, advantage in enumerate(advantages):
        for place, values in enumerate(logits[row]):
            if not mask[row][place]:
                continue
            scaled = [value / settings.temperature for value in values]
            total = math.log(sum(math.exp(value) for value in scaled))
            logprobs = [value - total for value in scaled]
            ratio = math.exp(logprobs[targets[row][place]] - behaviour[row][place])
            bounded = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
            clipped += ratio != bounded
            policy -= min(ratio * advantage, bounded * advantage)
            entropy -= sum(math.exp(value) * value for value in logprobs)
    return policy, entropy, clipped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_equals_a_plain_reference(seed: int, temperature: float) -> None:
    rng = random.Random(seed)
    settings = LossSettings(0.2, 0.28, 0.05, temperature)
    batch, length, vocab = 3, 4, 5
    logits = [[[rng.gauss(0, 1) for _ in range(vocab)] for _ in range(length)] for _ in range(batch)]
    targets = [[rng.randrange(vocab) for _ in range(length)] for _ in range(batch)]
    behaviour = [[-rng.random() * 3 for _ in range(length)] for _ in range(batch)]
    mask = [[float(rng.random() < 0.7) for _ in range(length)] for _ in range(batch)]
    advantages = [rng.gauss(0, 1) for _ in range(batch)]
    terms = grpo_terms(*(torch.tensor(value) for value in (logits, targets, behaviour, mask, advantages)), settings=settings)
    policy, entropy, clipped = reference(logits, targets, behaviour, mask, advantages, settings)
    assert float(terms.policy) == pytest.approx(policy, rel=1e-4, abs=1e-5)
    assert float(terms.entropy) == pytest.approx(entropy, rel=1e-4)
    assert int(terms.clipped) == clipped
    assert float(terms.total(settings)) == pytest.approx(policy - 0.05 * entropy, rel=1e-4, abs=1e-5)


def gradient(change: float, advantage: float) -> float:
    """Gradient on the sampled token's logit, when its log-prob has moved by `change` since it was sampled."""
    logits = torch.tensor([[[0.3, -0.2, 0.1]]], requires_grad=True)
    target = torch.tensor([[0]])
    behaviour = torch.log_softmax(logits.detach(), -1)[..., 0] - change
    settings = LossSettings(0.2, 0.28, 0.0)
    grpo_terms(logits, target, behaviour, torch.ones(1, 1), torch.tensor([advantage]), settings).policy.backward()
    assert logits.grad is not None
    return float(logits.grad[0, 0, 0])


@pytest.mark.parametrize(
    ("change", "advantage", "moves"),
    [
        (0.0, 1.0, True),
        (0.2, 1.0, True),  # ratio 1.22 < 1.28
        (0.3, 1.0, False),  # 1.35: enough learnt
        (-0.2, -1.0, True),  # 0.82 > 0.8
        (-0.3, -1.0, False),  # 0.74
        (0.5, -1.0, True),  # a bad answer that became likelier is always pushed down
        (-0.5, 1.0, True),
    ],
)
def test_clipping_has_its_own_limit_on_each_side(change: float, advantage: float, moves: bool) -> None:
    assert (gradient(change, advantage) != 0.0) is moves


def test_tokens_outside_the_answer_weigh_nothing_whatever_they_hold() -> None:
    logits = torch.randn(2, 3, 4)
    targets = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    advantages = torch.tensor([1.0, -1.0])
    losses = []
    for filler in (0.0, -1e30):
        behaviour = torch.where(mask > 0, torch.full_like(mask, -1.0), torch.full_like(mask, filler))
        losses.append(float(grpo_terms(logits, targets, behaviour, mask, advantages, SETTINGS).total(SETTINGS)))
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])


def test_advantages_by_hand() -> None:
    assert group_advantages([0.0, 0.0, 1.0, 1.0]) == pytest.approx([-0.8659, -0.8659, 0.8659, 0.8659], abs=1e-3)
    assert group_advantages([0.5, 0.5, 0.5]) == [0.0, 0.0, 0.0]


def test_a_single_answer_has_nothing_to_compare_with() -> None:
    with pytest.raises(ValueError, match="at least 2 answers"):
        group_advantages([1.0])


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_add_up_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(advantages[a] <= advantages[b] + 1e-12 for a, b in pairwise(order))


def test_shards_cover_all_rows_once() -> None:
    rows = tuple(TrainRow((1, index), 1, (0.0,), 0.0) for index in range(12))
    batch = TrainBatch(1, (0, 1, 2), rows)
    shards = [batch.shard(rank, 3) for rank in range(3)]
    assert sorted(row.tokens for shard in shards for row in shard) == sorted(row.tokens for row in rows)
    assert {len(shard) for shard in shards} == {4}
    assert (batch.answer_tokens, batch.longest) == (12, 2)
