"""What an environment is."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Score(NamedTuple):
    """The verdict on one answer."""

    #: What the algorithm trains on.
    reward: float
    #: Whether the answer solves the prompt (what validation counts).
    correct: bool


class Environment(Protocol):
    """Judges one answer. May take its time and may raise: the prompt is then retried."""

    #: Whether `score` only computes, in microseconds: it is then called in the collector itself instead of in a thread.
    quick: bool

    def score(self, answer: str, expected: str) -> Score:
        """Judge an answer's text against what the data set's row expects."""
        ...
