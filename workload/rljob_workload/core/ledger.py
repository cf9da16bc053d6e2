"""The prompt ledger: where every prompt of a run stands, at every moment.

A prompt gets its ordinal when it is pulled from the source and keeps it for ever. The ledger holds one entry per *live*
ordinal, a compact set of the finished ones, and counters. Every move between two states goes through a method here and
is refused when it is not legal, so that a bookkeeping mistake stops the run at the mistake instead of showing up as a
prompt that was trained twice or forgotten.

The partition that holds at every moment::

    handed_out = trained + filtered + training + buffered + in_flight + pending + retryable + skipped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LEDGER_VERSION = 1
#: Ordinals remembered by name per cause; the counts beside them stay exact.
NAMED_PER_CAUSE = 100


class State(StrEnum):
    """Where a live ordinal stands."""

    PENDING = "pending"
    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    TRAINING = "training"
    RETRYABLE = "retryable"


class SkipCause(StrEnum):
    """Why a prompt will never be trained."""

    RETRY_BUDGET_EXHAUSTED = "RetryBudgetExhausted"
    SOURCE_CHANGED = "SourceChanged"
    PROMPT_TOO_LONG = "PromptTooLong"
    BAD_ROW = "BadRow"


class LedgerError(Exception):
    """A refused transition, or a saved ledger that cannot be read."""


@dataclass(slots=True)
class Entry:
    """One live ordinal."""

    state: State
    failures: int = 0


@dataclass(slots=True)
class Counts:
    """The ledger in numbers (one snapshot)."""

    handed_out: int = 0
    trained: int = 0
    filtered: int = 0
    training: int = 0
    buffered: int = 0
    in_flight: int = 0
    pending: int = 0
    retryable: int = 0
    skipped: int = 0
    skipped_by: dict[str, int] = field(default_factory=dict)

    @property
    def live(self) -> int:
        """Prompts that were handed out and are not done."""
        return self.training + self.buffered + self.in_flight + self.pending + self.retryable


class DoneSet:
    """Finished ordinals: everything below the frontier, and a sparse set above it."""

    __slots__ = ("_above", "frontier")

    def __init__(self, frontier: int = 0, above: Iterable[int] = ()) -> None:
        self.frontier = frontier
        self._above = set(above)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal < self.frontier or ordinal in self._above

    def __len__(self) -> int:
        return self.frontier + len(self._above)

    def add(self, ordinal: int) -> None:
        """Mark one ordinal as done and advance the frontier over what became contiguous."""
        if ordinal in self:
            raise LedgerError(f"prompt {ordinal} is already done")
        self._above.add(ordinal)
        while self.frontier in self._above:
            self._above.discard(self.frontier)
            self.frontier += 1

    def ranges(self) -> list[list[int]]:
        """The ordinals above the frontier as inclusive ranges."""
        return to_ranges(sorted(self._above))


class Ledger:
    """States of all prompts of a run. All transitions are O(1) per ordinal."""

    def __init__(self) -> None:
        self._live: dict[int, Entry] = {}
        self._done = DoneSet()
        self._states: dict[State, int] = dict.fromkeys(State, 0)
        self._trained = 0
        self._filtered = 0
        self._skipped: dict[str, int] = {}
        self._skipped_names: dict[str, list[int]] = {}
        self._last_commit: tuple[int, frozenset[int]] | None = None
        self.next_ordinal = 0

    # ---- reading ----------------------------------------------------------------------------

    @property
    def frontier(self) -> int:
        """Every ordinal below it is trained, filtered or skipped."""
        return self._done.frontier

    @property
    def trained(self) -> int:
        """Prompts whose training step was committed."""
        return self._trained

    def state_of(self, ordinal: int) -> State | None:
        """The state of a live ordinal; None when it is done or was never handed out."""
        entry = self._live.get(ordinal)
        return entry.state if entry else None

    def is_done(self, ordinal: int) -> bool:
        """Whether the ordinal was trained, filtered or skipped."""
        return ordinal in self._done

    def failures_of(self, ordinal: int) -> int:
        """Failed tries of a live ordinal."""
        return self._entry(ordinal).failures

    def in_state(self, *states: State) -> list[int]:
        """Live ordinals in the given states, lowest first."""
        return sorted(ordinal for ordinal, entry in self._live.items() if entry.state in states)

    def counts(self) -> Counts:
        """All counters of this moment."""
        return Counts(
            handed_out=self.next_ordinal,
            trained=self._trained,
            filtered=self._filtered,
            training=self._states[State.TRAINING],
            buffered=self._states[State.BUFFERED],
            in_flight=self._states[State.IN_FLIGHT],
            pending=self._states[State.PENDING],
            retryable=self._states[State.RETRYABLE],
            skipped=sum(self._skipped.values()),
            skipped_by=dict(self._skipped),
        )

    def skipped_names(self) -> dict[str, list[int]]:
        """The first skipped ordinals of every cause."""
        return {cause: list(names) for cause, names in self._skipped_names.items()}

    def check(self) -> None:
        """Raise when the states do not add up, or disagree with the done set."""
        c = self.counts()
        done = c.trained + c.filtered + c.skipped
        if done + c.live != c.handed_out:
            raise LedgerError(f"the ledger does not add up: {c.handed_out} handed out, {done} done, {c.live} live")
        if len(self._done) != done:
            raise LedgerError(f"the done set holds {len(self._done)} prompts, the counters say {done}")
        if len(self._live) != c.live:
            raise LedgerError(f"{len(self._live)} live entries, the states say {c.live}")

    # ---- transitions ------------------------------------------------------------------------

    def hand_out(self) -> int:
        """Number the next prompt of the source."""
        ordinal = self.next_ordinal
        self.next_ordinal += 1
        self._live[ordinal] = Entry(State.PENDING)
        self._states[State.PENDING] += 1
        return ordinal

    def dispatch(self, ordinal: int) -> None:
        """The prompt's answers were asked for."""
        self._move(ordinal, State.IN_FLIGHT, (State.PENDING, State.RETRYABLE))

    def finish(self, ordinal: int) -> None:
        """All answers arrived and were scored."""
        self._move(ordinal, State.BUFFERED, (State.IN_FLIGHT,))

    def fail(self, ordinal: int) -> int:
        """The try failed or timed out; the prompt will be handed out again. Returns its failures so far."""
        entry = self._move(ordinal, State.RETRYABLE, (State.IN_FLIGHT,))
        entry.failures += 1
        return entry.failures

    def evict(self, ordinal: int) -> None:
        """The answers became too old (or cannot be restored): answer again, without using the retry budget."""
        self._move(ordinal, State.RETRYABLE, (State.BUFFERED, State.IN_FLIGHT))

    def take(self, ordinals: Sequence[int]) -> None:
        """Move finished groups into a training step: all of them, or none."""
        self._require_all(ordinals, State.BUFFERED, State.TRAINING)
        for ordinal in ordinals:
            self._move(ordinal, State.TRAINING, (State.BUFFERED,))

    def give_back(self, ordinals: Sequence[int]) -> None:
        """The training step did not happen: the groups are buffered again."""
        self._require_all(ordinals, State.TRAINING, State.BUFFERED)
        for ordinal in ordinals:
            self._move(ordinal, State.BUFFERED, (State.TRAINING,))

    def commit(self, step: int, ordinals: Sequence[int]) -> None:
        """The optimizer step has been taken. Repeating the last commit changes nothing."""
        asked = frozenset(ordinals)
        if len(asked) != len(ordinals):
            raise LedgerError(f"commit of step {step} names a prompt twice: {sorted(ordinals)}")
        if self._last_commit is not None and step <= self._last_commit[0]:
            if self._last_commit == (step, asked):
                return
            raise LedgerError(f"commit of step {step} after the commit of step {self._last_commit[0]}")
        self._require_all(ordinals, State.TRAINING, "trained")
        for ordinal in ordinals:
            self._finish_off(ordinal)
        self._trained += len(ordinals)
        self._last_commit = (step, asked)

    def filter(self, ordinal: int) -> None:
        """The algorithm's own rule rejected the answered prompt: a use, not a loss."""
        self._require_all((ordinal,), State.BUFFERED, "filtered")
        self._finish_off(ordinal)
        self._filtered += 1

    def skip(self, ordinal: int, cause: SkipCause) -> None:
        """The prompt will never be trained."""
        entry = self._entry(ordinal)
        if entry.state not in (State.PENDING, State.RETRYABLE):
            raise LedgerError(f"prompt {ordinal} cannot go from {entry.state} to skipped")
        self._finish_off(ordinal)
        self._skipped[cause] = self._skipped.get(cause, 0) + 1
        names = self._skipped_names.setdefault(cause, [])
        if len(names) < NAMED_PER_CAUSE:
            names.append(ordinal)

    # ---- saving -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The whole ledger; refused while a training step is open, because such a moment is neither before nor after it."""
        if self._states[State.TRAINING]:
            raise LedgerError(f"no snapshot between take and commit: {self.in_state(State.TRAINING)} are in training")
        last = self._last_commit
        return {
            "version": LEDGER_VERSION,
            "next_ordinal": self.next_ordinal,
            "frontier_ordinal": self._done.frontier,
            "done_above": self._done.ranges(),
            "trained": self._trained,
            "filtered": self._filtered,
            "skipped": dict(self._skipped),
            "skipped_names": self.skipped_names(),
            "live": {state: to_ranges(self.in_state(state)) for state in State if self._states[state]},
            "failures": {str(o): e.failures for o, e in sorted(self._live.items()) if e.failures},
            "last_commit": {"step": last[0], "ordinals": sorted(last[1])} if last else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """Rebuild a saved ledger. What was in flight is pending: handed out, and to be answered again."""
        if data.get("version") != LEDGER_VERSION:
            raise LedgerError(f"ledger version {data.get('version')!r} is not {LEDGER_VERSION}, which this build reads")
        self = cls()
        try:
            self.next_ordinal = int(data["next_ordinal"])
            self._done = DoneSet(int(data["frontier_ordinal"]), from_ranges(data["done_above"]))
            self._trained = int(data["trained"])
            self._filtered = int(data["filtered"])
            self._skipped = {str(k): int(v) for k, v in data["skipped"].items()}
            self._skipped_names = {str(k): [int(o) for o in v] for k, v in data["skipped_names"].items()}
            last = data["last_commit"]
            self._last_commit = (int(last["step"]), frozenset(int(o) for o in last["ordinals"])) if last else None
            failures = {int(k): int(v) for k, v in data["failures"].items()}
            for name, ranges in data["live"].items():
                saved = State(name)
                state = State.PENDING if saved in (State.IN_FLIGHT, State.TRAINING) else saved
                for ordinal in from_ranges(ranges):
                    self._live[ordinal] = Entry(state, failures.get(ordinal, 0))
                    self._states[state] += 1
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise LedgerError(f"the saved ledger is malformed: {type(err).__name__}: {err}") from err
        self.check()
        return self

    # ---- internals --------------------------------------------------------------------------

    def _entry(self, ordinal: int) -> Entry:
        entry = self._live.get(ordinal)
        if entry is None:
            where = "done" if ordinal in self._done else "never handed out"
            raise LedgerError(f"prompt {ordinal} is not live ({where})")
        return entry

    def _move(self, ordinal: int, to: State, allowed: tuple[State, ...]) -> Entry:
        entry = self._entry(ordinal)
        if entry.state not in allowed:
            raise LedgerError(f"prompt {ordinal} cannot go from {entry.state} to {to}")
        self._states[entry.state] -= 1
        self._states[to] += 1
        entry.state = to
        return entry

    def _require_all(self, ordinals: Sequence[int], state: State, to: str) -> None:
        if len(set(ordinals)) != len(ordinals):
            raise LedgerError(f"a prompt is named twice: {sorted(ordinals)}")
        for ordinal in ordinals:
            entry = self._entry(ordinal)
            if entry.state is not state:
                raise LedgerError(f"prompt {ordinal} cannot go from {entry.state} to {to}")

    def _finish_off(self, ordinal: int) -> None:
        self._states[self._live.pop(ordinal).state] -= 1
        self._done.add(ordinal)


def to_ranges(ordinals: Sequence[int]) -> list[list[int]]:
    """Sorted ordinals as inclusive ranges: [3, 4, 5, 9] -> [[3, 5], [9, 9]]."""
    ranges: list[list[int]] = []
    for ordinal in ordinals:
        if ranges and ranges[-1][1] == ordinal - 1:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return ranges


def from_ranges(ranges: Iterable[Sequence[int]]) -> list[int]:
    """The inverse of `to_ranges`."""
    return [ordinal for first, last in ranges for ordinal in range(int(first), int(last) + 1)]
