"""A step that the collector has trained and commits, in one call; slices asked for ahead, and failures of training."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_workload.core.handover import HandoverOrderError
from rljob_workload.core.ledger import LedgerError
from rljob_workload.megatron.errors import NonFiniteError
from rljob_workload.runtime.errors import HungError

from .fake_ranks import counts, soon, trainers


async def test_a_step_is_trained_by_all_ranks_in_their_order_and_committed_in_one_call(make: Any) -> None:
    collector, (ranks, trace) = make(), trainers(3)
    await collector.start([[ranks[0], ranks[2]], [ranks[1]]], 0, [[0, 2], [1]])
    stepped = await soon(collector.step(1, wake=True, onward=True))
    assert trace == [(number, (0, 1, 2, 3), True) for number in range(3)]
    assert (stepped.prompts, stepped.ranks, stepped.onward) == (4, [0, 1, 2], True)
    assert (stepped.counters["counts"]["trained"], stepped.counters["counts"]["training"]) == (4, 0)
    last = await soon(collector.step(2, wake=False, onward=False))
    assert trace[-1] == (2, (4, 5, 6, 7), False)
    assert (last.onward, (await collector.status())["state"]) == (False, "Paused")


async def test_with_a_server_an_interrupt_during_training_keeps_the_next_stretch_from_beginning(make: Any) -> None:
    collector, (ranks, _) = make(), trainers(1)
    collector._house = SimpleNamespace(open=list)
    ranks[0].train.during = lambda: collector.interrupt(1)
    await collector.start([ranks], 0)
    stepped = await soon(collector.step(1, wake=True, onward=True))
    assert (stepped.onward, (await collector.status())["state"]) == (False, "Paused")
    await collector.resume(1)
    assert (await soon(collector.step(2, wake=True, onward=True))).onward


async def test_the_next_slices_are_asked_for_right_behind_the_training_call(make: Any) -> None:
    """The books say what they would have said after the commit, the deadlines' clock stands, and nothing may be saved."""
    collector, (ranks, _), seen = make(), trainers(2), {}

    async def look() -> None:
        await collector.monitor.first(lambda: True if collector.rollouts.in_flight == 8 else None, 5)
        seen.update(counts(collector), clock=collector.now, again=collector.now, state=(await collector.status())["state"])
        with pytest.raises(LedgerError, match="no snapshot between take and commit"):
            await collector.snapshot()

    ranks[0].train.during = look
    for rank in ranks:
        rank.hold = lambda request: request.tag[0] >= 4
    await collector.start([[rank] for rank in ranks], 0)
    stepped = await soon(collector.step(1, wake=True, onward=True))
    assert seen.pop("clock") == seen.pop("again")
    assert seen == {"handed_out": 12, "training": 4, "in_flight": 8, "state": "Paused"}
    assert stepped.counters["counts"] | {"trained": 4, "training": 0} == stepped.counters["counts"]


async def test_an_interrupt_behind_which_slices_run_already_ends_the_next_step(make: Any) -> None:
    collector, (ranks, trace) = make(), trainers(1)
    ranks[0].train.during = lambda: collector.interrupt(1)
    await collector.start([ranks], 0)
    assert (await soon(collector.step(1, wake=True, onward=True))).onward
    await collector.interrupt(2)
    assert await soon(collector.step(2, wake=True, onward=True)) is None
    assert ((await collector.status())["state"], len(trace)) == ("Paused", 1)
    assert counts(collector)["trained"] == 4


async def test_a_failure_of_training_is_the_cause_and_not_the_slice_behind_it(make: Any) -> None:
    collector, (ranks, _) = make(), trainers(1)

    async def fail() -> None:
        ranks[0].error = HandoverOrderError("rank 0 is in Train, not in Decode")
        raise NonFiniteError("loss nan")

    ranks[0].train.during = fail
    await collector.start([ranks], 0)
    with pytest.raises(NonFiniteError, match="loss nan"):
        await soon(collector.step(1, wake=True, onward=True))
    await asyncio.sleep(0.01)
    with pytest.raises(NonFiniteError, match=r"^training: loss nan$"):
        await soon(collector.resume(1))
    assert counts(collector)["training"] == 4


async def test_what_a_rank_raises_while_it_trains_ends_the_step_uncommitted(make: Any) -> None:
    collector, (ranks, _) = make(), trainers(2)

    async def fail() -> None:
        raise NonFiniteError("loss nan")

    ranks[0].train.during = asyncio.Event().wait  # waits for its neighbour in a collective
    ranks[1].train.during = fail
    await collector.start([ranks], 0)
    with pytest.raises(NonFiniteError, match="loss nan"):
        await soon(collector.step(1, wake=True, onward=True))
    assert counts(collector)["training"] == 4


async def test_ranks_that_do_not_end_a_training_step_are_named(make: Any) -> None:
    collector, (ranks, _) = make(deadlines__stallSeconds=1), trainers(3)
    for rank in ranks[1:]:
        rank.train.during = asyncio.Event().wait
    await collector.start([[ranks[0], ranks[2]], [ranks[1]]], 0, [[0, 2], [1]])
    with pytest.raises(HungError, match=r"^train: no answer of rank 1, 2 within 1 s \(deadlines.stallSeconds\)$"):
        await soon(collector.step(1, wake=True, onward=True))
