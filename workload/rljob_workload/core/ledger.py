"""The prompt ledger: where every prompt of a run stands, at every moment.

A prompt gets its ordinal when it is pulled from the source and keeps it for ever. The ledger holds one entry per *live*
ordinal, a compact set of the finished ones, and counters. Every move between two states goes through a method here and
is refused when it is not legal, so that a bookkeeping mistake stops the run at the mistake instead of showing up as a
prompt that was trained twice or forgotten.

The partition that holds at every moment::

    handed_out = trained + filtered + training + buffered + in_flight + pending + retryable + skipped
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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
    """A refused transition, or books that do not add up."""


@dataclass(slots=True)
class Entry:
    """One live ordinal."""

    state: State
    failures: int = 0
    #: Was evicted for age once: of equally old groups it is trained first, so that it is not evicted again.
    owed: bool = False


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
    #: Outside the partition: upper bound of what was lost before a checkpoint without a ledger.
    at_risk: int = 0
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


@dataclass(frozen=True, slots=True)
class Commit:
    """The last committed step, small enough to keep: a repetition is recognised by its digest."""

    step: int
    count: int
    digest: str

    @classmethod
    def of(cls, step: int, ordinals: Iterable[int]) -> Commit:
        """The commit of these ordinals, in whatever order they are named."""
        ordered = sorted(ordinals)
        return cls(step, len(ordered), hashlib.blake2b(repr(ordered).encode(), digest_size=8).hexdigest())


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
        self._last_commit: Commit | None = None
        self.at_risk = 0
        self.next_ordinal = 0

    @classmethod
    def without_history(cls, trained: int, at_risk: int) -> Ledger:
        """Go on from a checkpoint that has no ledger: its trained prompts are taken to be the first ones."""
        self = cls()
        self._done = DoneSet(trained)
        self._trained = self.next_ordinal = trained
        self.at_risk = at_risk
        return self

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

    def is_owed(self, ordinal: int) -> bool:
        """Whether a live ordinal was evicted for age before."""
        return self._entry(ordinal).owed

    @property
    def undone(self) -> int:
        """How many ordinals are handed out and not done."""
        return len(self._live)

    @property
    def training(self) -> int:
        """How many ordinals are in a step that has not been committed."""
        return self._states[State.TRAINING]

    def live(self) -> list[int]:
        """All ordinals that are handed out and not done, lowest first."""
        return sorted(self._live)

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
            at_risk=self.at_risk,
            skipped_by=dict(self._skipped),
        )

    def skipped_names(self) -> dict[str, list[int]]:
        """The first skipped ordinals of every cause."""
        return {cause: list(names) for cause, names in self._skipped_names.items()}

    def check(self) -> None:
        """Raise when the states do not add up, or disagree with the done set."""
        done = self._trained + self._filtered + sum(self._skipped.values())
        live = sum(self._states.values())
        if done + live != self.next_ordinal:
            raise LedgerError(f"the ledger does not add up: {self.next_ordinal} handed out, {done} done, {live} live")
        if len(self._done) != done:
            raise LedgerError(f"the done set holds {len(self._done)} prompts, the counters say {done}")
        if len(self._live) != live:
            raise LedgerError(f"{len(self._live)} live entries, the states say {live}")

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
        """The answers became too old: answer again, without using the retry budget, and first in its turn."""
        self._move(ordinal, State.RETRYABLE, (State.BUFFERED, State.IN_FLIGHT)).owed = True

    def reopen(self, ordinal: int) -> None:
        """The answers cannot be used (not restored, of another group size, lost with their agent): answer again."""
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

    def commit(self, step: int, ordinals: Sequence[int]) -> bool:
        """The optimizer step has been taken. Repeating the last commit changes nothing and returns False."""
        commit = Commit.of(step, ordinals)
        if self._last_commit is not None and step <= self._last_commit.step:
            if self._last_commit == commit:
                return False
            raise LedgerError(f"commit of step {step} after the commit of step {self._last_commit.step}")
        self._require_all(ordinals, State.TRAINING, "trained")
        for ordinal in ordinals:
            self._finish_off(ordinal)
        self._trained += len(ordinals)
        self._last_commit = commit
        return True

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
