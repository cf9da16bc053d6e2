"""Exact match through a judge that fails: for drills and for the proof that no prompt is lost.

What happens to a prompt follows from a hash of its row, so that an auditor can tell which prompts must be skipped without
asking the trainer: some rows always raise, some always hang, the others raise now and then. The time a verdict takes has a
heavy tail.
"""

from __future__ import annotations

import math
import random
import time
import zlib

from rljob_workload.environments.base import Score
from rljob_workload.environments.exact_match import ExactMatch

#: Rows in 1,000 that no try gets a verdict for, because the judge raises, or hangs.
RAISE_ALWAYS, HANG_ALWAYS = 4, 1
#: Verdicts in 1,000 that raise on other rows (drawn anew for each try).
RAISING = 2
#: Seconds that a hanging judge takes: longer than any sensible `environment.timeoutSeconds` of a drill.
HANGS_SECONDS = 1.5
#: A verdict's time: log-normal, in seconds.
_MEDIAN_SECONDS, _SIGMA, _LONGEST_SECONDS = 0.0004, 2.6, 0.2


class JudgeError(Exception):
    """The judge has failed, on purpose."""


class Unreliable:
    """`ExactMatch` that raises, hangs and is slow."""

    quick = False

    def __init__(self, *, fixed_length: bool) -> None:
        self._judge = ExactMatch(fixed_length=fixed_length)
        self._draw = random.Random()  # noqa: S311 - a drill; another one in every life

    def score(self, answer: str, expected: str) -> Score:
        """Judge like `ExactMatch`, if at all."""
        end = never_judged(expected)
        if end == "hangs":
            time.sleep(HANGS_SECONDS)
        if end is not None or self._draw.random() * 1000 < RAISING:
            raise JudgeError(f"the judge failed on {expected!r}")
        time.sleep(min(_LONGEST_SECONDS, self._draw.lognormvariate(math.log(_MEDIAN_SECONDS), _SIGMA)))
        return self._judge.score(answer, expected)


def never_judged(expected: str) -> str | None:
    """`raises` or `hangs` for a row that every try fails on; None for the others."""
    place = zlib.crc32(f"unreliable:{expected}".encode()) % 1000
    if place >= RAISE_ALWAYS + HANG_ALWAYS:
        return None
    return "raises" if place < RAISE_ALWAYS else "hangs"
