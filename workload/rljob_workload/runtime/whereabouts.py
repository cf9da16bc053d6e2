"""Where the ranks are, by their own word: what the message of a hang says beside who did not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

#: Ranks' control calls answer in milliseconds.
ANSWER_SECONDS = 5.0


def whereabouts(ranks: Sequence[Any]) -> str:
    """Ask all ranks at once; one that does not answer is the one that the others wait for."""
    calls = [rank.status.remote() for rank in ranks]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)
    return described([_status(call) if call in done else None for call in calls])


def _status(call: Any) -> Mapping[str, Any] | None:
    try:
        status: Mapping[str, Any] = ray.get(call, timeout=0)
    except RayError:
        return None
    return status


def described(statuses: Sequence[Mapping[str, Any] | None]) -> str:
    """One sentence on the ranks' statuses; None: no answer. At most eight ranks, the silent ones first."""
    order = sorted(range(len(statuses)), key=lambda rank: (statuses[rank] is not None, rank))
    parts = [_one(rank, statuses[rank]) for rank in order[:8]]
    rest = len(statuses) - len(parts)
    return "; ".join([*parts, f"{rest} more ranks"] if rest else parts)


def _one(rank: int, status: Mapping[str, Any] | None) -> str:
    if status is None:
        return f"rank {rank} does not answer"
    step = f" ({status['step']})" if status["step"] else ""
    at = f"{status['phase']}{step} for {status['phase_seconds']:.0f} s"
    return f"rank {rank}: {at}, engine step {status['engine_steps']}, version {status['policy_version']}"
