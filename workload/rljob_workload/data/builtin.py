"""The built-in tasks: small enough to learn on one CPU core, real enough to exercise the whole trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rljob_workload.core.source import Row
from rljob_workload.data.tokenizer import EOS, DigitTokenizer

#: Names that `spec.data.builtin` may take.
BUILTIN_TASKS = ("copy3", "copyv")


@dataclass(frozen=True, slots=True)
class TaskData:
    """A data set with everything that generation needs to know about it."""

    name: str
    tokenizer: DigitTokenizer
    rows: tuple[Row, ...]
    #: The token that ends an answer; None when answers have a fixed length.
    eos: int | None
    #: Tokens of the longest right answer, its end token included.
    answer_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(row.tokens) for row in self.rows)

    def new_tokens(self, max_new_tokens: int) -> int:
        """Tokens to generate per answer: a fixed-length task stops at its length, whatever the limit above it."""
        return min(max_new_tokens, self.answer_tokens) if self.eos is None else max_new_tokens


def load_builtin(name: str) -> TaskData:
    """The built-in task of that name."""
    makers: dict[str, Callable[[], TaskData]] = {"copy3": _copy3, "copyv": _copyv}
    if name not in makers:
        raise ValueError(f"no built-in data set is called {name!r}; there are {', '.join(BUILTIN_TASKS)}")
    return makers[name]()


def _copy3() -> TaskData:
    """Copy three digits: '123=' -> '123'. All answers are three tokens long."""
    tokenizer = DigitTokenizer()
    rows = tuple(Row(tokenizer.encode(f"{i:03d}="), f"{i:03d}") for i in range(1000))
    return TaskData("copy3", tokenizer, rows, eos=None, answer_tokens=3)


def _copyv() -> TaskData:
    """Copy one to six digits: '42....=' -> '42', then end. The answers' lengths differ."""
    tokenizer = DigitTokenizer()
    rng = random.Random(1)  # noqa: S311 - part of the data set's definition
    numbers = sorted({"".join(rng.choices("0123456789", k=rng.randint(1, 6))) for _ in range(1000)})
    rows = tuple(Row(tokenizer.encode(f"{n:.<6}="), n) for n in numbers)
    return TaskData("copyv", tokenizer, rows, eos=EOS, answer_tokens=7)
