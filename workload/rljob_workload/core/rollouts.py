"""Prompts out, answers in, batches out: the collector's bookkeeping without its processes.

Answers of a group come in any order and over several policy versions. A step takes the oldest finished groups and none that
is older than `max_age` versions, counted from its first token. Before the version changes under a group that would be too old
then, the step waits for it (its answer deadline bounds the wait and counts as a failure): what has been generated is never
thrown away for its age, and no prompt is lost for being slow. Between two resumes at most a step's groups reach the limit
together, since the window holds `max_age + 1` steps' prompts. Groups that a resume finds too old (the limit or the size of a
step was lowered) are evicted: answered again, without using the retry budget, and *owed* from then on, which is to say first
in their turn.

Groups whose answers all have the same reward teach nothing and are filtered: a use, not a loss. At most
`filters_per_step` of them between two steps; further ones are trained, so that a policy which has nothing left to learn
still finishes its steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rljob_workload.algorithm.advantages import group_advantages
from rljob_workload.algorithm.batch import Answer, Request, TrainBatch, TrainRow
from rljob_workload.core.groups import FinishedGroup, Group, Scored, StepInfo, step_info
from rljob_workload.core.ledger import Ledger, LedgerError, SkipCause
from rljob_workload.core.resume import RestoreReport, ResumeRules, RolloutError, restore, snapshot
from rljob_workload.core.source import BadRow, Source, SourceError
from rljob_workload.core.window import Window

__all__ = [
    "FinishedGroup",
    "Group",
    "RestoreReport",
    "RolloutError",
    "RolloutSettings",
    "Rollouts",
    "Scored",
    "StepInfo",
    "Verdict",
]

#: New prompts in a row that cannot be used before the source is given up.
MOST_UNUSABLE = 100_000


#: Told of every prompt that is given up: its ordinal, the cause, and the cause's particulars.
SkipListener = Callable[[int, SkipCause, str], None]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Sizes of the collection."""

    group_size: int
    in_flight_limit: int
    longest_prompt: int
    answer_timeout: float
    retry_budget: int
    #: Zero-variance groups that may be filtered between two steps; 0 trains them all.
    filters_per_step: int = 0
    #: Whether a group's time begins with its dispatch; else `set_deadline` says when it must be there.
    timed_from_dispatch: bool = True
    #: Whether a step waits for the groups that the next one would find too old. Only simulations of other trainers do not:
    #: there these are evicted, and only those that were evicted before are waited for.
    waits: bool = True


class Verdict(StrEnum):
    """What became of a group that was judged."""

    BUFFERED = "buffered"
    FILTERED = "filtered"
    #: Too old on arrival: it is answered again.
    EVICTED = "evicted"
    #: Of a try that had been given up.
    LATE = "late"


class Rollouts:
    """All prompts of a run that are not done."""

    def __init__(self, source: Source, window: Window, settings: RolloutSettings, on_skip: SkipListener | None = None) -> None:
        self.ledger = Ledger()
        self._on_skip = on_skip
        self._source = source
        self._window = window
        self._settings = settings
        self._open: dict[int, Group] = {}
        self._buffer: dict[int, FinishedGroup] = {}
        self._training: dict[int, FinishedGroup] = {}
        self._filtered: list[FinishedGroup] = []
        #: Ordinals to be answered (again), lowest first: the one that holds the frontier back comes first.
        self._waiting: list[int] = []
        self._tries: dict[int, int] = {}
        self._version = 0
        #: The newest step that groups were taken for; its weights have the same number.
        self._step = 0

    # ---- prompts out ------------------------------------------------------------------------

    def dispatch(self, version: int, now: float, limit: int | None = None) -> list[Request]:
        """The prompts to be answered next: first those that wait already, then new ones within the window."""
        self._settle(version)
        slots = self._settings.in_flight_limit - len(self._open)
        slots = slots if limit is None else min(slots, limit)
        requests: list[Request] = []
        unusable = 0
        while len(requests) < slots:
            ordinal: int | None
            if self._waiting:
                ordinal = heapq.heappop(self._waiting)
            elif self._room(version) > 0:
                ordinal = self._hand_out()
            else:
                break
            if ordinal is None or not self._fits(ordinal):
                unusable += 1
                if unusable > MOST_UNUSABLE:
                    raise SourceError(f"{unusable} prompts in a row cannot be used: {self.ledger.counts().skipped_by}")
                continue
            requests.append(self._open_group(ordinal, version, now))
        return requests

    def can_dispatch(self, version: int) -> bool:
        """Whether there is a prompt for the next free slot."""
        self._settle(version)
        return bool(self._waiting) or self._room(version) > 0

    def can_dispatch_now(self, version: int) -> bool:
        """Whether there is a prompt, and a free slot for it."""
        return len(self._open) < self._settings.in_flight_limit and self.can_dispatch(version)

    def exhausted(self, version: int) -> bool:
        """Whether every prompt of the run's last steps is being answered or finished: nothing will be handed out any more."""
        return not self._waiting and self._window.exhausted(self._undone(version), version)

    def _room(self, version: int) -> int:
        return self._window.room(self._undone(version), version)

    def _undone(self, version: int) -> int:
        """Prompts that take room, once there are these weights: those that the step towards them trains are done by then.

        So the next prompts can be asked for while that step is under way. Nothing of it is ever saved: there is no snapshot
        before its commit.
        """
        return self.ledger.undone - (self.ledger.training if version >= self._step else 0)

    def _hand_out(self) -> int | None:
        """Number the source's next row; None when it is none that can be answered."""
        row = self._source.pull()
        ordinal = self.ledger.hand_out()
        if self._source.next_ordinal != self.ledger.next_ordinal:
            raise LedgerError(f"prompt {ordinal} is number {self._source.next_ordinal - 1} of the source")
        if isinstance(row, BadRow):
            self._skip(ordinal, SkipCause.BAD_ROW, row.reason)
            return None
        return ordinal

    def _fits(self, ordinal: int) -> bool:
        length, most = len(self._source.row(ordinal).tokens), self._settings.longest_prompt
        if length > most:
            self._skip(ordinal, SkipCause.PROMPT_TOO_LONG, f"{length} tokens, at most {most} leave room for an answer")
        return length <= most

    def _open_group(self, ordinal: int, version: int, now: float) -> Request:
        self.ledger.dispatch(ordinal)
        attempt = self._tries.get(ordinal, -1) + 1
        self._tries[ordinal] = attempt
        deadline = now + self._settings.answer_timeout if self._settings.timed_from_dispatch else math.inf
        self._open[ordinal] = Group(ordinal, attempt, version, now, deadline)
        return Request((ordinal, attempt), self._source.row(ordinal).tokens, self._settings.group_size)

    # ---- answers in -------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Groups being answered or scored."""
        return len(self._open)

    def expected(self, ordinal: int) -> str:
        """What the data set says about an ordinal's answer."""
        return self._source.row(ordinal).expected

    def arrive(self, answers: Iterable[Answer]) -> list[Group]:
        """Take in answers; returns the groups that are complete and want scores. Answers of a failed try are dropped."""
        complete = []
        for answer in answers:
            group = self._open.get(answer.tag[0])
            if group is None or group.attempt != answer.tag[1]:
                continue
            group.answers.append(answer)
            if len(group.answers) == self._settings.group_size:
                complete.append(group)
        return complete

    def in_flight_soon(self, version: int) -> int:
        """Groups in flight once everything that may be dispatched now has been."""
        more = len(self._waiting) + self._room(version)
        return min(self._settings.in_flight_limit, self.in_flight + more)

    def is_open_tag(self, tag: tuple[int, int]) -> bool:
        """Whether this try of this prompt is still waited for."""
        group = self._open.get(tag[0])
        return group is not None and group.attempt == tag[1]

    def group_of(self, tag: tuple[int, int]) -> Group | None:
        """The group of this try, while it is waited for."""
        group = self._open.get(tag[0])
        return group if group is not None and group.attempt == tag[1] else None

    def is_open(self, group: Group) -> bool:
        """Whether this very try is still waited for."""
        return self._open.get(group.ordinal) is group

    def scored(self, group: Group, scores: Sequence[tuple[float, bool]]) -> Verdict:
        """The group's answers were judged: it may be trained, or is filtered, or came too late."""
        if not self.is_open(group):
            return Verdict.LATE
        del self._open[group.ordinal]
        answers = [Scored(answer, *score) for answer, score in zip(group.answers, scores, strict=True)]
        finished = FinishedGroup.of(group.ordinal, answers)
        self.ledger.finish(group.ordinal)
        if self._window.too_old(finished.first_version, self._version):
            self._evict(group.ordinal)
            return Verdict.EVICTED
        if not finished.teaches and len(self._filtered) < self._settings.filters_per_step:
            self.ledger.filter(group.ordinal)
            self._done(group.ordinal)
            self._filtered.append(finished)
            return Verdict.FILTERED
        self._buffer[group.ordinal] = finished
        return Verdict.BUFFERED

    def failed(self, group: Group) -> SkipCause | None:
        """This try is lost: answer the prompt again, or skip it when the retry budget is used up."""
        if not self.is_open(group):
            return None
        del self._open[group.ordinal]
        failures = self.ledger.fail(group.ordinal)
        if failures > self._settings.retry_budget:
            self._skip(group.ordinal, SkipCause.RETRY_BUDGET_EXHAUSTED, f"{failures} tries failed")
            return SkipCause.RETRY_BUDGET_EXHAUSTED
        heapq.heappush(self._waiting, group.ordinal)
        return None

    def withdraw(self, group: Group) -> None:
        """This try is lost by no fault of its prompt: answer it again, without using the retry budget."""
        if self.is_open(group):
            del self._open[group.ordinal]
            self.ledger.reopen(group.ordinal)
            heapq.heappush(self._waiting, group.ordinal)

    def set_deadline(self, tag: tuple[int, int], deadline: float) -> None:
        """When this try must be there; infinity: nobody is at it. Nothing happens where it is waited for no longer."""
        if (group := self.group_of(tag)) is not None:
            group.deadline = deadline

    def first_deadline(self) -> float | None:
        """Of the groups that somebody is at."""
        first = min((group.deadline for group in self._open.values()), default=math.inf)
        return None if first == math.inf else first

    def overdue(self, now: float) -> list[Group]:
        """Groups whose answers did not all come in time."""
        return [group for group in self._open.values() if now > group.deadline]

    def oldest_in_flight(self, count: int = 3) -> list[Group]:
        """The groups that are waited for longest (for stall reports)."""
        return heapq.nsmallest(count, self._open.values(), key=lambda group: group.begun)

    # ---- batches out ------------------------------------------------------------------------

    def missing(self, version: int) -> int:
        """Groups that the next step still waits for."""
        self._settle(version)
        short = self._window.prompts_per_step - len(self._buffer)
        return max(0, short, sum(self._waits_for(group, version) for group in self._open.values()))

    def _waits_for(self, group: Group, version: int) -> bool:
        at_its_limit = self._window.at_its_limit(group.dispatched_version, version)
        return at_its_limit and (self._settings.waits or self.ledger.is_owed(group.ordinal))

    def take(self, step: int, version: int) -> tuple[TrainBatch, StepInfo] | None:
        """The oldest finished groups as one training step; None while it has to wait."""
        if self.missing(version):
            return None
        groups = heapq.nsmallest(self._window.prompts_per_step, self._buffer.values(), key=self._order)
        ordinals = tuple(group.ordinal for group in groups)
        self.ledger.take(ordinals)
        self._step = step
        self._training = {ordinal: self._buffer.pop(ordinal) for ordinal in ordinals}
        filtered, self._filtered = self._filtered, []
        # Filtered groups have no advantage, and the policy's loss is a mean over them too: dropping them from the mean
        # instead would weaken the entropy bonus, and a policy that has learnt most prompts would collapse.
        share = len(groups) / (len(groups) + len(filtered))
        rows = tuple(row for group in groups for row in self._rows(group, share, version))
        return TrainBatch(step, ordinals, rows), step_info(groups, version, filtered)

    def commit(self, step: int, ordinals: Sequence[int]) -> None:
        """The optimizer step over these prompts was taken. May be repeated."""
        if self.ledger.commit(step, ordinals):
            self._training = {}
            for ordinal in ordinals:
                self._done(ordinal)

    def give_back(self) -> None:
        """The training step did not happen: its groups are finished groups again."""
        self.ledger.give_back(list(self._training))
        self._buffer |= self._training
        self._training = {}

    def check(self) -> None:
        """Raise when the books do not add up, in the ledger or against the source."""
        self.ledger.check()
        if self._source.next_ordinal != self.ledger.next_ordinal:
            raise LedgerError(
                f"{self.ledger.next_ordinal} prompts are handed out, the source stands at {self._source.next_ordinal}"
            )

    def _order(self, group: FinishedGroup) -> tuple[int, bool, int]:
        return group.first_version, not self.ledger.is_owed(group.ordinal), group.ordinal

    def _rows(self, group: FinishedGroup, share: float, version: int) -> list[TrainRow]:
        row = self._source.row(group.ordinal).tokens
        advantages = group_advantages([scored.reward for scored in group.answers])
        rows = []
        for scored, advantage in zip(group.answers, advantages, strict=True):
            answer = scored.answer
            prompt = row if answer.prompt is None else answer.prompt
            length, current = len(prompt), answer.first_version == version
            spans = answer.spans and tuple((start + length, stop + length) for start, stop in answer.spans)
            rows.append(TrainRow(prompt + answer.tokens, length, answer.logprobs, advantage * share, current, spans))
        return rows

    def _settle(self, version: int) -> None:
        """The version has moved on: what became too old in the buffer is answered again."""
        if version <= self._version:
            return
        self._version = version
        for group in list(self._buffer.values()):
            if self._window.too_old(group.first_version, version):
                del self._buffer[group.ordinal]
                self._evict(group.ordinal)

    def _evict(self, ordinal: int) -> None:
        self.ledger.evict(ordinal)
        heapq.heappush(self._waiting, ordinal)

    def _skip(self, ordinal: int, cause: SkipCause, particulars: str) -> None:
        self.ledger.skip(ordinal, cause)
        self._done(ordinal)
        if self._on_skip:
            self._on_skip(ordinal, cause, particulars)

    def _done(self, ordinal: int) -> None:
        self._tries.pop(ordinal, None)
        self._source.release(ordinal)

    # ---- saving -----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Ledger, finished groups and the source's place, of one moment, as JSON. Refused while a step is open."""
        return snapshot(self.ledger, self._source, self._buffer.values())

    def restore(
        self,
        saved: Any,
        *,
        version: int | None = None,
        load_buffer: bool = True,
        restart_on_change: bool = False,
        trained_before: int = 0,
    ) -> RestoreReport:
        """Go on from a snapshot; the rules are `resume.restore`'s."""
        rules = ResumeRules(
            version=version,
            load_buffer=load_buffer,
            restart_on_change=restart_on_change,
            trained_before=trained_before,
            group_size=self._settings.group_size,
        )
        self._open, self._tries, self._training, self._filtered = {}, {}, {}, []
        self._version, self._step = version or 0, 0
        restored = restore(saved, self._source, self._window, rules)
        self.ledger, self._buffer, self._waiting = restored.ledger, restored.buffer, restored.waiting
        return restored.report
