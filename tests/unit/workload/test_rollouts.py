"""The collector's bookkeeping: ages, retries, resume, and a run that ends with nothing left."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.core.ledger import SkipCause, State
from rljob_workload.core.rollouts import Group, Rollouts, RolloutSettings, Verdict
from rljob_workload.core.source import Row, SeekableSource, SourceChangedError
from rljob_workload.core.window import Window

G = 2


def make(
    *,
    prompts: int = 4,
    max_age: int = 1,
    steps: int = 50,
    limit: int = 8,
    budget: int = 1,
    seed: int = 0,
    filters: int = 0,
    from_dispatch: bool = True,
) -> Rollouts:
    source = SeekableSource([Row((1, index), str(index)) for index in range(20)], seed=seed, shuffle=True)
    settings = RolloutSettings(
        G,
        limit,
        longest_prompt=4,
        answer_timeout=10.0,
        retry_budget=budget,
        filters_per_step=filters,
        timed_from_dispatch=from_dispatch,
    )
    return Rollouts(source, Window(prompts, max_age, steps), settings)


def answers(request: Request, first: int, last: int | None = None) -> list[Answer]:
    versions = ((0, first),) if last is None else ((0, first), (1, last))
    return [Answer(request.tag, (5, 6), (-0.5, -0.5), versions) for _ in range(request.answers)]


def finish(rollouts: Rollouts, request: Request, first: int, last: int | None = None) -> None:
    (group,) = rollouts.arrive(answers(request, first, last))
    rollouts.scored(group, [(0.0, False), (1.0, True)])


def open_group(rollouts: Rollouts, request: Request) -> Group:
    (group,) = rollouts.arrive(answers(request, 0))
    return group


def test_a_step_takes_the_oldest_groups_and_trains_their_advantages() -> None:
    rollouts = make(prompts=2, limit=4)
    requests = rollouts.dispatch(version=0, now=0.0)
    assert [r.tag for r in requests] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for request in (requests[3], requests[2]):
        finish(rollouts, request, 0)
    taken = rollouts.take(1, version=0)
    assert taken is not None
    batch, info = taken
    assert batch.ordinals == (2, 3)
    assert [row.advantage for row in batch.rows[:2]] == pytest.approx([-0.7070068, 0.7070068])
    assert batch.rows[0].prompt_length == 2
    assert (info.reward, info.correct, info.samples, info.answer_tokens, info.spanning) == (0.5, 0.5, 4, 8, 0)


def test_a_step_waits_for_a_group_that_the_next_one_would_find_too_old() -> None:
    rollouts = make(prompts=2, max_age=1, limit=4)
    slow, *others = rollouts.dispatch(version=0, now=0.0)
    for request in others:
        finish(rollouts, request, 0)
    assert rollouts.take(1, version=0) is not None  # does not wait for the slow one yet
    rollouts.commit(1, (1, 2))
    finish(rollouts, rollouts.dispatch(version=1, now=0.0)[0], 1)
    assert rollouts.missing(version=1) == 1  # though there are two finished groups
    assert rollouts.take(2, version=1) is None
    finish(rollouts, slow, 0, 1)
    taken = rollouts.take(2, version=1)
    assert taken is not None
    assert taken[0].ordinals == (0, 3)
    assert (taken[1].oldest_age, taken[1].spanning) == (1, 2)


def test_the_wait_for_a_group_at_its_limit_ends_at_its_answer_deadline() -> None:
    rollouts = make(prompts=1, max_age=1, limit=2, budget=0)
    first, second = rollouts.dispatch(version=0, now=0.0)
    finish(rollouts, second, 0)
    assert rollouts.take(1, version=0) is not None
    rollouts.commit(1, (1,))
    finish(rollouts, rollouts.dispatch(version=1, now=5.0)[0], 1)
    assert rollouts.missing(version=1) == 1
    (overdue,) = rollouts.overdue(now=10.1)
    assert overdue.ordinal == first.tag[0]
    assert rollouts.failed(overdue) is SkipCause.RETRY_BUDGET_EXHAUSTED
    taken = rollouts.take(2, version=1)
    assert taken is not None
    assert taken[0].ordinals == (2,)
    rollouts.check()


def test_a_group_whose_clock_is_its_agents_is_overdue_only_when_that_says_so() -> None:
    rollouts = make(prompts=1, limit=2, from_dispatch=False)
    first, second = rollouts.dispatch(version=0, now=0.0)
    assert rollouts.overdue(now=1e9) == []
    assert rollouts.first_deadline() is None
    rollouts.set_deadline(second.tag, 20.0)
    rollouts.set_deadline((second.tag[0], 7), 1.0)  # another try
    assert rollouts.first_deadline() == 20.0
    assert [group.ordinal for group in rollouts.overdue(now=20.1)] == [second.tag[0]]
    assert [group.ordinal for group in rollouts.oldest_in_flight()] == [first.tag[0], second.tag[0]]


def test_a_group_that_is_withdrawn_is_answered_again_and_has_not_failed() -> None:
    rollouts = make(prompts=1, limit=1, budget=0)
    for attempt in range(3):
        (request,) = rollouts.dispatch(version=0, now=0.0)
        assert request.tag == (0, attempt)
        group = rollouts.group_of(request.tag)
        assert group is not None
        for _ in range(2):  # the second time it is open no longer
            rollouts.withdraw(group)
        rollouts.check()
    assert rollouts.ledger.failures_of(0) == 0
    assert rollouts.ledger.state_of(0) is State.RETRYABLE


def test_groups_that_are_too_old_on_arrival_are_answered_again_and_come_first_in_their_turn() -> None:
    rollouts = make(prompts=2, max_age=1, limit=4)
    first, *_, last = rollouts.dispatch(version=0, now=0.0)
    assert rollouts.missing(version=2) == 4  # the version has changed all the same
    for request in (first, last):
        (group,) = rollouts.arrive(answers(request, 0, 2))
        assert rollouts.scored(group, [(0.0, False), (1.0, True)]) is Verdict.EVICTED
        assert rollouts.ledger.failures_of(request.tag[0]) == 0
    again, last_again = rollouts.dispatch(version=2, now=0.0)
    assert (again.tag, last_again.tag) == ((0, 1), (3, 1))
    for ordinal in (1, 2):
        finish(rollouts, Request((ordinal, 0), (), G), 2)
    for request in (again, last_again):
        finish(rollouts, request, 2)
    taken = rollouts.take(3, version=2)
    assert taken is not None
    assert taken[0].ordinals == (0, 3)  # of four equally old groups


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompts=st.integers(1, 4),
    max_age=st.integers(1, 3),
    limit=st.integers(1, 16),
    equal=st.sampled_from((0.0, 0.3)),
    failing=st.sampled_from((0.0, 0.1)),
)
def test_no_answer_is_thrown_away_for_its_age_while_a_run_goes_on(
    seed: int, prompts: int, max_age: int, limit: int, equal: float, failing: float
) -> None:
    """Whatever the lengths: most groups come at once, some after many others, and steps are taken as soon as may be."""
    rng, steps = random.Random(seed), 12
    rollouts = make(prompts=prompts, max_age=max_age, steps=steps, limit=limit, budget=100, filters=prompts)
    running: list[tuple[int, Request, int]] = []
    version = clock = 0
    while version < steps:
        new = rollouts.dispatch(version, float(clock))
        running += [(clock + rng.choice((0, 1, 2, 40)), request, version) for request in new]
        if (taken := rollouts.take(version + 1, version)) is not None:
            assert taken[1].oldest_age <= max_age
            version += 1
            rollouts.commit(version, taken[0].ordinals)
            continue
        assert running, "nothing is left to wait for"
        running.sort(key=lambda one: one[0])
        clock, request, first = running.pop(0)
        (group,) = rollouts.arrive(answers(request, first, None if first == version else version))
        if rng.random() < failing:
            rollouts.failed(group)
            continue
        verdict = rollouts.scored(group, [(0.0, False), (0.0 if rng.random() < equal else 1.0, True)])
        assert verdict in (Verdict.BUFFERED, Verdict.FILTERED)
    rollouts.check()
    assert not rollouts.ledger.counts().live


def test_a_finished_group_that_becomes_too_old_in_the_buffer_is_answered_again() -> None:
    rollouts = make(prompts=2, max_age=1, limit=4)
    for request in rollouts.dispatch(version=0, now=0.0)[:1]:
        finish(rollouts, request, 0)
    assert rollouts.ledger.state_of(0) is State.BUFFERED
    assert rollouts.can_dispatch(version=2)
    assert (rollouts.ledger.state_of(0), rollouts.ledger.is_owed(0)) == (State.RETRYABLE, True)


def test_groups_of_equal_rewards_are_filtered_up_to_the_limit_and_count_in_the_step_s_reward() -> None:
    rollouts = make(prompts=1, limit=4, filters=2)
    verdicts = []
    for request in rollouts.dispatch(version=0, now=0.0) + rollouts.dispatch(version=0, now=0.0):
        (group,) = rollouts.arrive(answers(request, 0))
        verdicts.append(rollouts.scored(group, [(1.0, True), (1.0, True)]))
    assert verdicts == [Verdict.FILTERED, Verdict.FILTERED]
    assert rollouts.can_dispatch(version=0)  # filtered prompts gave up their room
    request, other = rollouts.dispatch(version=0, now=0.0)
    (group,) = rollouts.arrive(answers(request, 0))
    assert rollouts.scored(group, [(0.0, False), (0.0, False)]) is Verdict.BUFFERED
    taken = rollouts.take(1, version=0)
    assert taken is not None
    assert (taken[0].ordinals, taken[1].filtered, taken[1].samples) == ((2,), (0, 1), 2)
    assert (taken[1].reward, taken[1].correct) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert [row.advantage for row in taken[0].rows] == [0.0, 0.0]
    rollouts.commit(1, (2,))
    (group,) = rollouts.arrive(answers(other, 0))
    assert rollouts.scored(group, [(1.0, True), (1.0, True)]) is Verdict.FILTERED  # the next step filters anew
    rollouts.check()
    assert rollouts.ledger.counts().filtered == 3


def test_a_failed_group_is_answered_again_and_late_answers_of_the_failed_try_are_dropped() -> None:
    rollouts = make()
    request, *_ = rollouts.dispatch(version=0, now=0.0)
    (overdue, *_) = rollouts.overdue(now=10.1)
    assert overdue.ordinal == 0
    assert rollouts.failed(overdue) is None
    assert rollouts.arrive(answers(request, 0)) == []
    again = next(r for r in rollouts.dispatch(version=0, now=10.1) if r.tag[0] == 0)
    assert again.tag == (0, 1)
    finish(rollouts, again, 0)
    assert rollouts.ledger.state_of(0) is State.BUFFERED


def test_a_prompt_that_always_fails_is_skipped_by_name_after_its_budget() -> None:
    rollouts = make(budget=2)
    causes = []
    for _ in range(3):
        request = next(r for r in rollouts.dispatch(version=0, now=0.0) if r.tag[0] == 0)
        causes.append(rollouts.failed(open_group(rollouts, request)))
    assert causes == [None, None, SkipCause.RETRY_BUDGET_EXHAUSTED]
    assert rollouts.ledger.skipped_names() == {"RetryBudgetExhausted": [0]}
    rollouts.ledger.check()


def test_a_prompt_that_does_not_fit_is_skipped_and_another_takes_its_place() -> None:
    source = SeekableSource([Row((1,) * length, "") for length in (2, 9, 2)], seed=0, shuffle=False)
    rollouts = Rollouts(source, Window(2, 1, 50), RolloutSettings(G, 4, 4, 10.0, 1))
    assert [r.tag[0] for r in rollouts.dispatch(version=0, now=0.0)] == [0, 2, 3, 5]
    assert rollouts.ledger.skipped_names() == {"PromptTooLong": [1, 4]}


def test_a_resumed_run_keeps_finished_groups_and_hands_the_others_out_again() -> None:
    rollouts = make(prompts=2, limit=4)
    requests = rollouts.dispatch(version=0, now=0.0)
    for request in requests[:3]:
        finish(rollouts, request, 0)
    assert rollouts.take(1, version=0) is not None
    rollouts.commit(1, (0, 1))
    saved = json.loads(json.dumps(rollouts.snapshot()))

    resumed = make(prompts=2, limit=4)
    report = resumed.restore(saved)
    assert (report.handed_out, report.restored_groups, report.rehanded) == (4, 1, [3])
    assert [r.tag[0] for r in resumed.dispatch(version=1, now=0.0)] == [3, 4, 5]
    finish(resumed, Request((3, 0), (), G), 1)
    taken = resumed.take(2, version=1)
    assert taken is not None
    assert taken[0].ordinals == (2, 3)


def test_restored_groups_that_are_too_old_or_incomplete_are_answered_again() -> None:
    rollouts = make(prompts=2, limit=4)
    for request in rollouts.dispatch(version=0, now=0.0)[:2]:
        finish(rollouts, request, 0)
    saved = rollouts.snapshot()
    saved["buffer"][0]["answers"].pop()
    resumed = make(prompts=2, limit=4)
    assert resumed.restore(saved).rehanded == [0, 2, 3]
    assert resumed.take(6, version=5) is None
    assert resumed.ledger.state_of(1) is State.RETRYABLE
    resumed.ledger.check()


def test_other_data_is_refused_on_resume() -> None:
    saved = make(seed=0).snapshot()
    with pytest.raises(SourceChangedError, match="the data has changed since the checkpoint: seed was 0 and is 1"):
        make(seed=1).restore(saved)


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_train_every_prompt_once_in_time_and_end_empty(seed: int) -> None:
    """Answers in any order, failures, restarts at any step: nothing lost, nothing twice, nothing too old."""
    rng = random.Random(seed)
    max_age, steps = rng.choice((1, 2)), 25
    rollouts = make(max_age=max_age, steps=steps, limit=rng.randint(3, 12), budget=100)
    in_flight: dict[tuple[int, int], tuple[Request, int]] = {}
    trained: list[int] = []
    version = 0
    while version < steps:
        in_flight |= {r.tag: (r, version) for r in rollouts.dispatch(version, 0.0)}
        rollouts.ledger.check()
        taken = rollouts.take(version + 1, version)
        if taken is None:
            tag = rng.choice(list(in_flight))
            request, first = in_flight.pop(tag)
            if rng.random() < 0.2:
                (group,) = rollouts.arrive(answers(request, first))
                rollouts.failed(group)
            else:
                finish(rollouts, request, first, version)
            continue
        assert taken[1].oldest_age <= max_age
        version += 1
        rollouts.commit(version, taken[0].ordinals)
        trained.extend(taken[0].ordinals)
        if rng.random() < 0.2:
            saved = json.loads(json.dumps(rollouts.snapshot()))
            rollouts, in_flight = make(max_age=max_age, steps=steps, budget=100), {}
            rollouts.restore(saved)
    counts = rollouts.ledger.counts()
    assert counts.live == 0
    assert sorted(trained) == list(range(steps * 4))
    assert counts.handed_out == counts.trained == steps * 4


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 20),
    st.sampled_from([0, 4]),
    st.integers(1, 8),
)
def test_prompts_that_are_asked_for_while_a_step_is_trained_are_those_that_its_commit_makes_room_for(
    seed: int, prompts: int, max_age: int, limit: int, filters: int, steps: int
) -> None:
    """Two books of one run, one asked before each commit and one behind it, say the same after each commit."""
    early, late = (make(prompts=prompts, max_age=max_age, limit=limit, filters=filters, steps=steps) for _ in range(2))
    rng, open_ = random.Random(seed), []
    open_ += early.dispatch(0, 0.0)
    assert late.dispatch(0, 0.0) == open_
    for step in range(1, steps + 1):
        while early.missing(step - 1):
            open_ += (more := early.dispatch(step - 1, 0.0))
            assert late.dispatch(step - 1, 0.0) == more
            request = open_.pop(rng.randrange(len(open_)))
            kind = rng.random()
            for books in (early, late):
                (group,) = books.arrive(answers(request, step - 1))
                if kind < 0.1:
                    books.failed(group)
                else:
                    books.scored(group, [(0.0, False), (0.0 if kind < 0.3 else 1.0, False)])
        taken, other = early.take(step, step - 1), late.take(step, step - 1)
        assert taken is not None
        assert taken == other
        asked = early.dispatch(step, 0.0) if step < steps else []
        early.check()
        early.commit(step, taken[0].ordinals)
        late.commit(step, taken[0].ordinals)
        assert step == steps or late.dispatch(step, 0.0) == asked
        open_ += asked
        assert early.ledger.counts() == late.ledger.counts()
        assert early.snapshot() == late.snapshot()
    assert early.ledger.counts().live == 0
