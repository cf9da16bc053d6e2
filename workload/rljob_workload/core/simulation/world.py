"""A trainer in virtual time: the real `Rollouts` and sources, made-up answers, and crashes between any two operations.

A life is what one process lives through, from its resume to its crash. Between lives only published checkpoints stay, as
text. Answer times are heavy-tailed, tries fail, some rows always fail or never return; answers also arrive while a step is
being trained and saved. Tries are withdrawn in bursts, as when an agent ends that had many prompts.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.core.groups import Group
from rljob_workload.core.ledger import Counts, LedgerError, SkipCause
from rljob_workload.core.rollouts import RolloutError, Rollouts, RolloutSettings
from rljob_workload.core.rollouts import Verdict as Fate
from rljob_workload.core.simulation import auditor as audit
from rljob_workload.core.simulation.data import LONGEST_PROMPT, DataFacts, make_source
from rljob_workload.core.simulation.rivals import Rival
from rljob_workload.core.simulation.settings import SimSettings
from rljob_workload.core.source import SourceError
from rljob_workload.core.window import Window

#: Operations of one run before it is called endless, per prompt.
MOST_OPERATIONS_PER_PROMPT = 1000


class CrashError(Exception):
    """The simulated process dies here."""


class StalledError(Exception):
    """Nothing will ever happen again, or no end is in sight."""


@dataclass(slots=True)
class Checkpoint:
    """What is on the simulated disk."""

    number: int
    step: int
    trained: int
    text: str


@dataclass(slots=True)
class Outcome:
    """A finished run."""

    settings: SimSettings
    counts: Counts
    verdict: audit.Verdict
    crashes: int
    steps: int
    operations: int
    #: What the core itself refused: books that do not add up, data that is another one.
    refused: list[str] = field(default_factory=list)
    skipped_names: dict[str, list[int]] = field(default_factory=dict)
    #: Prompts that a rival's rule dropped without counting, because a try failed.
    dropped: int = 0

    @property
    def violations(self) -> int:
        """Everything that must not be, besides lost and twice."""
        return self.verdict.violations + len(self.refused)

    @property
    def clean(self) -> bool:
        """Nothing lost, nothing twice, everything adds up."""
        return not (self.verdict.lost or self.verdict.trained_twice or self.violations)


class World:
    """One simulated run over all its lives."""

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings = settings.resolved()
        self.rng = random.Random(f"world:{settings.seed}")  # noqa: S311 - reproducible, not secret
        self.facts = DataFacts.of(settings)
        self.rival = Rival(settings.rule, buffer=settings.load_replay_buffer) if settings.rule != "ledger" else None
        budget = settings.retry_budget
        self.auditor = audit.Auditor(
            audit.Facts(self.facts.row_at, self.facts.too_long, self.facts.unreadable, retry_budget=budget)
        )
        self.disk: Checkpoint | None = None
        self.saves = 0
        self.crashes = 0
        self.operations = 0
        self._plan = sorted(self.rng.randrange(-(-settings.prompts * 9 // 10)) for _ in range(settings.crashes))
        self._grace = self.rng.randrange(60)
        self.refused: list[str] = []

    def run(self) -> Outcome:
        """Live and crash until the run is finished."""
        sizes = self.settings
        while True:
            life = Life(self, sizes)
            try:
                life.live()
            except CrashError:
                self.crashes += 1
                if self.settings.vary:
                    sizes = self._varied(sizes)
                continue
            except StalledError as err:
                self.refused.append(str(err))
                self.auditor.observe(audit.Ended(life.rollouts.ledger.counts().live, stalled=True))
            except (LedgerError, RolloutError, SourceError) as err:
                self.refused.append(f"{type(err).__name__}: {err}")
            else:
                self.auditor.observe(audit.Ended(life.rollouts.ledger.counts().live, stalled=False))
            return self._outcome(life)

    def operation(self, trained: int) -> None:
        """Between two operations: the process may die here."""
        self.operations += 1
        if self._plan and trained >= self._plan[0]:
            self._grace -= 1
            if self._grace < 0:
                self._plan.pop(0)
                self._grace = self.rng.randrange(60)
                raise CrashError
        if self.operations > MOST_OPERATIONS_PER_PROMPT * (self.settings.prompts + 100):
            raise StalledError(
                f"no end in sight after {self.operations} operations; are there answers before --answer-timeout?"
            )

    def _varied(self, sizes: SimSettings) -> SimSettings:
        choice: Any = self.rng.choice
        per_step = choice((1, 2, 4, 8, sizes.prompts_per_step))
        return replace(
            sizes,
            prompts_per_step=per_step,
            group_size=choice((2, 2, 3)),
            max_age=choice((1, 2, 3)),
            in_flight=choice((0, per_step, 3 * per_step)),
            handout=choice((sizes.handout, 1, 3, 5)),
            keep_rows=choice((True, True, False)),
            load_replay_buffer=choice((True, False)),
        )

    def _outcome(self, life: Life) -> Outcome:
        ledger = life.rollouts.ledger
        return Outcome(
            self.settings,
            ledger.counts(),
            self.auditor.verdict(),
            self.crashes,
            life.version,
            self.operations,
            self.refused,
            ledger.skipped_names(),
            len(self.rival.dropped) if self.rival else 0,
        )


class Life:
    """One process."""

    def __init__(self, world: World, sizes: SimSettings) -> None:
        self.world, self.sizes = world, sizes
        self.rng = world.rng
        self.version = world.disk.step if world.disk else 0
        self.trained = world.disk.trained if world.disk else 0
        self.now = 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._sequence = 0
        #: Zero-variance groups, by the try that they belong to.
        self._equal: set[tuple[int, int]] = set()
        #: The newest try of every prompt, numbered here: what the core calls its tries is not asked.
        self._try_of: dict[int, int] = {}
        self._tries = 0
        self._steps = self.version + -(-max(0, sizes.prompts - self.trained) // sizes.prompts_per_step)
        self.rollouts = self._make()

    def _make(self) -> Rollouts:
        sizes = self.sizes
        window = Window(sizes.prompts_per_step, sizes.max_age, self._steps)
        settings = RolloutSettings(
            group_size=sizes.group_size,
            in_flight_limit=sizes.in_flight or sizes.prompts_per_step * sizes.max_age,
            longest_prompt=LONGEST_PROMPT,
            answer_timeout=sizes.answer_timeout,
            retry_budget=0 if self.world.rival else sizes.retry_budget,
            filters_per_step=sizes.prompts_per_step,
            waits=not sizes.free_order,
        )
        return Rollouts(make_source(self.world.facts, sizes), window, settings, self._see_skip)

    # ---- the trainer's loop -----------------------------------------------------------------

    def live(self) -> None:
        """From the resume to the last step."""
        self._resume()
        while self.version < self._steps:
            self._dispatch()
            taken = self.rollouts.take(self.version + 1, self.version)
            if taken is None:
                self._wait_for_an_event()
                continue
            self._operation()
            batch = taken[0]
            self._pass_time(self.sizes.train_time)
            if self.rng.random() < 0.02:
                self.rollouts.give_back()  # the step failed; the same or other groups are taken
                self._operation()
                continue
            self._train(batch.step, batch.ordinals)
            if self.version % self.sizes.save_every == 0 or self.version == self._steps:
                self._save()

    def _train(self, step: int, ordinals: tuple[int, ...]) -> None:
        self._refuses_to_save()
        self._observe(audit.Trained(step, ordinals))
        if self.world.rival:
            self.world.rival.trained.update(ordinals)
        self._operation()
        self.rollouts.commit(step, ordinals)
        self.trained += len(ordinals)
        self._operation()
        if self.rng.random() < 0.2:
            self.rollouts.commit(step, ordinals)  # the acknowledgement was lost
        self.version = step
        self._report()
        self._operation()

    def _refuses_to_save(self) -> None:
        """Within a step there is nothing to save: neither before nor after it. A save that goes through is published."""
        if self.rng.random() < 0.05:
            try:
                text = json.dumps(self.rollouts.snapshot())
            except LedgerError:
                return
            self._publish(text)

    def _save(self) -> None:
        text = json.dumps(self.rollouts.snapshot(), separators=(",", ":"))
        if self.world.rival:
            text = self.world.rival.saved(text)
        self._publish(text)
        self._pass_time(self.sizes.train_time)

    def _publish(self, text: str) -> None:
        self.world.saves += 1
        number = self.world.saves
        self._observe(audit.Saved(number))
        self._operation()  # written, not yet visible
        self.world.disk = Checkpoint(number, self.version, self.trained, text)
        self._operation()

    def _resume(self) -> None:
        world, sizes = self.world, self.sizes
        disk = world.disk
        rehanded: tuple[int, ...] | None = None
        if disk is not None:
            saved = json.loads(disk.text)
            if world.rival:
                saved = world.rival.resumed(saved)
            report = self.rollouts.restore(saved, version=disk.step, load_buffer=sizes.load_replay_buffer)
            rehanded = None if world.rival else tuple(report.rehanded)
            live = self.rollouts.ledger.counts().live
            # A changed P or age may leave more live prompts than the steps were meant for.
            self._steps = self.version + -(-max(sizes.prompts - self.trained, live) // sizes.prompts_per_step)
            self.rollouts._window = Window(sizes.prompts_per_step, sizes.max_age, self._steps)
        elif world.rival:
            world.rival.forget()
        number = disk.number if disk else None
        self._observe(audit.Resumed(number, self.version, sizes.load_replay_buffer, sizes.group_size, sizes.max_age, rehanded))
        if disk is not None:
            self._report()
        self._operation()

    # ---- time -------------------------------------------------------------------------------

    def _at(self, time: float, kind: str, what: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, kind, what))

    def _wait_for_an_event(self) -> None:
        if not self._events:
            raise StalledError("nothing can happen any more, and the run is not finished")
        self._happen()

    def _pass_time(self, duration: float) -> None:
        """Answers arrive meanwhile, nothing is dispatched."""
        until = self.now + duration
        while self._events and self._events[0][0] <= until:
            self._happen()
        self.now = max(self.now, until)

    def _happen(self) -> None:
        time, _, kind, what = heapq.heappop(self._events)
        self.now = max(self.now, time)
        match kind:
            case "answer":
                self._arrive(what)
            case "failure":
                self._fail(what)
            case "withdrawal":
                self._withdraw(what)
            case _:
                for group in self.rollouts.overdue(self.now):
                    self._lost(group)
        self._operation()

    def _operation(self) -> None:
        self.rollouts.check()
        self.world.operation(self.trained)

    def _observe(self, event: audit.Event) -> None:
        self.world.auditor.observe(event)

    def _report(self) -> None:
        if not self.world.rival:
            counts = self.rollouts.ledger.counts()
            self._observe(audit.Reported(counts.handed_out, counts.trained, counts.filtered, counts.skipped))

    # ---- prompts ----------------------------------------------------------------------------

    def _dispatch(self) -> None:
        evicted = self._buffered_answers()
        requests = self.rollouts.dispatch(self.version, self.now)
        self._see_evictions(evicted)
        for request in requests:
            self._ask(request)
        if requests:
            self._operation()

    def _ask(self, request: Request) -> None:
        ordinal, row = request.tag[0], request.tokens[1]
        self._observe(audit.Asked(ordinal, row, self.version))
        self._tries += 1
        self._try_of[ordinal] = self._tries
        self._at(self.now + self.sizes.answer_timeout * 1.000001, "deadline", None)
        if self.sizes.withdrawal_rate and self.rng.random() < self.sizes.withdrawal_rate:
            self._at(self.now + self.rng.lognormvariate(0, self.sizes.spread), "withdrawal", request.tag)
        if row in self.world.facts.never_return:
            return
        if self.rng.random() < self.sizes.filter_rate:
            self._equal.add(request.tag)
        times = [self.rng.lognormvariate(0, self.sizes.spread) for _ in range(request.answers)]
        for time in times:
            self._at(self.now + time, "answer", (request.tag, self.version, self._tries))
        if row in self.world.facts.always_fail or self.rng.random() < self.sizes.failure_rate:
            self._at(self.now + max(times) * self.rng.random(), "failure", request.tag)

    def _arrive(self, what: tuple[tuple[int, int], int, int]) -> None:
        tag, first, number = what
        versions = ((0, first),) if first == self.version else ((0, first), (1, self.version))
        for group in self.rollouts.arrive([Answer(tag, (5, number), (-0.5, -0.5), versions)]):
            self._judge(group)

    def _judge(self, group: Group) -> None:
        tag = (group.ordinal, group.attempt)
        equal = tag in self._equal
        scores = [(1.0 if equal else float(index % 2), False) for index in range(len(group.answers))]
        first = min(answer.first_version for answer in group.answers)
        newest = self._try_of[group.ordinal]
        one_try = {answer.tokens[1] for answer in group.answers} == {newest} and len(group.answers) == self.sizes.group_size
        fate = self.rollouts.scored(group, scores)
        self._observe(audit.Answered(group.ordinal, len(group.answers), first, equal, one_try))
        if fate is Fate.FILTERED:
            self._observe(audit.Filtered(group.ordinal))
        elif fate is Fate.EVICTED:
            self._observe(audit.Evicted(group.ordinal))

    def _fail(self, tag: tuple[int, int]) -> None:
        group = self.rollouts._open.get(tag[0])
        if group is not None and group.attempt == tag[1]:
            self._lost(group)

    def _withdraw(self, tag: tuple[int, int]) -> None:
        """Whoever answered this prompt is gone, and with it half of what else was being answered: no prompt is to blame."""
        if not self.rollouts.is_open_tag(tag):
            return
        groups = [group for group in self.rollouts._open.values() if group.ordinal == tag[0] or self.rng.random() < 0.5]
        for group in groups:
            self.rollouts.withdraw(group)
            self._observe(audit.Withdrawn(group.ordinal))
            self._operation()

    def _lost(self, group: Group) -> None:
        cause = self.rollouts.failed(group)
        if self.world.rival:
            self.world.rival.dropped.add(group.ordinal)
            return
        if cause is None:
            self._observe(audit.Failed(group.ordinal))

    # ---- what dispatch did besides ----------------------------------------------------------

    def _buffered_answers(self) -> set[int]:
        return set(self.rollouts._buffer) if self.version > self.rollouts._version else set()

    def _see_evictions(self, before: set[int]) -> None:
        for ordinal in sorted(before - self.rollouts._buffer.keys()):
            self._observe(audit.Evicted(ordinal))

    def _see_skip(self, ordinal: int, cause: SkipCause, particulars: str) -> None:
        if self.world.rival:
            return
        if cause is SkipCause.RETRY_BUDGET_EXHAUSTED:
            self._observe(audit.Failed(ordinal))
        self._observe(audit.Skipped(ordinal, cause))
