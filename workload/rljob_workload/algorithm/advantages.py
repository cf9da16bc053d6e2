"""GRPO's advantages: how much better an answer is than the other answers to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Keeps a group of nearly equal rewards from blowing up.
EPSILON = 1e-4
#: A reward's magnitude: squares of twice as much are far from overflowing, and it is a number in float32.
LARGEST_REWARD = 1e30


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group, centred and divided by the group's standard deviation (unbiased, plus EPSILON)."""
    count = len(rewards)
    if count < 2:
        raise ValueError(f"a group needs at least 2 answers to compare, this one has {count}")
    mean = math.fsum(rewards) / count
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (count - 1))
    return [(r - mean) / (deviation + EPSILON) for r in rewards]
