"""What travels from the collector to the ranks and back: plain data, no torch.

A slice and a batch hold hundreds of small objects. Ray's pickler calls Python for each object of a class, but not for
tuples and numbers, so those two travel as tuples: a tenth of the time for packing. Those small objects are named tuples, which
are made in a third of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: (index of the first answer token, policy version that sampled from there on), ascending.
Versions = tuple[tuple[int, int], ...]


#: First part of the tag of requests that came over HTTP; training prompts have their ordinals there.
HTTP = -2

#: [start, stop) of the tokens that the policy generated, ascending; empty: all of them.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled, where that is not the job's own way."""

    #: New tokens at most.
    new_tokens: int
    temperature: float = 1.0
    #: Nucleus sampling; 1: off.
    top_p: float = 1.0
    greedy: bool = False
    #: Texts that end an answer; their tokens are part of it.
    stop: tuple[str, ...] = ()
    #: The same seed and weights give the same answer; of several answers each has a seed of its own, counted from here.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt that wants answers. `tag` comes back with each of them."""

    tag: tuple[int, int]
    tokens: tuple[int, ...]
    answers: int
    #: New tokens of each answer at most, where benchmarks and tests impose lengths; empty: the job's limit for all.
    limits: tuple[int, ...] = ()
    #: None: as the job says.
    sampling: Sampling | None = None


class Answer(NamedTuple):
    """One finished answer; where an agent took several turns, everything from the first generated token to the last."""

    tag: tuple[int, int]
    tokens: tuple[int, ...]
    #: Of the generated tokens, in order.
    logprobs: tuple[float, ...]
    versions: Versions
    #: Which of the tokens were generated; the others came from an agent, between its turns.
    spans: Spans = ()
    #: What an agent made of the prompt; None: the data set's row as it is.
    prompt: tuple[int, ...] | None = None

    @property
    def first_version(self) -> int:
        """The policy version that sampled the first token."""
        return self.versions[0][1]

    @property
    def last_version(self) -> int:
        """The policy version that sampled the last token."""
        return self.versions[-1][1]


@dataclass(frozen=True, slots=True)
class DecodeSlice:
    """What one rank generated in one stretch; `answers` is empty on ranks that do not speak for their replica."""

    answers: tuple[Answer, ...]
    #: Answers that are still to come from this replica.
    left: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _slice, (tuple(map(tuple, self.answers)), self.left)


def _slice(answers: tuple[tuple[Any, ...], ...], left: int) -> DecodeSlice:
    return DecodeSlice(tuple(map(Answer._make, answers)), left)


class TrainRow(NamedTuple):
    """One answer with its prompt, ready for the loss."""

    tokens: tuple[int, ...]
    prompt_length: int
    #: Of the generated tokens, in order.
    logprobs: tuple[float, ...]
    advantage: float
    #: Whether all of its tokens were sampled by the very weights that are trained now.
    current: bool = False
    #: The generated tokens, counted from the row's first; empty: everything behind the prompt. The last one ends the row.
    spans: Spans = ()


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The rows of one training step (all data-parallel ranks together), and whose they are."""

    step: int
    ordinals: tuple[int, ...]
    rows: tuple[TrainRow, ...]

    @property
    def answer_tokens(self) -> int:
        """Tokens that the loss counts: the denominator of its means, over all ranks."""
        return sum(len(row.logprobs) for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.tokens) for row in self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return _batch, (self.step, self.ordinals, tuple(map(tuple, self.rows)))

    def shard(self, rank: int, size: int) -> Sequence[TrainRow]:
        """The rows of one data-parallel rank. Strided, so that long and short groups spread evenly."""
        return self.rows[rank::size]


def _batch(step: int, ordinals: tuple[int, ...], rows: tuple[tuple[Any, ...], ...]) -> TrainBatch:
    return TrainBatch(step, ordinals, tuple(map(TrainRow._make, rows)))


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Sums over one rank's answer tokens; the driver adds the ranks and divides by the global count."""

    loss: float
    entropy: float
    clipped: float
    largest_logprob_change: float
    grad_norm: float
    speaks: bool
    #: Largest difference between the engine's log-probs and training's, over answers of the current weights; None without any.
    gen_logprob_error: float | None = None
