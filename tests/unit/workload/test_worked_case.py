"""The worked case: 16 prompts, 4 per handout; a save in the middle; what is answered again, and what is not.

Trained: 0-3. Finished and buffered: 4, 6, 7, 10. In flight: 5, 8, 9, 11. Not handed out: 12-15.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.core.ledger import SkipCause
from rljob_workload.core.replayable import ReplayableSource
from rljob_workload.core.rollouts import Rollouts, RolloutSettings
from rljob_workload.core.simulation.data import DataFacts, SimLoader
from rljob_workload.core.simulation.rivals import Rival
from rljob_workload.core.source import Row, SeekableSource, Source
from rljob_workload.core.window import Window

P, G, ROWS = 4, 2, 16
NOBODY = frozenset[int]()


class Run:
    """One life of the collection, driven by hand."""

    def __init__(self, kind: str, *, steps: int = 4, budget: int = 3, rows: int = ROWS) -> None:
        window = Window(P, max_age=2, steps=steps)
        settings = RolloutSettings(G, 8, longest_prompt=8, answer_timeout=10.0, retry_budget=budget)
        self.rollouts = Rollouts(make_source(kind, rows), window, settings)
        self.requests: dict[int, Request] = {}
        self.asked: list[int] = []
        self.trained: list[int] = []
        self.version = 0

    def dispatch(self, now: float = 0.0) -> list[int]:
        requests = self.rollouts.dispatch(self.version, now)
        self.requests |= {request.tag[0]: request for request in requests}
        ordinals = [request.tag[0] for request in requests]
        self.asked += ordinals
        return ordinals

    def finish(self, *ordinals: int) -> None:
        for ordinal in ordinals:
            request = self.requests.pop(ordinal)
            answers = [Answer(request.tag, (5,), (-0.5,), ((0, self.version),)) for _ in range(G)]
            (group,) = self.rollouts.arrive(answers)
            self.rollouts.scored(group, [(0.0, False), (1.0, True)])
            self.rollouts.check()

    def fail(self, ordinal: int) -> SkipCause | None:
        del self.requests[ordinal]
        cause = self.rollouts.failed(self.rollouts._open[ordinal])
        self.rollouts.check()
        return cause

    def train(self) -> tuple[int, ...]:
        taken = self.rollouts.take(self.version + 1, self.version)
        assert taken is not None
        self.version += 1
        self.rollouts.commit(self.version, taken[0].ordinals)
        self.trained += taken[0].ordinals
        self.rollouts.check()
        return taken[0].ordinals

    def save(self) -> str:
        return json.dumps(self.rollouts.snapshot())

    def run_to_the_end(self, steps: int = 4) -> None:
        while self.version < steps:
            self.dispatch()
            self.finish(*list(self.requests))
            self.train()


def make_source(kind: str, rows: int = ROWS) -> Source:
    if kind == "seekable":
        return SeekableSource([Row((1, index), str(index)) for index in range(rows)], seed=0, shuffle=True)
    facts = DataFacts(rows, 0, NOBODY, NOBODY, NOBODY, NOBODY)
    identity = {"rows": rows}
    return ReplayableSource(SimLoader(facts, batch=4), facts.row, identity=identity, keep_rows=kind == "replayable")


KINDS = ("seekable", "replayable", "replayable without rows")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def at_the_save(kind: str, **changes: Any) -> Run:
    run = Run(kind, **changes)
    assert run.dispatch() == list(range(8))
    run.finish(0, 1, 2, 3)
    assert run.dispatch() == [8, 9, 10, 11]
    run.finish(4, 6, 7, 10)
    assert run.train() == (0, 1, 2, 3)
    return run


def resumed(kind: str, saved: str, *, version: int = 1, load_buffer: bool = True, **changes: Any) -> Run:
    run = Run(kind, **changes)
    run.rollouts.restore(json.loads(saved), version=version, load_buffer=load_buffer)
    run.rollouts.check()
    run.version = version
    return run


def test_with_the_buffer_only_what_was_in_flight_is_answered_again(kind: str) -> None:
    saved = at_the_save(kind).save()
    run = resumed(kind, saved)
    assert run.dispatch() == [5, 8, 9, 11, 12, 13, 14, 15]  # the undone first, then the new ones
    assert run.train() == (4, 6, 7, 10)
    run.run_to_the_end()
    assert run.asked == [5, 8, 9, 11, 12, 13, 14, 15]
    assert sorted(run.trained) == list(range(4, 16))
    assert run.rollouts.ledger.counts().live == 0


def test_without_the_buffer_all_undone_are_answered_again(kind: str) -> None:
    run = resumed(kind, at_the_save(kind).save(), load_buffer=False)
    assert run.dispatch() == [4, 5, 6, 7, 8, 9, 10, 11]
    run.run_to_the_end()
    assert run.asked == list(range(4, 16))
    assert sorted(run.trained) == list(range(4, 16))


@pytest.mark.parametrize(("buffer", "lost"), [(True, [5, 8, 9, 11]), (False, [4, 5, 6, 7, 8, 9, 10, 11])])
def test_the_old_rule_loses_exactly_what_was_in_flight(buffer: bool, lost: list[int]) -> None:
    rival = Rival("live-cursor", buffer=buffer)
    rival.trained = {0, 1, 2, 3}
    state = rival.resumed(json.loads(rival.saved(at_the_save("seekable").save())))
    run = resumed("seekable", json.dumps(state), steps=5)
    run.run_to_the_end(3)
    assert min(run.asked) == 12
    assert sorted({*range(12)} - {0, 1, 2, 3} - {*run.trained}) == lost


def test_a_prompt_that_failed_before_the_save_keeps_its_failure(kind: str) -> None:
    first = at_the_save(kind, budget=1)
    assert first.fail(8) is None
    run = resumed(kind, first.save(), budget=1)
    assert run.dispatch()[:4] == [5, 8, 9, 11]
    assert run.fail(8) is SkipCause.RETRY_BUDGET_EXHAUSTED
    run.run_to_the_end()
    assert run.rollouts.ledger.skipped_names() == {"RetryBudgetExhausted": [8]}
    assert sorted([*run.trained, 8]) == list(range(4, 17))  # one more prompt takes its place


def test_free_order_training_where_10_is_trained_before_5(kind: str) -> None:
    first = at_the_save(kind)
    assert first.train() == (4, 6, 7, 10)
    saved = first.save()
    assert json.loads(saved)["ledger"]["frontier_ordinal"] == 5
    run = resumed(kind, saved, version=2)
    assert run.dispatch() == [5, 8, 9, 11, 12, 13, 14, 15][: len(run.asked)]
    run.run_to_the_end()
    assert sorted(run.trained) == [5, 8, 9, *range(11, 16)]


def test_a_group_that_was_evicted_as_too_old_comes_back(kind: str) -> None:
    run = at_the_save(kind)
    run.version = 3  # the restored answers of version 0 would be older than two versions
    run.dispatch()
    assert run.rollouts.ledger.counts().buffered == 0
    assert {o for o in (4, 6, 7, 10) if run.rollouts.ledger.is_owed(o)} == {4, 6, 7, 10}
    again = resumed(kind, run.save(), version=3, steps=5)
    again.run_to_the_end(5)
    assert sorted(again.trained)[:4] == [4, 5, 6, 7]
    assert again.rollouts.ledger.counts().skipped == 0


def test_a_save_at_the_exact_end_of_an_epoch(kind: str) -> None:
    first = Run(kind, steps=8)
    while first.version < 4:
        first.dispatch()
        first.finish(*sorted(first.requests)[:4])
        first.train()
        assert first.version < 4 or first.trained == list(range(16))
    first = Run(kind, steps=4)
    first.run_to_the_end(4)
    assert first.rollouts.ledger.counts().handed_out == 16
    run = resumed(kind, first.save(), version=4, steps=8)
    run.run_to_the_end(8)
    assert sorted(run.trained) == list(range(16, 32))
    source = make_source(kind, ROWS)
    rows = [source.pull() for _ in range(32)]
    assert {row.tokens for row in rows[:16]} == {row.tokens for row in rows[16:]}  # type: ignore[union-attr]


def test_a_crash_before_the_first_save_starts_over(kind: str) -> None:
    at_the_save(kind)
    run = Run(kind)
    run.run_to_the_end()
    assert sorted(run.trained) == list(range(16))


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_second_crash_while_the_first_one_s_prompts_are_answered_again(kind: str, saved_again: bool) -> None:
    saved = at_the_save(kind).save()
    second = resumed(kind, saved)
    second.dispatch()
    second.finish(8)
    if saved_again:
        saved = second.save()
    run = resumed(kind, saved)
    expected = [5, 9, 11] if saved_again else [5, 8, 9, 11]
    assert run.dispatch()[: len(expected)] == expected
    run.run_to_the_end()
    assert sorted(run.trained) == list(range(4, 16))


def test_a_prompt_that_always_fails_is_skipped_by_name_over_all_lives(kind: str) -> None:
    run = at_the_save(kind, budget=2)
    causes = []
    for _ in range(3):
        causes.append(run.fail(5))
        run = resumed(kind, run.save(), budget=2)
        run.dispatch()
    assert causes == [None, None, SkipCause.RETRY_BUDGET_EXHAUSTED]
    assert 5 not in run.asked
    run.run_to_the_end()
    assert run.rollouts.ledger.skipped_names() == {"RetryBudgetExhausted": [5]}


def test_a_prompt_that_never_returns_is_given_up_after_its_deadlines(kind: str) -> None:
    run = at_the_save(kind, budget=1)
    run.finish(8, 9, 11)
    now = 0.0
    for expected in (None, SkipCause.RETRY_BUDGET_EXHAUSTED):
        now += 10.1
        overdue = run.rollouts.overdue(now)
        assert [group.ordinal for group in overdue if group.ordinal == 5] == [5]
        assert run.fail(5) is expected
        run.dispatch(now)
    run.run_to_the_end()
    assert run.rollouts.ledger.counts().skipped_by == {"RetryBudgetExhausted": 1}
    assert 5 not in run.trained
    assert run.rollouts.ledger.counts().live == 0
