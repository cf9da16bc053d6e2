"""A source over any loader that can say and resume its place (`state_dict`, `load_state_dict`), such as torchdata's.

A place is where the loader stands *before* a handout (one pull). Saved is the newest place from which everything undone can
be had again. The rows of undone prompts are kept with the save when they are JSON, so that place is nearly always the last
one; otherwise it is the one before the lowest undone ordinal, and a resume replays from there: what is done or already at
hand is dropped on arrival, up to the horizon (the last ordinal of the saved run); beyond it rows are new. Replayed rows are
compared with stamps of the saved ones, so a loader that replays another order is caught instead of believed.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rljob_workload.core.place import PlaceError, decode_place, encode_place
from rljob_workload.core.source import (
    PROCESSING_VERSION,
    BadRow,
    Fingerprint,
    Row,
    SourceChangedError,
    SourceError,
    require_kind,
    require_same,
)

#: Places kept (the newest), beside those that are still needed.
PLACES = 512


class StatefulLoader(Protocol):
    """One pass over the data per `iter`, in handouts (batches), with a place that can be saved at any moment."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where the loader stood before the handout that began with `ordinal`."""

    ordinal: int
    state: Any
    epoch: int
    #: Rows of that epoch that had been read.
    offset: int
    #: Rows of the epoch before, once one was complete.
    epoch_rows: int | None


class ReplayableSource:
    """See the module. `read` makes a prompt of one raw row and may raise: that row is then a `BadRow`."""

    def __init__(
        self,
        loader: StatefulLoader,
        read: Callable[[Any], Row],
        *,
        identity: Mapping[str, Any],
        split: Callable[[Any], Sequence[Any]] = list,
        keep_rows: bool = True,
        places: int = PLACES,
    ) -> None:
        if getattr(loader, "drop_last", False):
            raise SourceError("the loader drops the tail of every epoch (drop_last); those prompts would never be handed out")
        self._loader, self._read, self._split = loader, read, split
        self._identity = dict(identity)
        self._keep_rows = keep_rows
        self._most_places = places
        self._beginning = copy.deepcopy(loader.state_dict())
        encode_place(self._beginning)  # a place that cannot be saved is refused now, not at the first save
        self._next = 0
        self._start(0, 0)

    def _start(self, epoch: int, offset: int, epoch_rows: int | None = None) -> None:
        self._iterator: Iterator[Any] | None = None
        self._handout: deque[Any] = deque()
        self._places: deque[Place] = deque()
        self._rows: dict[int, Row] = {}
        #: Those of them that cannot go into a save, lowest first.
        self._unkept: dict[int, None] = {}
        #: Stamps of the newest handout's rows, by ordinal.
        self._stamps: dict[int, str] = {}
        self._epoch, self._offset, self._epoch_rows = epoch, offset, epoch_rows

    # ---- the stream -------------------------------------------------------------------------

    @property
    def next_ordinal(self) -> int:
        """The ordinal that `pull` gives next."""
        return self._next

    @property
    def places(self) -> int:
        """Places held now."""
        return len(self._places)

    def pull(self) -> Row | BadRow:
        """The next row; takes a handout from the loader when the last one is used up."""
        row = self._advance()
        if isinstance(row, Row):
            self._hold(self._next - 1, row, kept=self._keep_rows and row_to_json(row) is not None)
        return row

    def _hold(self, ordinal: int, row: Row, *, kept: bool) -> None:
        self._rows[ordinal] = row
        if not kept:
            self._unkept[ordinal] = None

    def _advance(self) -> Row | BadRow:
        if not self._handout:
            self._fetch()
        row = self._make(self._handout.popleft())
        self._stamps[self._next] = _stamp(row)
        self._next += 1
        return row

    def row(self, ordinal: int) -> Row:
        """A row that is held until it is released."""
        try:
            return self._rows[ordinal]
        except KeyError:
            raise SourceError(f"the row of prompt {ordinal} is not held") from None

    def release(self, ordinal: int) -> None:
        """The prompt is done."""
        self._rows.pop(ordinal, None)
        self._unkept.pop(ordinal, None)

    def _make(self, raw: Any) -> Row | BadRow:
        try:
            return self._read(raw)
        except Exception as err:  # noqa: BLE001 - whatever a row makes the reader raise: named, counted, passed over
            return BadRow(f"{type(err).__name__}: {err}")

    def _fetch(self) -> None:
        """The next handout, with the place before it. Epochs roll on; the last handout of one may be short."""
        place = Place(self._next, copy.deepcopy(self._loader.state_dict()), self._epoch, self._offset, self._epoch_rows)
        for _ in range(2):  # twice: a place at the very end of an epoch gives nothing, then comes the next epoch
            handout = self._try_handout()
            if handout:
                break
            self._end_epoch()
        else:
            raise SourceError(f"{self._where()}: the source ended; a pass over it gives no rows")
        self._handout.extend(handout)
        self._offset += len(handout)
        self._stamps.clear()
        self._places.append(place)
        while len(self._places) > self._most_places and self._places[1].ordinal <= self._lowest_needed():
            self._places.popleft()

    def _try_handout(self) -> Sequence[Any]:
        """One pull; empty at the end of a pass."""
        try:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            while not (handout := self._split(next(self._iterator))):
                pass
        except StopIteration:
            return ()
        except Exception as err:
            raise SourceError(f"{self._where()}: the source raised {type(err).__name__}: {err}") from err
        return handout

    def _end_epoch(self) -> None:
        self._iterator = None
        if self._offset == 0:
            return
        if self._epoch_rows not in (None, self._offset):
            raise SourceError(
                f"{self._where()}: the source changed its length; this epoch ended after {self._offset} rows, "
                f"the one before had {self._epoch_rows}"
            )
        self._epoch_rows = self._offset
        self._epoch, self._offset = self._epoch + 1, 0

    def _where(self) -> str:
        return f"before prompt {self._next} (epoch {self._epoch}, row {self._offset})"

    # ---- saving and resuming ----------------------------------------------------------------

    def fingerprint(self) -> Fingerprint:
        """What the user says about the data; the rows themselves are compared by their stamps."""
        return {**self._identity, "processing": PROCESSING_VERSION}

    def _lowest_needed(self) -> int:
        return next(iter(self._unkept), self._next)

    def save(self) -> dict[str, Any]:
        """The newest sufficient place, the rows of undone prompts, and stamps to know the data again."""
        low = self._lowest_needed()
        base = next((place for place in reversed(self._places) if place.ordinal <= low), None)
        if base is None:
            base = Place(self._next, self._beginning, 0, 0, None)  # nothing was pulled yet
        rows = {ordinal: row_to_json(row) for ordinal, row in self._rows.items() if ordinal not in self._unkept}
        stamps = {o: _stamp(row) for o, row in self._rows.items() if o >= base.ordinal} | {
            o: stamp for o, stamp in self._stamps.items() if o >= base.ordinal
        }
        return {
            "kind": "replayable",
            "fingerprint": self.fingerprint(),
            "base_ordinal": base.ordinal,
            "place": encode_place(base.state),
            "epoch": base.epoch,
            "offset": base.offset,
            "epoch_rows": base.epoch_rows,
            "rows": {str(ordinal): row for ordinal, row in rows.items()},
            "stamps": {str(ordinal): stamp for ordinal, stamp in sorted(stamps.items())},
        }

    def restore(self, saved: Mapping[str, Any], next_ordinal: int, live: Collection[int]) -> None:
        """Load the place, take the kept rows, and replay up to the horizon, dropping what is done or at hand."""
        require_kind(saved, "replayable")
        require_same(saved.get("fingerprint"), self.fingerprint())
        try:
            base, place = int(saved["base_ordinal"]), decode_place(saved["place"])
            kept = {int(ordinal): row_from_json(row) for ordinal, row in saved["rows"].items()}
            stamps = {int(ordinal): str(stamp) for ordinal, stamp in saved["stamps"].items()}
            position = (int(saved["epoch"]), int(saved["offset"]), saved["epoch_rows"])
        except (KeyError, TypeError, ValueError, AttributeError, PlaceError) as err:
            raise SourceError(f"the saved source is malformed: {type(err).__name__}: {err}") from err
        missing = set(live) - kept.keys()
        if base > min([next_ordinal, *missing]):
            raise SourceError(f"the saved place is before prompt {base}, prompt {min(missing, default=next_ordinal)} is needed")
        self._load(place)
        self._start(*position)
        self._next = base
        found = {ordinal: row for ordinal, row in kept.items() if ordinal in live}
        while self._next < next_ordinal:  # the horizon is next_ordinal - 1; beyond it nothing is checked or dropped
            ordinal, row = self._next, self._advance()
            if stamps.get(ordinal, _stamp(row)) != _stamp(row):
                raise SourceChangedError(f"the data has changed since the checkpoint: prompt {ordinal} is another row now")
            if ordinal in missing and isinstance(row, Row):
                found[ordinal] = row
        if lost := sorted(set(live) - found.keys()):
            raise SourceChangedError(f"the data has changed since the checkpoint: prompts {lost[:8]} cannot be read any more")
        for ordinal in sorted(found):
            # A row that came out of a checkpoint goes into the next one too: the place before it may be gone.
            self._hold(
                ordinal, found[ordinal], kept=ordinal in kept or (self._keep_rows and row_to_json(found[ordinal]) is not None)
            )

    def restart(self, next_ordinal: int) -> None:
        """From the loader's beginning; a first resume without any saved place comes here too."""
        self._load(self._beginning)
        self._start(0, 0)
        self._next = next_ordinal

    def _load(self, place: Any) -> None:
        try:
            self._loader.load_state_dict(copy.deepcopy(place))
        except Exception as err:
            raise SourceChangedError(
                f"the loader refuses the saved place ({type(err).__name__}: {err}); were its workers or its data changed?"
            ) from err


def row_to_json(row: Row) -> list[Any] | None:
    """A row for the save; None when it is not plain JSON."""
    try:
        text = json.dumps([row.tokens, row.expected])
    except (TypeError, ValueError):
        return None
    tokens, expected = json.loads(text)
    return [tokens, expected] if isinstance(expected, str) and all(type(t) is int for t in tokens) else None


def row_from_json(data: Any) -> Row:
    """The inverse of `row_to_json`."""
    tokens, expected = data
    return Row(tuple(int(token) for token in tokens), str(expected))


def _stamp(row: Row | BadRow) -> str:
    text = "bad" if isinstance(row, BadRow) else repr((tuple(row.tokens), row.expected if isinstance(row.expected, str) else 0))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
