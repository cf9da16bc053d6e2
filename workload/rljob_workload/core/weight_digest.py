"""What a rank says of the weights that it is about to write, or has read: plain data, so that a driver needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

_MODULUS = 2**64
#: The ranks' part of a checkpoint: a directory of Megatron's.
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """Digest of a set of elements; the digest of two disjoint sets is their sum, whatever rank holds which.

    Two power sums, modulo 2**64, of the elements' bits taken as integers (`megatron.digest` computes them).
    """

    count: int = 0
    first: int = 0
    second: int = 0

    def __add__(self, other: WeightDigest) -> WeightDigest:
        return WeightDigest(
            self.count + other.count, (self.first + other.first) % _MODULUS, (self.second + other.second) % _MODULUS
        )

    def __str__(self) -> str:
        return f"sum64:{self.count:x}:{self.first:016x}:{self.second:016x}"


def contradict(saved: str, loaded: str) -> bool:
    """Whether two digests, as texts, say that other weights were loaded than saved.

    Where a layout pads the vocabulary to other rows the counts differ, and nothing can be said.
    """
    return saved != loaded and saved.split(":")[:2] == loaded.split(":")[:2]


@dataclass(frozen=True, slots=True)
class Staged:
    """What one rank is about to write."""

    #: Of the model's elements that this rank writes; the sum over the ranks is the checkpoint's weight digest.
    digest: WeightDigest
    #: Of the file, about: the copies' elements.
    bytes: int


#: Below it Adam's update of a float32 weight may round to nothing, and weights that stand still say nothing.
SMALLEST_RATE = 1e-7
#: A gradient that is only rounding moves no weights either.
SMALLEST_GRADIENT = 1e-6


@dataclass(slots=True)
class StaleGuard:
    """Refuses a save whose weights stood still although steps with a gradient were trained since the one before."""

    learning_rate: float
    #: Of the newest save, or of the checkpoint that was loaded; None: nothing to compare with.
    digest: str | None = None
    step: int = 0
    _gradient: float = 0.0

    def stepped(self, gradient: float) -> None:
        """A step with this gradient norm was taken."""
        self._gradient = max(self._gradient, gradient)

    def problem(self, step: int, digest: str) -> str | None:
        """What is wrong with saving these weights at that step; None: nothing, and the next save is compared with them."""
        moved = self._gradient > SMALLEST_GRADIENT and self.learning_rate >= SMALLEST_RATE
        if digest == self.digest and step > self.step and moved:
            return (
                f"the weights of step {step} are those of step {self.step}, bit for bit, although gradients up to "
                f"{self._gradient:.3g} were applied in between: these are stale tensors, and nothing is saved"
            )
        self.digest, self.step, self._gradient = digest, step, 0.0
        return None
