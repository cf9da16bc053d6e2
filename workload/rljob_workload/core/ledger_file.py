"""The ledger as JSON: a few bytes per live ordinal, readable by people, refused by field name when it is wrong.

Everything between the frontier and the next ordinal is one string of runs, `window`: `4d,3b,p,2R:1` means four done, three
buffered, one pending, and two retryable ones that failed once and are owed (capital letter). So each ordinal has exactly
one state by construction, and a long stretch of done prompts costs as much as a short one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rljob_workload.core.ledger import Commit, DoneSet, Entry, Ledger, LedgerError, SkipCause, State

LEDGER_VERSION = 2
_LETTERS = {State.PENDING: "p", State.IN_FLIGHT: "i", State.BUFFERED: "b", State.RETRYABLE: "r"}
_STATES = {letter: state for state, letter in _LETTERS.items()}
_DONE = "d"
_RUN = re.compile(r"(\d*)([dpibrPIBR])(?::(\d+))?")
#: Ordinals above the frontier that a file may claim: far above any real window, far below what memory holds.
LONGEST_WINDOW = 50_000_000


class LedgerFormatError(LedgerError):
    """A saved ledger that cannot be read; names the field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"the saved ledger is malformed: field {field!r}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[LedgerFormatError], tuple[str, str]]:
        return type(self), (self.field, self.problem)


def ledger_to_json(ledger: Ledger) -> dict[str, Any]:
    """The whole ledger; refused while a training step is open, because such a moment is neither before nor after it."""
    if training := ledger.in_state(State.TRAINING):
        raise LedgerError(f"no snapshot between take and commit: {training} are in training")
    last = ledger._last_commit
    return {
        "version": LEDGER_VERSION,
        "next_ordinal": ledger.next_ordinal,
        "frontier_ordinal": ledger.frontier,
        "trained": ledger._trained,
        "filtered": ledger._filtered,
        "skipped": dict(ledger._skipped),
        # As differences, which are short: 20 000 017, 20 000 090 -> 20 000 017, 73.
        "skipped_names": {cause: _differences(names) for cause, names in ledger._skipped_names.items()},
        "at_risk": ledger.at_risk,
        "window": _window_to_text(ledger.frontier, ledger.next_ordinal, ledger._live),
        "last_commit": {"step": last.step, "count": last.count, "digest": last.digest} if last else None,
    }


def ledger_from_json(data: Any) -> Ledger:
    """Rebuild a saved ledger as of the moment of the save. `resume_in_flight` makes it one to go on from."""
    if not isinstance(data, Mapping):
        raise LedgerFormatError("ledger", f"expected an object, found {type(data).__name__}")
    version = data.get("version")
    if version != LEDGER_VERSION or isinstance(version, bool):
        raise LedgerFormatError("version", f"{version!r} is not {LEDGER_VERSION}, which this build reads")
    ledger = Ledger()
    ledger.next_ordinal = _count(data, "next_ordinal")
    frontier = _count(data, "frontier_ordinal")
    if frontier > ledger.next_ordinal:
        raise LedgerFormatError("frontier_ordinal", f"{frontier} is above next_ordinal {ledger.next_ordinal}")
    ledger._trained = _count(data, "trained")
    ledger._filtered = _count(data, "filtered")
    ledger.at_risk = _count(data, "at_risk")
    ledger._skipped = {_cause("skipped", cause): _count(_object(data, "skipped"), cause) for cause in _object(data, "skipped")}
    ledger._skipped_names = _names(_object(data, "skipped_names"), ledger.next_ordinal)
    ledger._last_commit = _commit(data)
    _fill_window(ledger, frontier, _get(data, "window"))
    try:
        ledger.check()
    except LedgerError as err:
        raise LedgerFormatError("window", str(err)) from err
    return ledger


def resume_in_flight(ledger: Ledger) -> None:
    """A new life: what was being answered is pending (still handed out, to be answered again)."""
    for entry in ledger._live.values():
        if entry.state is State.IN_FLIGHT:
            entry.state = State.PENDING
    ledger._states[State.PENDING] += ledger._states[State.IN_FLIGHT]
    ledger._states[State.IN_FLIGHT] = 0


# ---- the window's text ------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    token: str
    length: int


def _window_to_text(frontier: int, next_ordinal: int, live: Mapping[int, Entry]) -> str:
    runs: list[_Run] = []

    def add(token: str, length: int) -> None:
        if runs and runs[-1].token == token:
            runs[-1].length += length
        else:
            runs.append(_Run(token, length))

    at = frontier
    for ordinal in sorted(live):
        if ordinal > at:
            add(_DONE, ordinal - at)
        entry = live[ordinal]
        letter = _LETTERS[entry.state]
        add((letter.upper() if entry.owed else letter) + (f":{entry.failures}" if entry.failures else ""), 1)
        at = ordinal + 1
    if next_ordinal > at:
        add(_DONE, next_ordinal - at)
    return ",".join(run.token if run.length == 1 else f"{run.length}{run.token}" for run in runs)


def _fill_window(ledger: Ledger, frontier: int, text: Any) -> None:
    if not isinstance(text, str):
        raise LedgerFormatError("window", f"expected text, found {type(text).__name__}")
    at, above = frontier, list[range]()
    for token in text.split(",") if text else []:
        match = _RUN.fullmatch(token)
        if match is None:
            raise LedgerFormatError("window", f"{token!r} is not a run")
        length = int(match[1] or 1)
        if at + length > ledger.next_ordinal or at + length - frontier > LONGEST_WINDOW:
            raise LedgerFormatError("window", f"it goes on to ordinal {at + length}, next_ordinal is {ledger.next_ordinal}")
        if match[2] == _DONE:
            if at == frontier:
                raise LedgerFormatError("window", f"the frontier {frontier} itself is done")
            above.append(range(at, at + length))
        else:
            state = _STATES[match[2].lower()]
            ledger._states[state] += length
            for ordinal in range(at, at + length):
                ledger._live[ordinal] = Entry(state, int(match[3] or 0), match[2].isupper())
        at += length
    if at != ledger.next_ordinal:
        raise LedgerFormatError("window", f"it ends at ordinal {at}, next_ordinal is {ledger.next_ordinal}")
    ledger._done = DoneSet(frontier, (ordinal for part in above for ordinal in part))


# ---- fields -----------------------------------------------------------------------------------


def _get(data: Mapping[str, Any], field: str) -> Any:
    if field not in data:
        raise LedgerFormatError(field, "is missing")
    return data[field]


def _count(data: Mapping[str, Any], field: str) -> int:
    value = _get(data, field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise LedgerFormatError(field, f"{value!r} is not a count")
    return value


def _object(data: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = _get(data, field)
    if not isinstance(value, Mapping):
        raise LedgerFormatError(field, f"expected an object, found {type(value).__name__}")
    return value


def _cause(field: str, name: str) -> str:
    if name not in SkipCause:
        raise LedgerFormatError(field, f"{name!r} is not a cause; there are {', '.join(SkipCause)}")
    return name


def _names(saved: Mapping[str, Any], next_ordinal: int) -> dict[str, list[int]]:
    names = {}
    for cause, differences in saved.items():
        if not isinstance(differences, list) or not all(type(d) is int for d in differences):
            raise LedgerFormatError("skipped_names", f"{cause}: expected a list of numbers")
        names[_cause("skipped_names", cause)] = list(accumulate(differences))
        if any(not 0 <= ordinal < next_ordinal for ordinal in names[cause]):
            raise LedgerFormatError("skipped_names", f"{cause} names a prompt that was never handed out")
    return names


def _differences(names: list[int]) -> list[int]:
    return names[:1] + [after - before for before, after in pairwise(names)]


def _commit(data: Mapping[str, Any]) -> Commit | None:
    if _get(data, "last_commit") is None:
        return None
    saved = _object(data, "last_commit")
    digest = _get(saved, "digest")
    if not isinstance(digest, str):
        raise LedgerFormatError("last_commit", f"digest {digest!r} is not text")
    return Commit(_count(saved, "step"), _count(saved, "count"), digest)
