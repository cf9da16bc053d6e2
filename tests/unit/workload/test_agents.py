"""Who has which rollout, and when a group is complete: the book of rollouts by itself."""

from __future__ import annotations

import pytest

from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.core.agents import AgentRollout, AgentRollouts, RolloutBusyError, RolloutOverError, RolloutUnknownError


def play(rollout: AgentRollout) -> None:
    rollout.trajectory.end((1, 4), Answer((-2, 1), (5,), (-0.5,), ((0, 0),)))


def test_a_group_is_complete_when_its_last_rollout_is_reported() -> None:
    book = AgentRollouts(1)
    book.open_group(Request((4, 0), (1, 4), 2), "4")
    first, second = book.hand_out(10)
    play(first)
    assert book.report(first.id, 0.5, correct=False) is None
    with pytest.raises(RolloutOverError, match=r"rollout 4\.0\.0 is over: it was reported with reward 0.5"):
        book.report(first.id, 1.0, correct=True)
    play(second)
    done = book.report(second.id, 1.0, correct=True)
    assert done is not None
    assert done.scores == ((0.5, False), (1.0, True))
    assert [answer.tag for answer in done.answers] == [(4, 0), (4, 0)]
    assert book.open == 0


def test_what_was_not_taken_not_played_or_given_up_cannot_be_reported() -> None:
    book = AgentRollouts(1)
    book.open_group(Request((4, 0), (1, 4), 2), "4")
    with pytest.raises(RolloutUnknownError):
        book.report("4.0.0", 1.0, correct=True)  # nobody has it
    first, second = book.hand_out(2)
    with pytest.raises(RolloutBusyError, match="nothing was generated"):
        book.report(first.id, 1.0, correct=True)
    second.turn = 17
    with pytest.raises(RolloutBusyError, match="a turn is being generated"):
        book.report(second.id, 1.0, correct=True)
    assert book.close_group((4, 0), "too late") == [17]
    with pytest.raises(RolloutOverError, match="too late"):
        book.get(first.id)
    with pytest.raises(RolloutUnknownError):
        book.get("5.0.0")


def test_rollouts_are_shared_out_over_the_replicas_by_what_each_has() -> None:
    book = AgentRollouts(2)
    for ordinal in range(3):
        book.open_group(Request((ordinal, 0), (1,), 2), "")
    taken = book.hand_out(6)
    assert [rollout.replica for rollout in taken] == [0, 1, 0, 1, 0, 1]
    book.close_group((0, 0), "given up")
    book.close_group((1, 0), "given up")
    book.open_group(Request((9, 0), (1,), 2), "")
    assert {rollout.replica for rollout in book.hand_out(6)} == {0, 1}
    assert book.waiting == 0


def test_a_group_that_was_given_up_while_it_waited_is_not_handed_out() -> None:
    book = AgentRollouts(1)
    book.open_group(Request((0, 0), (1,), 2), "")
    book.open_group(Request((1, 0), (1,), 2), "")
    book.close_group((0, 0), "too late")
    assert [rollout.tag for rollout in book.hand_out(4)] == [(1, 0), (1, 0)]


def test_the_oldest_prompt_is_handed_out_first_whenever_it_was_opened() -> None:
    book = AgentRollouts(1)
    for tag in ((3, 0), (5, 0), (1, 1), (4, 0)):
        book.open_group(Request(tag, (1,), 11), "")
    assert [rollout.id for rollout in book.hand_out(13)] == [*(f"1.1.{index}" for index in range(11)), "3.0.0", "3.0.1"]


def test_what_nobody_got_waits_again_in_its_place_and_what_is_played_is_left_alone() -> None:
    book = AgentRollouts(2)
    book.open_group(Request((1, 0), (1,), 3), "")
    book.open_group(Request((2, 0), (1,), 1), "")
    taken = book.hand_out(4, lambda purpose: 7.0)
    played, asked, untouched, other = taken
    play(played)
    asked.turn = 5
    book.close_group((2, 0), "given up meanwhile")
    assert book.put_back(taken) == [untouched]
    assert book.put_back(taken) == [], "not twice"
    assert (untouched.deadline, book.waiting, other.replica) == (None, 1, 1)
    book.open_group(Request((1, 9), (1,), 1), "")
    assert book.hand_out(1) == [untouched]
    assert untouched.replica == 0, "both replicas have one again"


def test_a_groups_first_due_rollout_is_one_that_an_agent_has() -> None:
    book = AgentRollouts(1)
    book.open_group(Request((1, 0), (1,), 3), "")
    assert book.first_due((1, 0)) is None
    (first,) = book.hand_out(1, lambda purpose: 7.0)
    (second,) = book.hand_out(1, lambda purpose: 8.0)
    assert book.first_due((1, 0)) is first
    play(first)
    book.report(first.id, 1.0, correct=True)
    assert book.first_due((1, 0)) is second
