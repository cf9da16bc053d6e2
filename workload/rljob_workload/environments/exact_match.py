"""Exact match, with partial credit while learning."""

from __future__ import annotations

import operator

from rljob_workload.environments.base import Score


class ExactMatch:
    """Reward by the share of characters that are right; correct only when all are.

    Where an answer may end early, half of the reward is kept for the complete answer, so that a right beginning that
    never ends does not pay as much as the whole.
    """

    quick = True

    def __init__(self, *, fixed_length: bool) -> None:
        self._fixed_length = fixed_length

    def score(self, answer: str, expected: str) -> Score:
        """Compare character by character, over the longer of the two."""
        right = sum(map(operator.eq, answer, expected))
        share = right / max(len(answer), len(expected), 1)
        correct = answer == expected
        return Score(share if self._fixed_length else 0.5 * share + 0.5 * correct, correct)
