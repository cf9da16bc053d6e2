"""Where prompts come from: a numbered, endless stream whose undone part can be opened again after a restart."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: Raise it when prompts are made differently from the same data (another template or tokenizer).
PROCESSING_VERSION = 1
#: Data sets up to this size are hashed whole; larger ones at this many places, first and last row included.
HASHED_ROWS = 65_536

#: What identifies rows and order; compared field by field, so that a difference is named.
Fingerprint = dict[str, Any]


class SourceError(Exception):
    """The data cannot be used: empty, ended, broken, or of another length than before."""


class SourceChangedError(SourceError):
    """The data is not the data of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of the data set: its tokens and what its answer is judged by."""

    tokens: tuple[int, ...]
    expected: str


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be made into a prompt; it takes its ordinal and is counted as skipped."""

    reason: str


class Source(Protocol):
    """A stream of prompts. Ordinals count its rows from 0, over all epochs, and are never reused."""

    @property
    def next_ordinal(self) -> int:
        """The ordinal of the row that `pull` gives next."""
        ...

    def pull(self) -> Row | BadRow:
        """The stream's next row. Raises SourceError when there is none."""
        ...

    def row(self, ordinal: int) -> Row:
        """A row that was pulled and not released."""
        ...

    def release(self, ordinal: int) -> None:
        """The prompt is done: its row is not asked for again."""
        ...

    def fingerprint(self) -> Fingerprint:
        """What identifies rows and order."""
        ...

    def save(self) -> dict[str, Any]:
        """Everything to open the stream again, as JSON."""
        ...

    def restore(self, saved: Mapping[str, Any], next_ordinal: int, live: Collection[int]) -> None:
        """Go on at `next_ordinal`, with the rows of the live ordinals at hand. Raises SourceChangedError."""
        ...

    def restart(self, next_ordinal: int) -> None:
        """Go on at `next_ordinal` with the data's own beginning."""
        ...


class SeekableSource:
    """Map-style data in an order that (seed, epoch) fixes.

    Ordinal n is row `permutation(seed, n // rows)[n % rows]`: epochs roll on without a seam, no tail is dropped, and a
    resumed run opens any ordinal directly, so nothing about the reading position has to be saved. `origin` is the ordinal
    at which this data began; it is above 0 once other data was exchanged for it (`data.onChange: Restart`).
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool) -> None:
        if not len(rows):
            raise SourceError("the data set has no rows; it needs at least one")
        self._rows = rows
        self._count = len(rows)
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, list[int]] = {}
        self._origin = 0
        self._next = 0

    def __len__(self) -> int:
        return self._count

    @property
    def next_ordinal(self) -> int:
        """The ordinal that `pull` gives next."""
        return self._next

    def epoch_of(self, ordinal: int) -> int:
        """The epoch an ordinal belongs to, from 0."""
        return (ordinal - self._origin) // self._count

    def pull(self) -> Row:
        """The next row of the stream."""
        row = self.row(self._next)
        self._next += 1
        return row

    def row(self, ordinal: int) -> Row:
        """The row behind an ordinal."""
        if ordinal < self._origin:
            raise SourceError(f"ordinal {ordinal} is before {self._origin}, where this data begins")
        epoch, place = divmod(ordinal - self._origin, self._count)
        index = self._order(epoch)[place] if self._shuffle else place
        try:
            return self._rows[index]
        except Exception as err:
            raise SourceError(f"prompt {ordinal} (row {index}): the data set raised {type(err).__name__}: {err}") from err

    def release(self, ordinal: int) -> None:
        """Nothing is held."""

    def fingerprint(self) -> Fingerprint:
        """Two sources with equal fingerprints give the same row for every ordinal."""
        if self._count <= HASHED_ROWS:
            places: Sequence[int] = range(self._count)
        else:
            places = [i * (self._count - 1) // (HASHED_ROWS - 1) for i in range(HASHED_ROWS)]
        digest = hashlib.sha256()
        for index in places:
            digest.update(json.dumps([self._rows[index].tokens, self._rows[index].expected]).encode())
        return {
            "rows": self._count,
            "content": f"sha256:{digest.hexdigest()}",
            "seed": self._seed,
            "shuffle": self._shuffle,
            "processing": PROCESSING_VERSION,
        }

    def save(self) -> dict[str, Any]:
        """The identity and the origin are all there is."""
        return {"kind": "seekable", "fingerprint": self.fingerprint(), "origin": self._origin, "base_ordinal": self._next}

    def restore(self, saved: Mapping[str, Any], next_ordinal: int, live: Collection[int]) -> None:
        """Take over origin and position."""
        require_kind(saved, "seekable")
        require_same(saved.get("fingerprint"), self.fingerprint())
        origin = saved.get("origin")
        if not isinstance(origin, int) or not 0 <= origin <= min([next_ordinal, *live]):
            raise SourceError(f"the saved source is malformed: field 'origin': {origin!r}")
        self._origin = origin
        self._next = next_ordinal

    def restart(self, next_ordinal: int) -> None:
        """The data begins here."""
        self._origin = self._next = next_ordinal

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            if len(self._rows) != self._count:
                raise SourceError(f"epoch {epoch}: the data set has {len(self._rows)} rows now, it had {self._count} before")
            order = list(range(self._count))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)  # noqa: S311 - reproducible, not secret
            # Live ordinals span at most two neighbouring epochs in practice; older orders are cheap to remake.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) <= 1}
            self._orders[epoch] = order
        return order


def require_kind(saved: Mapping[str, Any], kind: str) -> None:
    """The checkpoint's source is of this kind."""
    if saved.get("kind") != kind:
        raise SourceChangedError(f"the checkpoint's source is {saved.get('kind')!r}, this job's is {kind!r}")


def require_same(saved: Any, now: Fingerprint) -> None:
    """The fingerprints are equal, or the differing fields are named with both values."""
    if not isinstance(saved, Mapping):
        raise SourceError(f"the saved source is malformed: field 'fingerprint': {saved!r}")
    names = [name for name in {**now, **saved} if saved.get(name) != now.get(name)]
    if names:
        differences = ", ".join(f"{name} was {_short(saved.get(name))} and is {_short(now.get(name))}" for name in names)
        raise SourceChangedError(f"the data has changed since the checkpoint: {differences}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:23] + "…"
