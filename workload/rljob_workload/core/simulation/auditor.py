"""Judges a run by what happened to it, not by what its books say.

The auditor is told which row was asked under which ordinal, what was answered, trained, saved and resumed. From this and the
lineage of the weights alone it recomputes what was lost and what was trained twice, and checks every step of the way: that
an ordinal is always the row that the stream has there, that nothing is asked while it is being answered or its answers are at
hand, that answers, failures and withdrawals are those of a try that was asked for and not given up, that a prompt is skipped
only for a cause that really holds, and that the ledger's own numbers agree. It imports nothing from the core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Asked:
    """Answers to a prompt were asked for."""

    ordinal: int
    row: int
    version: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt has all its answers: `size` of them, the oldest token sampled by `first_version`, all of one try or not."""

    ordinal: int
    size: int
    first_version: int
    equal_rewards: bool
    one_try: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """One try is lost."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """One try is given up by no fault of the prompt: it is none of those that the retry budget counts."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Answers are thrown away for their age."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class Filtered:
    """The algorithm rejected the answers."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """The prompt was given up."""

    ordinal: int
    cause: str


@dataclass(frozen=True, slots=True)
class Trained:
    """The weights were changed by these prompts."""

    step: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """Weights and books of this moment went into a checkpoint, which may or may not become visible."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A new life began from a checkpoint (None: from scratch), under these rules."""

    checkpoint: int | None
    version: int
    buffer: bool
    group_size: int
    max_age: int
    #: What the core says it will answer again; None where it says nothing (from scratch, or a rival's rule).
    rehanded: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Reported:
    """The ledger's counters, as shown to users."""

    handed_out: int
    trained: int
    filtered: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over; `live` as the ledger says. A stalled run waits for something that never comes."""

    live: int
    stalled: bool


Event = Asked | Answered | Failed | Withdrawn | Evicted | Filtered | Skipped | Trained | Saved | Resumed | Reported | Ended


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true of the data, whoever asks."""

    row_at: Callable[[int], int]
    too_long: Collection[int]
    unreadable: Collection[int]
    retry_budget: int


@dataclass(slots=True)
class Verdict:
    """What the auditor found."""

    lost: int = 0
    trained_twice: int = 0
    rolled_back_prompts: int = 0
    extra_answers: int = 0
    asked_again_after_crash: int = 0
    #: Tries that were given up by no fault of their prompt, rolled back ones too.
    withdrawn: int = 0
    violations: int = 0
    lost_ordinals: list[int] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)


class Lineage:
    """What happened to the weights and books that the newest life descends from."""

    def __init__(self) -> None:
        self.high = 0
        self.trained: Counter[int] = Counter()
        self.filtered: set[int] = set()
        self.skipped: dict[int, str] = {}
        self.answers: dict[int, Answered] = {}
        self.failures: Counter[int] = Counter()
        #: Prompts that were asked, and whose try has neither been answered nor given up. A new life begins without any.
        self.open: set[int] = set()

    def done(self, ordinal: int) -> bool:
        return ordinal in self.trained or ordinal in self.filtered or ordinal in self.skipped

    def undone(self) -> list[int]:
        return [ordinal for ordinal in range(self.high) if not self.done(ordinal)]

    def apply(self, event: Event) -> None:
        match event:
            case Asked(ordinal):
                self.high = max(self.high, ordinal + 1)
                self.open.add(ordinal)
            case Answered(ordinal):
                self.answers[ordinal] = event
                self.open.discard(ordinal)
            case Failed(ordinal):
                self.failures[ordinal] += 1
                self.open.discard(ordinal)
            case Withdrawn(ordinal):
                self.open.discard(ordinal)
            case Evicted(ordinal):
                self.answers.pop(ordinal, None)
            case Filtered(ordinal):
                self.filtered.add(ordinal)
                self.answers.pop(ordinal, None)
            case Skipped(ordinal, cause):
                self.skipped[ordinal] = cause
                self.high = max(self.high, ordinal + 1)
            case Trained(_, ordinals):
                for ordinal in ordinals:
                    self.trained[ordinal] += 1
                    self.answers.pop(ordinal, None)


class Auditor:
    """Takes events in the order in which they happen; `verdict` at the end."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._journal: list[Event] = []
        self._marks: dict[int, int] = {}
        self._now = Lineage()
        self._answers = 0
        self._max_age = 0
        self._verdict = Verdict()

    def observe(self, event: Event) -> None:
        """One more thing has happened."""
        self._check(event)
        match event:
            case Saved(checkpoint):
                self._marks[checkpoint] = len(self._journal)
            case Resumed():
                self._resume(event)
            case Reported() | Ended():
                pass
            case _:
                self._answers += isinstance(event, Answered)
                self._verdict.withdrawn += isinstance(event, Withdrawn)
                self._journal.append(event)
                self._now.apply(event)

    def verdict(self) -> Verdict:
        """Lost and trained twice on the lineage of the final weights."""
        found, now = self._verdict, self._now
        wrong = {event.ordinal for event in self._journal if isinstance(event, Asked) and self._is_wrong(event)}
        found.lost_ordinals = sorted({*now.undone(), *wrong})
        found.lost = len(found.lost_ordinals)
        found.trained_twice = sum(times - 1 for times in now.trained.values())
        found.extra_answers = self._answers - len(now.trained.keys() | now.filtered)
        return found

    def undone(self) -> list[int]:
        """Prompts of the lineage that are neither trained nor filtered nor skipped, now."""
        return self._now.undone()

    @property
    def lineage(self) -> Lineage:
        """What the weights and books descend from, now."""
        return self._now

    def answered(self) -> list[int]:
        """Prompts of the lineage whose answers are at hand, now."""
        return sorted(self._now.answers)

    # ---- one event --------------------------------------------------------------------------

    def _check(self, event: Event) -> None:
        now = self._now
        match event:
            case Asked(ordinal, row):
                if self._is_wrong(event):
                    self._violation(f"prompt {ordinal} was asked with row {row}, the stream has {self._facts.row_at(ordinal)}")
                if now.done(ordinal):
                    self._violation(f"prompt {ordinal} was asked though it is done")
                elif ordinal in now.answers:
                    self._violation(f"prompt {ordinal} was asked though its answers are there")
                elif ordinal in now.open:
                    self._violation(f"prompt {ordinal} was asked though it is being answered")
            case Answered(ordinal, one_try=one_try):
                if not one_try:
                    self._violation(f"prompt {ordinal} took answers of a try that had been given up")
                self._check_open(ordinal, "answered")
            case Withdrawn(ordinal):
                self._check_open(ordinal, "withdrawn")
            case Evicted(ordinal):
                if ordinal not in now.answers:
                    self._violation(f"prompt {ordinal} was evicted without answers")
            case Filtered(ordinal):
                answers = now.answers.get(ordinal)
                if answers is None or not answers.equal_rewards:
                    self._violation(f"prompt {ordinal} was filtered though its rewards differ")
            case Trained(step, ordinals):
                self._check_trained(step, ordinals)
            case Skipped(ordinal, cause):
                if not self._justified(ordinal, cause):
                    self._violation(f"prompt {ordinal} was skipped as {cause}, which does not hold")
            case Failed(ordinal):
                self._check_open(ordinal, "failed")
                if now.failures[ordinal] > self._facts.retry_budget:
                    self._violation(f"prompt {ordinal} was tried {now.failures[ordinal] + 1} times, above its retry budget")
            case Reported():
                mine = Reported(now.high, sum(now.trained.values()), len(now.filtered), len(now.skipped))
                if event != mine:
                    self._violation(f"the ledger says {event}, it was {mine}")
            case Ended(live, stalled):
                if stalled:
                    self._violation(f"the run waits for ever with {live} live prompts; undone are {now.undone()[:8]}")
                elif live:
                    self._violation(f"the finished run has {live} live prompts")
            case _:
                pass

    def _check_open(self, ordinal: int, what: str) -> None:
        if ordinal not in self._now.open:
            self._violation(f"prompt {ordinal} was {what} though no try of it was under way")

    def _check_trained(self, step: int, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            answers = self._now.answers.get(ordinal)
            if answers is None:
                self._violation(f"step {step} trained prompt {ordinal} without answers of this lineage")
            elif not 0 <= step - 1 - answers.first_version <= self._max_age:
                self._violation(f"step {step} trained prompt {ordinal} at age {step - 1 - answers.first_version}")

    def _justified(self, ordinal: int, cause: str) -> bool:
        if self._now.done(ordinal):
            return False
        if cause == "RetryBudgetExhausted":
            return self._now.failures[ordinal] > self._facts.retry_budget
        row = self._facts.row_at(ordinal)
        return row in {"PromptTooLong": self._facts.too_long, "BadRow": self._facts.unreadable}.get(cause, ())

    def _is_wrong(self, event: Asked) -> bool:
        return event.row != self._facts.row_at(event.ordinal)

    def _violation(self, text: str) -> None:
        self._verdict.violations += 1
        if len(self._verdict.examples) < 10:
            self._verdict.examples.append(text)

    # ---- a new life -------------------------------------------------------------------------

    def _resume(self, event: Resumed) -> None:
        """Forget what is not in the checkpoint; exactly the prompts without answers in it must be answered again."""
        trained = sum(self._now.trained.values())
        if event.checkpoint is not None or self._journal:
            del self._journal[self._marks[event.checkpoint] if event.checkpoint is not None else 0 :]
            self._now = Lineage()
            for past in self._journal:
                self._now.apply(past)
        self._now.open = set()
        self._verdict.rolled_back_prompts += trained - sum(self._now.trained.values())
        self._max_age = event.max_age
        kept = {o: a for o, a in self._now.answers.items() if event.buffer and self._usable(a, event)}
        for ordinal in self._now.answers.keys() - kept.keys():
            self._journal.append(Evicted(ordinal))
        self._now.answers = kept
        expected = [ordinal for ordinal in self._now.undone() if ordinal not in kept]
        self._verdict.asked_again_after_crash += len(expected)
        if event.rehanded is not None and list(event.rehanded) != expected:
            wrong = sorted(set(event.rehanded) ^ set(expected))
            self._violation(f"after the resume from {event.checkpoint}, prompts {wrong[:8]} are wrongly (not) answered again")

    @staticmethod
    def _usable(answers: Answered, event: Resumed) -> bool:
        return answers.size == event.group_size and event.version - answers.first_version <= event.max_age
