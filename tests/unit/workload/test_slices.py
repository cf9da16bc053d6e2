"""When a decode slice returns, and how much of the cap each replica gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_workload.core.slices import SliceGoal, share_left

#: 16 groups of 8 answers are in flight, the engine has 96 slots, and there are more prompts.
BUSY = SliceGoal(want=16, refill_below=96)


@pytest.mark.parametrize(
    ("goal", "complete", "left", "reached", "why"),
    [
        (BUSY, 1, 120, False, "others wait for the slots that one group leaves"),
        (BUSY, 4, 96, False, "all slots are taken"),
        (BUSY, 4, 95, True, "a slot is idle and a group has made room"),
        (BUSY, 0, 80, False, "slots are idle, but unfinished groups hold all the room"),
        (BUSY, 16, 200, True, "the step has its last groups"),
        (SliceGoal(want=3), 2, 1, False, "nothing could fill a slot: the step's groups are all that counts"),
        (SliceGoal(want=3), 3, 90, True, "nothing could fill a slot, and they are there"),
        (SliceGoal(want=3), 0, 0, True, "nothing is left to do"),
    ],
)
def test_a_slice_returns_for_the_steps_last_groups_or_for_an_idle_slot_that_can_be_filled(
    goal: SliceGoal, complete: int, left: int, reached: bool, why: str
) -> None:
    assert goal.reached(complete, left) is reached, why


@pytest.mark.parametrize(
    ("groups", "replicas", "load", "more"),
    [(16, 2, 0, 8), (16, 2, 5, 3), (16, 2, 8, 0), (16, 2, 9, 0), (15, 2, 0, 8), (1, 4, 0, 1), (16, 1, 3, 13)],
)
def test_a_replica_takes_no_more_than_its_part_of_the_groups(groups: int, replicas: int, load: int, more: int) -> None:
    assert share_left(groups, replicas, load) == more


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 40))
def test_while_there_is_a_group_to_hand_out_some_replica_may_take_it(loads: list[int], more: int) -> None:
    assert any(share_left(sum(loads) + more, len(loads), load) for load in loads)
