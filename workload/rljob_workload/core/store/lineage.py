"""Names of checkpoints, and which of them the current weights descend from.

Each attempt takes a token and resumes from one checkpoint, or from none. A checkpoint is on the lineage of the newest token if
that token wrote it, or if it is what the token resumed from, or what came before that. Later checkpoints of an older token are
not: their writer was overtaken before it published them. So the highest step is not the newest checkpoint, and a writer that
wakes up late can publish what it likes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rljob_api.names import checkpoint_directory

_NAME = re.compile(r"step-(\d{6,12})-t(\d{6,12})")


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A checkpoint's directory: its step and the token of its writer.

    In the order of the tokens, then of the steps: on a lineage both only grow, and without tokens a newer attempt supersedes.
    """

    token: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The parts of a directory's name; None for any other name, also for a second spelling of the same one."""
        match = _NAME.fullmatch(text)
        name = cls(step=int(match[1]), token=int(match[2])) if match else None
        return name if name is not None and str(name) == text else None

    def __str__(self) -> str:
        return checkpoint_directory(self.step, self.token)


class Taken(Protocol):
    """One entry of the fence, as far as the lineage needs it."""

    @property
    def token(self) -> int: ...
    @property
    def resumed_from(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which checkpoints may be read."""

    #: The newest token; 0 where none was ever taken.
    token: int
    #: Of each token on the lineage, the highest step that is on it; None: all of its steps.
    bounds: Mapping[int, int | None] = field(default_factory=dict)

    def admits(self, name: Name) -> bool:
        """Whether the current weights may descend from this checkpoint."""
        if not self.token:
            return True  # a directory from before there were tokens
        if name.token not in self.bounds:
            return False
        bound = self.bounds[name.token]
        return bound is None or name.step <= bound

    def why_not(self, name: Name) -> str:
        """For people: why a checkpoint is passed over."""
        bound = self.bounds.get(name.token)
        if bound is None:
            return f"not on the lineage of token {self.token}, which resumed from nothing that token {name.token} wrote"
        origin = Name(name.token, bound)
        return f"not on the lineage of token {self.token}: its writer was overtaken, the run went on from {origin}"


def lineage_of(entries: Iterable[Taken]) -> Lineage:
    """Follow the newest token back to where its weights began."""
    by_token = {entry.token: entry for entry in entries}
    if not by_token:
        return Lineage(0)
    newest = max(by_token)
    bounds: dict[int, int | None] = {newest: None}
    at = newest
    while at in by_token and (origin := Name.parse(by_token[at].resumed_from or "")) and origin.token < at:
        bounds[origin.token] = origin.step
        at = origin.token
    return Lineage(newest, bounds)
