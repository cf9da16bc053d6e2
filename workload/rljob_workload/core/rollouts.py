"""Prompts out, answers in, batches out: the collector's bookkeeping without its processes.

Answers of a group come in any order and over several policy versions. A step takes the oldest finished groups. Before the
version changes under a group that would become too old by it, the step waits for that group: so an answer is never trained
more than `max_age` versions after its first token, and no prompt is dropped for being slow (its answer deadline is what
ends it).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_workload.algorithm.advantages import group_advantages
from rljob_workload.algorithm.batch import Answer, Request, TrainBatch, TrainRow
from rljob_workload.core.ledger import Ledger, SkipCause, State
from rljob_workload.core.source import SeekableSource
from rljob_workload.core.window import Window


class RolloutError(Exception):
    """Saved collector state that does not belong to this job."""


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer with the environment's verdict."""

    answer: Answer
    reward: float
    correct: bool


@dataclass(slots=True)
class Group:
    """One prompt being answered."""

    ordinal: int
    attempt: int
    dispatched_version: int
    deadline: float
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """One prompt with all its answers, waiting to be trained."""

    ordinal: int
    answers: tuple[Scored, ...]

    @property
    def first_version(self) -> int:
        """The version that sampled the group's oldest token."""
        return min(scored.answer.first_version for scored in self.answers)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What went into one training step, in numbers."""

    reward: float
    correct: float
    samples: int
    answer_tokens: int
    #: Answers whose tokens come from more than one policy version.
    spanning: int
    #: Versions between a group's first token and this step: over the step's groups.
    oldest_age: int
    mean_age: float


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Sizes of the collection."""

    group_size: int
    in_flight_limit: int
    longest_prompt: int
    answer_timeout: float
    retry_budget: int


class Rollouts:
    """All prompts of a run that are not done."""

    def __init__(self, source: SeekableSource, window: Window, settings: RolloutSettings) -> None:
        self.ledger = Ledger()
        self._source = source
        self._window = window
        self._settings = settings
        self._open: dict[int, Group] = {}
        self._buffer: dict[int, FinishedGroup] = {}
        #: Ordinals to be answered (again), lowest first.
        self._waiting: list[int] = []

    # ---- prompts out ------------------------------------------------------------------------

    def dispatch(self, version: int, now: float, limit: int | None = None) -> list[Request]:
        """The prompts to be answered next: first those that wait already, then new ones within the window."""
        slots = self._settings.in_flight_limit - len(self._open)
        slots = slots if limit is None else min(slots, limit)
        room = self._window.room(self.ledger.counts(), version)
        requests: list[Request] = []
        while len(requests) < slots:
            if self._waiting:
                ordinal = heapq.heappop(self._waiting)
            elif room > 0:
                ordinal = self.ledger.hand_out()
                room -= 1
                if len(self._source.row(ordinal).tokens) > self._settings.longest_prompt:
                    self.ledger.skip(ordinal, SkipCause.PROMPT_TOO_LONG)
                    room += 1
                    continue
            else:
                break
            requests.append(self._open_group(ordinal, version, now))
        return requests

    def can_dispatch(self, version: int) -> bool:
        """Whether there is a prompt for the next free slot."""
        return bool(self._waiting) or self._window.room(self.ledger.counts(), version) > 0

    def can_dispatch_now(self, version: int) -> bool:
        """Whether there is a prompt, and a free slot for it."""
        return len(self._open) < self._settings.in_flight_limit and self.can_dispatch(version)

    def _open_group(self, ordinal: int, version: int, now: float) -> Request:
        self.ledger.dispatch(ordinal)
        attempt = self.ledger.failures_of(ordinal)
        self._open[ordinal] = Group(ordinal, attempt, version, now + self._settings.answer_timeout)
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

    def is_open(self, group: Group) -> bool:
        """Whether this very try is still waited for."""
        return self._open.get(group.ordinal) is group

    def scored(self, group: Group, scores: Sequence[tuple[float, bool]]) -> None:
        """The group's answers were judged: it may be trained."""
        if not self.is_open(group):
            return
        del self._open[group.ordinal]
        self.ledger.finish(group.ordinal)
        answers = tuple(Scored(a, *score) for a, score in zip(group.answers, scores, strict=True))
        self._buffer[group.ordinal] = FinishedGroup(group.ordinal, answers)

    def failed(self, group: Group) -> SkipCause | None:
        """This try is lost: answer the prompt again, or skip it when the retry budget is used up."""
        if not self.is_open(group):
            return None
        del self._open[group.ordinal]
        if self.ledger.fail(group.ordinal) > self._settings.retry_budget:
            self.ledger.skip(group.ordinal, SkipCause.RETRY_BUDGET_EXHAUSTED)
            return SkipCause.RETRY_BUDGET_EXHAUSTED
        heapq.heappush(self._waiting, group.ordinal)
        return None

    def overdue(self, now: float) -> list[Group]:
        """Groups whose answers did not all come in time."""
        return [group for group in self._open.values() if now > group.deadline]

    def oldest_in_flight(self, count: int = 3) -> list[Group]:
        """The groups that are waited for longest (for stall reports)."""
        return heapq.nsmallest(count, self._open.values(), key=lambda group: group.deadline)

    # ---- batches out ------------------------------------------------------------------------

    def missing(self, version: int) -> int:
        """Groups that the next step still waits for."""
        short = self._window.prompts_per_step - len(self._buffer)
        expiring = sum(version - group.dispatched_version >= self._window.max_age for group in self._open.values())
        return max(0, short, expiring)

    def take(self, step: int, version: int) -> tuple[TrainBatch, StepInfo] | None:
        """The oldest finished groups as one training step; None while it has to wait."""
        self._evict_too_old(version)
        if self.missing(version):
            return None
        oldest_first = sorted(self._buffer.values(), key=lambda group: (group.first_version, group.ordinal))
        groups = oldest_first[: self._window.prompts_per_step]
        ordinals = tuple(group.ordinal for group in groups)
        self.ledger.take(ordinals)
        for ordinal in ordinals:
            del self._buffer[ordinal]
        rows = tuple(row for group in groups for row in self._rows(group))
        return TrainBatch(step, ordinals, rows), _info(groups, version)

    def commit(self, step: int, ordinals: Sequence[int]) -> None:
        """The optimizer step over these prompts was taken."""
        self.ledger.commit(step, ordinals)

    def _rows(self, group: FinishedGroup) -> list[TrainRow]:
        prompt = self._source.row(group.ordinal).tokens
        advantages = group_advantages([scored.reward for scored in group.answers])
        return [
            TrainRow(prompt + scored.answer.tokens, len(prompt), scored.answer.logprobs, advantage)
            for scored, advantage in zip(group.answers, advantages, strict=True)
        ]

    def _evict_too_old(self, version: int) -> None:
        """Only restored groups can be too old here (the window may have shrunk since they were saved)."""
        for group in list(self._buffer.values()):
            if version - group.first_version > self._window.max_age:
                del self._buffer[group.ordinal]
                self.ledger.evict(group.ordinal)
                heapq.heappush(self._waiting, group.ordinal)

    # ---- saving -----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Ledger and finished groups of one moment, as JSON. Refused while a step is open."""
        return {
            "fingerprint": self._source.fingerprint(),
            "ledger": self.ledger.to_json(),
            "buffer": [_group_to_json(group) for group in self._buffer.values()],
        }

    def restore(self, saved: Mapping[str, Any]) -> RestoreReport:
        """Go on from a snapshot: finished groups are kept, everything else that was handed out is answered again."""
        if saved.get("fingerprint") != self._source.fingerprint():
            raise RolloutError(
                f"the data has changed since the checkpoint: fingerprint {self._source.fingerprint()}, "
                f"saved {saved.get('fingerprint')}; use the same spec.data, or another checkpoint directory"
            )
        self.ledger = Ledger.from_json(saved["ledger"])
        groups = {group.ordinal: group for group in map(_group_from_json, saved["buffer"])}
        for ordinal in self.ledger.in_state(State.BUFFERED):
            group = groups.get(ordinal)
            if group is not None and len(group.answers) == self._settings.group_size:
                self._buffer[ordinal] = group
            else:
                self.ledger.evict(ordinal)
        self._waiting = self.ledger.in_state(State.PENDING, State.RETRYABLE)  # sorted: a valid heap
        return RestoreReport(self.ledger.next_ordinal, len(self._buffer), list(self._waiting))


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a resume took over."""

    handed_out: int
    restored_groups: int
    rehanded: list[int]


def _info(groups: Sequence[FinishedGroup], version: int) -> StepInfo:
    scored = [s for group in groups for s in group.answers]
    ages = [version - group.first_version for group in groups]
    return StepInfo(
        reward=sum(s.reward for s in scored) / len(scored),
        correct=sum(s.correct for s in scored) / len(scored),
        samples=len(scored),
        answer_tokens=sum(len(s.answer.tokens) for s in scored),
        spanning=sum(s.answer.first_version != s.answer.last_version for s in scored),
        oldest_age=max(ages),
        mean_age=sum(ages) / len(ages),
    )


def _group_to_json(group: FinishedGroup) -> dict[str, Any]:
    return {
        "ordinal": group.ordinal,
        "attempt": group.answers[0].answer.tag[1],
        "answers": [
            {
                "tokens": s.answer.tokens,
                "logprobs": s.answer.logprobs,
                "versions": s.answer.versions,
                "reward": s.reward,
                "correct": s.correct,
            }
            for s in group.answers
        ],
    }


def _group_from_json(data: Mapping[str, Any]) -> FinishedGroup:
    tag = (int(data["ordinal"]), int(data["attempt"]))
    answers = []
    for saved in data["answers"]:
        versions = tuple((int(index), int(version)) for index, version in saved["versions"])
        answer = Answer(tag, tuple(saved["tokens"]), tuple(saved["logprobs"]), versions)
        answers.append(Scored(answer, float(saved["reward"]), bool(saved["correct"])))
    return FinishedGroup(tag[0], tuple(answers))
