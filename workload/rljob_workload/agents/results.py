"""What an agent's `play` gives, as the trainer reads it."""

from __future__ import annotations

import math
import reprlib
from typing import Any

#: Characters of an error that are reported: what the trainer keeps.
MOST_ERROR = 300


class UnusableError(Exception):
    """What `play` gave is no result; the message says what it gave, in at most MOST_ERROR characters."""


def result_of(given: object) -> dict[str, Any]:
    """`{"reward": 0.5}`, with `correct` if there is one, or `{"error": "why"}`: plain values that JSON has.

    Scalars of NumPy, PyTorch and the like are what their `item()` says. Raises UnusableError, and nothing else whatever is
    given: the result of one rollout is to cost no other.
    """
    try:
        return _read(given)
    except Exception as err:  # whatever the value's own methods raise
        raise UnusableError(f"play gave {_told(given)}: {err}"[:MOST_ERROR]) from err


def _read(given: object) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise TypeError("a result is {'reward': NUMBER, 'correct': BOOL} or {'error': TEXT}")
    if unknown := [key for key in given if key not in ("reward", "correct", "error")]:
        raise ValueError(f"{reprlib.repr(unknown[0])} is unknown; a result has reward and correct, or error")
    if (error := given.get("error")) is not None:
        return {"error": str(error)[:MOST_ERROR]}
    reward, correct = _plain(given.get("reward")), _plain(given.get("correct"))
    if isinstance(reward, bool) or not (hasattr(reward, "__float__") or hasattr(reward, "__index__")):
        raise TypeError("reward is no number")
    if not math.isfinite(number := float(reward)):
        raise ValueError("reward is not finite")
    if correct is None:
        return {"reward": number}
    if not isinstance(correct, bool):
        raise TypeError("correct is not true or false")
    return {"reward": number, "correct": correct}


def _plain(value: Any) -> Any:
    """Python's own of an array library's scalar: all of them have `item()`, which raises where there is more than one value."""
    return value.item() if hasattr(value, "item") else value


def _told(given: object) -> str:
    try:
        return reprlib.repr(given)
    except Exception:  # noqa: BLE001 - its own methods again
        return f"a {type(given).__name__}"
