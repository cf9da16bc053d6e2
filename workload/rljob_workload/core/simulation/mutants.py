"""Bookkeeping mistakes on purpose: each of them has to be caught by the auditor, or the proof proves nothing.

A mutant replaces one method of the core for the length of a run. Most keep the ledger's own sums intact, so that its checks
see nothing: it is the auditor that has to. All but the first two and those of withdrawals are mistakes that real systems have
shipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rljob_workload.algorithm.batch import Answer
from rljob_workload.core import resume, rollouts
from rljob_workload.core.groups import FinishedGroup, Group
from rljob_workload.core.ledger import DoneSet, Entry, Ledger, SkipCause, State
from rljob_workload.core.replayable import ReplayableSource
from rljob_workload.core.rollouts import Rollouts
from rljob_workload.core.source import Source
from rljob_workload.core.window import Window


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: which attribute of what is replaced by what."""

    name: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    #: The source with which it shows.
    source: str = "seekable"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The core with this mistake."""
        original = self.owner.__dict__[self.attribute]
        setattr(self.owner, self.attribute, self.make(original))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


def _horizon_off_by_one(original: Any) -> Any:
    def restore(self: ReplayableSource, saved: Any, next_ordinal: int, live: Any) -> None:
        original(self, saved, next_ordinal, live)
        if not self._handout:
            self._fetch()
        self._handout.popleft()  # the first row beyond the horizon is dropped on arrival, too

    return restore


def _commit_not_idempotent(original: Any) -> Any:
    def commit(self: Ledger, step: int, ordinals: Sequence[int]) -> bool:
        again = not original(self, step, ordinals)
        if again:  # counted twice, with the number of prompts made to fit
            self._trained += len(ordinals)
            self.next_ordinal += len(ordinals)
            self._done = DoneSet(self._done.frontier + len(ordinals), (o + len(ordinals) for o in self._done._above))
        return not again

    return commit


def _retry_forgotten(original: Any) -> Any:
    def failed(self: Rollouts, group: Group) -> SkipCause | None:
        cause: SkipCause | None = original(self, group)
        if cause is None and group.ordinal in self._waiting:
            self._waiting.remove(group.ordinal)
            self.ledger.dispatch(group.ordinal)
            self.ledger.finish(group.ordinal)
            self.ledger.filter(group.ordinal)
            self._done(group.ordinal)
        return cause

    return failed


def _retry_never_dispatched(original: Any) -> Any:
    def failed(self: Rollouts, group: Group) -> SkipCause | None:
        cause: SkipCause | None = original(self, group)
        if cause is None and group.ordinal in self._waiting:
            self._waiting.remove(group.ordinal)
        return cause

    return failed


def _in_flight_taken_for_done(original: Any) -> Any:
    def resume_in_flight(ledger: Ledger) -> None:
        for ordinal in ledger.in_state(State.IN_FLIGHT):
            ledger._finish_off(ordinal)
            ledger._filtered += 1

    return resume_in_flight


def _done_set_forgotten(original: Any) -> Any:
    def ledger_from_json(data: Any) -> Ledger:
        ledger: Ledger = original(data)
        for ordinal in sorted(ledger._done._above):
            ledger._live[ordinal] = Entry(State.PENDING)
            ledger._states[State.PENDING] += 1
            ledger._trained -= 1
        ledger._done = DoneSet(ledger._done.frontier)
        return ledger

    return ledger_from_json


def _frontier_from_the_step_counter(original: Any) -> Any:
    def ledger_to_json(ledger: Ledger) -> dict[str, Any]:
        data: dict[str, Any] = original(ledger)
        frontier = max(ledger._trained, ledger.frontier)  # as many as were trained are taken to be the first ones
        live = ledger.next_ordinal - frontier
        trained = frontier - ledger._filtered - sum(ledger._skipped.values())
        return (
            data | {"frontier_ordinal": frontier, "window": f"{live}i" if live else "", "trained": trained}
            if trained >= 0
            else data
        )

    return ledger_to_json


def _eviction_drops_the_prompt(original: Any) -> Any:
    def _evict(self: Rollouts, ordinal: int) -> None:
        self.ledger.filter(ordinal)
        self._done(ordinal)

    return _evict


def _handout_tail_dropped(original: Any) -> Any:
    def restore(self: ReplayableSource, saved: Any, next_ordinal: int, live: Any) -> None:
        original(self, saved, next_ordinal, live)
        self._handout.clear()  # the resume goes on with a fresh handout

    return restore


def _epoch_tail_dropped(original: Any) -> Any:
    def _try_handout(self: ReplayableSource) -> Sequence[Any]:
        handout: Sequence[Any] = original(self)
        whole: int = getattr(self._loader, "_batch", 1)
        if self._offset and 0 < len(handout) < whole:
            self._offset += len(handout)
            handout = original(self)
        return handout

    return _try_handout


def _snapshot_within_a_step(original: Any) -> Any:
    def snapshot(ledger: Ledger, source: Source, buffer: Iterable[FinishedGroup]) -> dict[str, Any]:
        training = ledger.in_state(State.TRAINING)
        for ordinal in training:  # taken to be trained already
            ledger._live[ordinal].state = State.IN_FLIGHT
            ledger._states[State.TRAINING] -= 1
            ledger._states[State.IN_FLIGHT] += 1
        saved: dict[str, Any] = original(ledger, source, buffer)
        for ordinal in training:
            ledger._live[ordinal].state = State.TRAINING
            ledger._states[State.TRAINING] += 1
            ledger._states[State.IN_FLIGHT] -= 1
        return saved

    return snapshot


def _failures_not_saved(original: Any) -> Any:
    def ledger_from_json(data: Any) -> Ledger:
        ledger: Ledger = original(data)
        for entry in ledger._live.values():
            entry.failures = 0
        return ledger

    return ledger_from_json


def _late_answers_taken(original: Any) -> Any:
    def arrive(self: Rollouts, answers: Iterable[Answer]) -> list[Group]:
        complete = []
        for answer in answers:
            group = self._open.get(answer.tag[0])
            if group is None:
                continue
            group.answers.append(answer)
            if len(group.answers) == self._settings.group_size:
                complete.append(group)
        return complete

    return arrive


def _buffer_answered_again(original: Any) -> Any:
    def _restore_buffer(ledger: Ledger, saved: Any, window: Any, rules: Any) -> dict[int, FinishedGroup]:
        usable: dict[int, FinishedGroup] = original(ledger, saved, window, rules)
        for ordinal in usable:
            ledger.reopen(ordinal)
        return {}

    return _restore_buffer


def _age_limit_off_by_one(original: Any) -> Any:
    def too_old(self: Any, first_version: int, version: int) -> bool:
        return bool(version - first_version > self.max_age + 1)

    return too_old


def _withdrawn_try_left_in_flight(original: Any) -> Any:
    def withdraw(self: Rollouts, group: Group) -> None:
        """Nothing happens."""

    return withdraw


def _withdrawn_prompt_in_two_places(original: Any) -> Any:
    def withdraw(self: Rollouts, group: Group) -> None:
        if self.is_open(group):  # the group stays open
            self.ledger.reopen(group.ordinal)
            heapq.heappush(self._waiting, group.ordinal)

    return withdraw


def _withdrawal_counted_as_a_failure(original: Any) -> Any:
    def withdraw(self: Rollouts, group: Group) -> None:
        original(self, group)
        self.ledger._live[group.ordinal].failures += 1

    return withdraw


def _withdrawn_prompt_dropped(original: Any) -> Any:
    def withdraw(self: Rollouts, group: Group) -> None:
        if self.is_open(group):
            original(self, group)
            self._waiting.remove(group.ordinal)
            heapq.heapify(self._waiting)

    return withdraw


def _withdrawal_forgives_failures(original: Any) -> Any:
    def withdraw(self: Rollouts, group: Group) -> None:
        original(self, group)
        self.ledger._live[group.ordinal].failures = 0

    return withdraw


def _withdrawn_try_and_the_next_alike(original: Any) -> Any:
    def withdraw(self: Rollouts, group: Group) -> None:
        original(self, group)
        self._tries[group.ordinal] -= 1

    return withdraw


MUTANTS = (
    Mutant("horizon off by one", ReplayableSource, "restore", _horizon_off_by_one, "replayable"),
    Mutant("commit not idempotent", Ledger, "commit", _commit_not_idempotent),
    Mutant("failed prompt counted as filtered", Rollouts, "failed", _retry_forgotten),
    Mutant("failed prompt never dispatched again", Rollouts, "failed", _retry_never_dispatched),
    Mutant("in flight at the save taken for done", resume, "resume_in_flight", _in_flight_taken_for_done),
    Mutant("done set above the frontier forgotten", resume, "ledger_from_json", _done_set_forgotten),
    Mutant("frontier from the step counter", resume, "ledger_to_json", _frontier_from_the_step_counter),
    Mutant("eviction drops the prompt", Rollouts, "_evict", _eviction_drops_the_prompt),
    Mutant("tail of a handout dropped on resume", ReplayableSource, "restore", _handout_tail_dropped, "replayable"),
    Mutant("tail of an epoch dropped", ReplayableSource, "_try_handout", _epoch_tail_dropped, "replayable"),
    Mutant("save within a step", rollouts, "snapshot", _snapshot_within_a_step),
    Mutant("retry counts not saved", resume, "ledger_from_json", _failures_not_saved),
    Mutant("late answers of a failed try taken", Rollouts, "arrive", _late_answers_taken),
    Mutant("withdrawn try left in flight", Rollouts, "withdraw", _withdrawn_try_left_in_flight),
    Mutant("withdrawn prompt in flight and waiting", Rollouts, "withdraw", _withdrawn_prompt_in_two_places),
    Mutant("withdrawal counted as a failed try", Rollouts, "withdraw", _withdrawal_counted_as_a_failure),
    Mutant("withdrawn prompt never dispatched again", Rollouts, "withdraw", _withdrawn_prompt_dropped),
    Mutant("withdrawal forgets the failed tries", Rollouts, "withdraw", _withdrawal_forgives_failures),
    Mutant("answers of a withdrawn try taken for the next one's", Rollouts, "withdraw", _withdrawn_try_and_the_next_alike),
    Mutant("restored buffer answered again", resume, "_restore_buffer", _buffer_answered_again),
    Mutant("age limit off by one", Window, "too_old", _age_limit_off_by_one),
)
