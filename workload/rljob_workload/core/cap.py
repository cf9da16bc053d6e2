"""How many groups may be answered at once: what the job asks for, within what an actor can take.

A Ray asyncio actor runs a bounded number of calls at a time (1,000 unless told otherwise); when all of them are answers in
flight, not even a control call gets through and the run stands still without an error. So the cap leaves headroom. (Control
calls have their own concurrency group as well; the cap is what keeps answers from queueing where nobody sees them.)
"""

from __future__ import annotations

from dataclasses import dataclass

#: Calls that a Ray asyncio actor runs at once by default.
ACTOR_CALLS = 1000
#: Calls that are never given to answers.
HEADROOM = 100


class CapError(Exception):
    """Not even one group fits."""


@dataclass(frozen=True, slots=True)
class Cap:
    """The cap as asked for and as used."""

    configured: int
    effective: int
    #: Why the two differ; empty when they don't.
    reason: str = ""
    #: What the run suffers from the lowered value; empty when nothing.
    warning: str = ""


def in_flight_cap(
    configured: int | None,
    *,
    prompts_per_step: int,
    max_age: int,
    calls_per_group: int,
    actor_calls: int = ACTOR_CALLS,
    headroom: int = HEADROOM,
) -> Cap:
    """The cap on groups in flight. `calls_per_group` is 0 where answers are not actor calls (decoding in slices)."""
    asked = configured if configured is not None else prompts_per_step * max_age
    if not calls_per_group:
        return Cap(asked, asked)
    fits = (actor_calls - headroom) // calls_per_group
    limit = f"an actor runs {actor_calls} calls at once, {headroom} are kept free, and a group needs {calls_per_group}"
    if fits < 1:
        raise CapError(f"no group can be answered: {limit}; lower generationsPerPrompt")
    if asked <= fits:
        return Cap(asked, asked)
    warning = f"fewer than one step's {prompts_per_step} prompts are answered at once" if fits < prompts_per_step else ""
    return Cap(asked, fits, limit, warning)
