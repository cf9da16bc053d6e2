"""When a decode slice ends: each one is a round trip, so it goes on for as long as returning would change nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SliceGoal:
    """What a replica generates for. Ranks in lockstep decide by it from counts that are the same on all of them."""

    #: Complete groups that end it: the step's last missing ones must not wait.
    want: int
    #: With fewer answers than this left, the engine has idle slots that other prompts could fill; 0: there are none.
    refill_below: int = 0
    #: Engine iterations at most: the time that a finished step may have to wait for another replica.
    iterations: int = 64

    def reached(self, complete: int, left: int, served: int = 0) -> bool:
        """Whether to return with so many complete groups, and so many answers left in the engine.

        A complete group makes room for another one. That is worth a return only where a slot waits for it: while the
        engine has answers of its own in the queue, they take the freed slots. `served`: complete answers to requests that
        came over HTTP; somebody waits for each of them.
        """
        return not left or served > 0 or complete >= self.want or (complete > 0 and left < self.refill_below)


def share_left(groups: int, replicas: int, load: int) -> int:
    """Groups that a replica may still take in, so that each is left its part of all groups in flight and about to be.

    `load`: those of them that it has been given. Rounded up: while there are others, somebody may take them.
    """
    return max(0, -(-groups // replicas) - load)
