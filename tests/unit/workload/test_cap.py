"""The cap on groups in flight: what an actor can take."""

from __future__ import annotations

import pytest

from rljob_workload.core.cap import CapError, in_flight_cap


@pytest.mark.parametrize(
    ("configured", "calls", "effective"),
    [
        (None, 0, 16),  # P * age; decoding in slices needs no call per answer
        (5, 0, 5),
        (5000, 0, 5000),
        (None, 8, 16),
        (200, 8, 112),  # (1000 - 100) // 8
        (112, 8, 112),
        (16, 900, 1),
    ],
)
def test_the_cap_is_what_is_asked_for_within_the_actor_s_calls(configured: int | None, calls: int, effective: int) -> None:
    cap = in_flight_cap(configured, prompts_per_step=8, max_age=2, calls_per_group=calls)
    assert cap.effective == effective
    assert bool(cap.reason) is (cap.effective != cap.configured)
    assert cap.configured == (16 if configured is None else configured)


def test_a_lowered_cap_says_why_and_warns_below_one_step() -> None:
    cap = in_flight_cap(200, prompts_per_step=32, max_age=1, calls_per_group=64)
    assert cap.effective == 14
    assert cap.reason == "an actor runs 1000 calls at once, 100 are kept free, and a group needs 64"
    assert cap.warning == "fewer than one step's 32 prompts are answered at once"
    assert not in_flight_cap(200, prompts_per_step=8, max_age=1, calls_per_group=64).warning


def test_a_group_that_does_not_fit_at_all_is_an_error() -> None:
    with pytest.raises(CapError, match="a group needs 901; lower generationsPerPrompt"):
        in_flight_cap(None, prompts_per_step=1, max_age=1, calls_per_group=901)
