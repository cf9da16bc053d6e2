"""How many new prompts may be handed out: the rule that bounds the age of answers and empties the run at its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The sizes of a run that the room rule reads."""

    prompts_per_step: int
    max_age: int
    steps: int

    def room(self, undone: int, version: int) -> int:
        """New hand-outs allowed now, with so many prompts undone.

        Bounded by the age window and by what the remaining steps can still use, so that a finished run ends with every
        live state at 0. Filtered and skipped prompts are done and therefore do not count; handing out a prompt again
        needs no room, because it never gave up its own. Everything is counted from the live states, never from step
        numbers, so it stays right when P changes or when a checkpoint brings no ledger.
        """
        allowed = min((self.max_age + 1) * self.prompts_per_step, self._usable(version))
        return max(0, allowed - undone)

    def exhausted(self, undone: int, version: int) -> bool:
        """Whether the remaining steps need no prompt that has not been handed out."""
        return undone >= self._usable(version)

    def _usable(self, version: int) -> int:
        return (self.steps - version) * self.prompts_per_step

    def too_old(self, first_version: int, version: int) -> bool:
        """Whether an answer begun by `first_version` may no longer be trained by the step after `version`."""
        return version - first_version > self.max_age

    def at_its_limit(self, first_version: int, version: int) -> bool:
        """Whether the step after `version` is the last that may train it."""
        return version - first_version >= self.max_age
