"""The ledger: legal moves only, a partition that always adds up, and a JSON form that loses nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_workload.core.ledger import Ledger, LedgerError, SkipCause, State, from_ranges, to_ranges

# How to bring a fresh prompt into each state.
PATHS = {
    State.PENDING: (),
    State.IN_FLIGHT: ("dispatch",),
    State.BUFFERED: ("dispatch", "finish"),
    State.TRAINING: ("dispatch", "finish", "take"),
    State.RETRYABLE: ("dispatch", "fail"),
}
LEGAL = {
    "dispatch": {State.PENDING, State.RETRYABLE},
    "finish": {State.IN_FLIGHT},
    "fail": {State.IN_FLIGHT},
    "evict": {State.IN_FLIGHT, State.BUFFERED},
    "take": {State.BUFFERED},
    "give_back": {State.TRAINING},
    "commit": {State.TRAINING},
    "filter": {State.BUFFERED},
    "skip": {State.PENDING, State.RETRYABLE},
}


def act(ledger: Ledger, action: str, ordinal: int, step: int = 1) -> None:
    match action:
        case "take" | "give_back":
            getattr(ledger, action)([ordinal])
        case "commit":
            ledger.commit(step, [ordinal])
        case "skip":
            ledger.skip(ordinal, SkipCause.BAD_ROW)
        case _:
            getattr(ledger, action)(ordinal)


def ledger_with(state: State) -> Ledger:
    ledger = Ledger()
    ordinal = ledger.hand_out()
    for action in PATHS[state]:
        act(ledger, action, ordinal)
    assert ledger.state_of(ordinal) is state
    return ledger


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("action", LEGAL)
def test_each_transition_is_allowed_from_its_states_only(action: str, state: State) -> None:
    ledger = ledger_with(state)
    before = ledger.counts()
    if state in LEGAL[action]:
        act(ledger, action, 0)
        ledger.check()
        assert ledger.counts() != before
    else:
        with pytest.raises(LedgerError, match="prompt 0"):
            act(ledger, action, 0)
        assert ledger.counts() == before


@pytest.mark.parametrize("action", LEGAL)
def test_a_prompt_that_is_not_live_is_refused_by_name(action: str) -> None:
    ledger = ledger_with(State.TRAINING)
    ledger.commit(1, [0])
    with pytest.raises(LedgerError, match=r"prompt 0 is not live \(done\)"):
        act(ledger, action, 0, step=2)
    with pytest.raises(LedgerError, match=r"prompt 7 is not live \(never handed out\)"):
        act(ledger, action, 7, step=2)


def test_a_repeated_commit_changes_nothing_and_another_one_of_that_step_is_refused() -> None:
    ledger = Ledger()
    for _ in range(3):
        ordinal = ledger.hand_out()
        ledger.dispatch(ordinal)
        ledger.finish(ordinal)
    ledger.take([0, 2])
    ledger.commit(1, [0, 2])
    counts = ledger.counts()
    ledger.commit(1, [2, 0])
    assert ledger.counts() == counts
    ledger.take([1])
    with pytest.raises(LedgerError, match="commit of step 1 after the commit of step 1"):
        ledger.commit(1, [1])


def test_take_moves_all_or_nothing() -> None:
    ledger = ledger_with(State.BUFFERED)
    ledger.hand_out()
    with pytest.raises(LedgerError, match="prompt 1 cannot go from pending to training"):
        ledger.take([0, 1])
    assert ledger.state_of(0) is State.BUFFERED


def test_the_frontier_waits_for_the_oldest_undone_prompt() -> None:
    ledger = Ledger()
    for _ in range(4):
        ordinal = ledger.hand_out()
        ledger.dispatch(ordinal)
        ledger.finish(ordinal)
    ledger.take([1, 2])
    ledger.commit(1, [1, 2])
    assert ledger.frontier == 0
    ledger.take([0])
    ledger.commit(2, [0])
    assert ledger.frontier == 3


def test_no_snapshot_while_a_step_is_open() -> None:
    with pytest.raises(LedgerError, match=r"\[0\] are in training"):
        ledger_with(State.TRAINING).to_json()


def test_what_was_in_flight_is_pending_after_a_restart() -> None:
    restored = Ledger.from_json(json.loads(json.dumps(ledger_with(State.IN_FLIGHT).to_json())))
    assert restored.state_of(0) is State.PENDING
    assert restored.counts().handed_out == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "ledger version 2"),
        ({"trained": "many"}, "malformed"),
        ({"trained": 5}, "does not add up"),
        ({"live": {"flying": [[0, 0]]}}, "malformed"),
        ({"done_above": None}, "malformed"),
    ],
)
def test_a_broken_file_is_refused_with_its_reason(change: dict[str, object], message: str) -> None:
    data = ledger_with(State.BUFFERED).to_json() | change
    with pytest.raises(LedgerError, match=message):
        Ledger.from_json(data)


@given(st.sets(st.integers(0, 300)))
def test_ranges_are_reversible(ordinals: set[int]) -> None:
    assert from_ranges(to_ranges(sorted(ordinals))) == sorted(ordinals)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["hand_out", *LEGAL]), st.integers(0, 12)), max_size=120))
def test_any_sequence_of_calls_keeps_the_partition_and_never_trains_twice(calls: list[tuple[str, int]]) -> None:
    ledger, trained, step = Ledger(), set[int](), 0
    for action, ordinal in calls:
        if action == "hand_out":
            ledger.hand_out()
            continue
        try:
            act(ledger, action, ordinal, step=step + 1)
        except LedgerError:
            continue
        if action == "commit":
            step += 1
            assert ordinal not in trained
            trained.add(ordinal)
        ledger.check()
    assert ledger.trained == len(trained)
    open_step = ledger.in_state(State.TRAINING)
    ledger.give_back(open_step)
    restored = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert restored.counts().live == ledger.counts().live
    assert restored.trained == ledger.trained
    assert restored.frontier == ledger.frontier
    assert all(restored.is_done(o) == ledger.is_done(o) for o in range(ledger.next_ordinal))
