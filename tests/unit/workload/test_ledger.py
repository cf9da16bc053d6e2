"""The ledger: legal moves only, a partition that always adds up, and a JSON form that loses nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_workload.core.ledger import Ledger, LedgerError, SkipCause, State
from rljob_workload.core.ledger_file import LedgerFormatError, ledger_from_json, ledger_to_json, resume_in_flight

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
    "reopen": {State.IN_FLIGHT, State.BUFFERED},
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
        ledger_to_json(ledger_with(State.TRAINING))


def through_json(ledger: Ledger) -> Ledger:
    restored = ledger_from_json(json.loads(json.dumps(ledger_to_json(ledger))))
    restored.check()
    return restored


def test_what_was_in_flight_is_pending_after_a_restart() -> None:
    restored = through_json(ledger_with(State.IN_FLIGHT))
    assert restored.state_of(0) is State.IN_FLIGHT  # the file says what was, for people
    resume_in_flight(restored)
    assert restored.state_of(0) is State.PENDING
    assert restored.counts().handed_out == 1
    restored.check()


def test_the_file_keeps_failures_debts_names_and_the_last_commit() -> None:
    ledger = Ledger()
    for _ in range(9):
        ledger.dispatch(ledger.hand_out())
    for ordinal in (0, 1, 2, 3, 5, 6, 7):
        ledger.finish(ordinal)
    ledger.evict(6)
    ledger.dispatch(6)
    ledger.fail(6)
    ledger.fail(8)
    ledger.skip(8, SkipCause.RETRY_BUDGET_EXHAUSTED)
    ledger.take([0, 1, 2])
    ledger.commit(3, [0, 1, 2])
    ledger.at_risk = 7
    saved = ledger_to_json(ledger)
    assert saved["window"] == "b,i,b,R:1,b,d"
    restored = through_json(ledger)
    assert restored.counts() == ledger.counts()
    assert (restored.failures_of(6), restored.is_owed(6), restored.is_owed(7)) == (1, True, False)
    assert restored.skipped_names() == {"RetryBudgetExhausted": [8]}
    assert restored.commit(3, [2, 1, 0]) is False
    with pytest.raises(LedgerError, match="commit of step 2 after the commit of step 3"):
        restored.commit(2, [3])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 1}, "version"),
        ({"version": 3}, "version"),
        ({"trained": "many"}, "trained"),
        ({"trained": -1}, "trained"),
        ({"trained": True}, "trained"),
        ({"trained": 5}, "window"),
        ({"next_ordinal": 2**70}, "window"),
        ({"frontier_ordinal": 9}, "frontier_ordinal"),
        ({"skipped": {"Bored": 1}}, "skipped"),
        ({"skipped": []}, "skipped"),
        ({"skipped_names": {"BadRow": [5]}}, "skipped_names"),
        ({"skipped_names": {"BadRow": "5"}}, "skipped_names"),
        ({"window": None}, "window"),
        ({"window": "x"}, "window"),
        ({"window": "d"}, "window"),
        ({"window": "2b"}, "window"),
        ({"window": ""}, "window"),
        ({"window": "999999999999b"}, "window"),
        ({"last_commit": {"step": 1}}, "digest"),
        ({"last_commit": 4}, "last_commit"),
        ({"at_risk": 1.5}, "at_risk"),
    ],
)
def test_a_broken_file_is_refused_and_the_field_is_named(change: dict[str, object], field: str) -> None:
    data = ledger_to_json(ledger_with(State.BUFFERED)) | change
    with pytest.raises(LedgerFormatError, match=f"field '{field}'") as caught:
        ledger_from_json(data)
    assert caught.value.field == field


@pytest.mark.parametrize("field", list(ledger_to_json(Ledger())))
def test_a_missing_field_is_named(field: str) -> None:
    data = ledger_to_json(ledger_with(State.BUFFERED))
    del data[field]
    with pytest.raises(LedgerFormatError, match=f"field '{field}'"):
        ledger_from_json(data)


@pytest.mark.parametrize("foreign", [None, [], "ledger", 7])
def test_a_foreign_file_is_refused(foreign: object) -> None:
    with pytest.raises(LedgerFormatError, match="expected an object"):
        ledger_from_json(foreign)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["b", "r", "fail", "evict", "done", "done", "done"]), max_size=400), st.integers(0, 10**7))
def test_the_file_costs_at_most_16_bytes_a_live_prompt_and_4_kilobytes(fates: list[str], first: int) -> None:
    ledger = Ledger.without_history(first, 0)
    for fate in fates:
        ordinal = ledger.hand_out()
        ledger.dispatch(ordinal)
        if fate == "fail":
            ledger.fail(ordinal)
        else:
            ledger.finish(ordinal)
        if fate == "evict":
            ledger.evict(ordinal)
        elif fate == "done":
            ledger.filter(ordinal)
        elif fate == "r":
            ledger.reopen(ordinal)
    for cause in SkipCause:
        for _ in range(150):
            ledger.skip(ledger.hand_out(), cause)
    size = len(json.dumps(ledger_to_json(ledger), separators=(",", ":")))
    assert size <= 16 * ledger.counts().live + 4096
    restored = through_json(ledger)
    assert restored.counts() == ledger.counts()
    assert restored.skipped_names() == ledger.skipped_names()
    assert {cause: len(names) for cause, names in ledger.skipped_names().items()} == dict.fromkeys(SkipCause, 100)


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
    restored = through_json(ledger)
    assert restored.counts().live == ledger.counts().live
    assert restored.trained == ledger.trained
    assert restored.frontier == ledger.frontier
    assert all(restored.is_done(o) == ledger.is_done(o) for o in range(ledger.next_ordinal))
