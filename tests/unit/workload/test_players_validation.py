"""Validation that agents play."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rljob_workload.core.collecting import CollectorState
from rljob_workload.data.builtin import load_builtin
from rljob_workload.runtime.errors import HungError

from .playing import SOON, playing


async def test_validation_is_played_greedily_between_two_steps(tmp_path: Path) -> None:
    rows = [(index, load_builtin("copy3").rows[index]) for index in range(5)]
    async with playing(tmp_path) as play:
        await play.play(await play.next())
        await asyncio.wait_for(play.collector.take(1), SOON)
        await play.collector.commit(1, [0, 1])
        play.rank.asked.clear()
        validated = asyncio.create_task(play.collector.validate(rows))
        await asyncio.sleep(0)  # it has begun
        rollouts = (await play.next())[:5]
        assert [one["purpose"] for one in rollouts] == ["validate"] * 5, "they come before those that are trained"
        for number, rollout in enumerate(rollouts):
            assert (await play.turn(rollout, temperature=1.0))[0] == 200
            status, refusal = await play.result(rollout, reward=1.0)
            assert status == 400, refusal
            assert "correct: validation counts" in refusal["error"]["message"]
            if number == 4:
                await play.result(rollout, error="no idea")
            else:
                await play.result(rollout, reward=1.0, correct=number < 3)
        assert await asyncio.wait_for(validated, SOON) == 3
        assert all(request.sampling is not None and request.sampling.greedy for request in play.rank.asked)
        assert (await play.collector.status())["state"] == CollectorState.PAUSED
        await play.collector.resume(1)
        assert [one["purpose"] for one in await play.next()] == ["train"] * 2, "training goes on"


async def test_validation_that_is_not_reported_in_time_counts_as_wrong(tmp_path: Path) -> None:
    rows = [(index, load_builtin("copy3").rows[index]) for index in range(2)]
    async with playing(tmp_path) as play:
        assert play.collector._players is not None
        seconds = [0.0]
        play.collector._players._clock = lambda: seconds[0]
        await play.play(await play.next())
        await asyncio.wait_for(play.collector.take(1), SOON)
        await play.collector.commit(1, [0, 1])
        validated = asyncio.create_task(play.collector.validate(rows))
        await asyncio.sleep(0)  # it has begun
        (quick, *_) = await play.next()
        await play.turn(quick)
        await play.result(quick, reward=1.0, correct=True)
        seconds[0] = 121.0
        with play.collector.monitor.changing():
            pass  # have the keeper of deadlines look
        assert await asyncio.wait_for(validated, SOON) == 1


async def test_validation_that_nobody_takes_ends_and_says_so(tmp_path: Path) -> None:
    rows = [(index, load_builtin("copy3").rows[index]) for index in range(3)]
    async with playing(tmp_path) as play:
        await play.play(await play.next())
        await asyncio.wait_for(play.collector.take(1), SOON)
        await play.collector.commit(1, [0, 1])
        play.collector._spec = play.collector._spec.model_copy(
            update={"deadlines": play.collector._spec.deadlines.model_copy(update={"stall_seconds": 0.05})}
        )
        with pytest.raises(HungError, match=r"not reported 3 of 3 rollouts within 0.05 s .*, 3 of which none has taken"):
            await asyncio.wait_for(play.collector.validate(rows), SOON)


async def test_validation_that_an_agent_had_when_it_ended_is_played_again(tmp_path: Path) -> None:
    rows = [(index, load_builtin("copy3").rows[index]) for index in range(2)]
    async with playing(tmp_path) as play:
        assert play.collector._players is not None
        await play.play(await play.next())
        await asyncio.wait_for(play.collector.take(1), SOON)
        await play.collector.commit(1, [0, 1])
        validated = asyncio.create_task(play.collector.validate(rows))
        await asyncio.sleep(0)  # it has begun
        for by_itself in (False, True):
            assert len(await play.next(2)) == 2
            with play.collector.monitor.changing():
                play.collector._players.agent_ended("the agent ended", by_itself=by_itself)
        (right, poison) = await play.next(2)
        await play.turn(right)
        await play.result(right, reward=1.0, correct=True)
        with play.collector.monitor.changing():
            play.collector._players.agent_ended("the agent ended with exit code 3", by_itself=True)
        assert await asyncio.wait_for(validated, SOON) == 1
        assert (await play.turn(poison))[0] == 410
