"""The loop that agents in Python may use, against a collector whose ranks are plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rljob_workload.agents import hints, loop

from .fake_ranks import FakeTrainer
from .test_players import SOON, Play, playing


async def trained(play: Play, steps: int) -> None:
    """So many steps; the ranks train nothing."""
    play.rank.train = FakeTrainer(0, [])  # type: ignore[attr-defined]
    for step in range(1, steps + 1):
        assert await play.collector.step(step, True, step < steps) is not None


def agent(play: Play, do: loop.Play, at_once: int = 64) -> asyncio.Task[None]:
    return asyncio.create_task(loop.serve(do, play.url, "secret", at_once))


async def test_the_example_plays_a_run_from_its_first_prompt_to_its_end(tmp_path: Path) -> None:
    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        plays = agent(play, lambda session, rollout: hints.play(session, rollout, 2))
        await asyncio.wait_for(trained(play, 5), SOON)
        await play.collector.close()
        await asyncio.wait_for(plays, SOON)
        assert play.collector.counters()["counts"]["trained"] == 10
        assert play.collector.counters()["counts"]["skipped"] == 0


async def test_so_many_rollouts_are_played_at_once_and_results_go_together(tmp_path: Path, capsys: Any) -> None:
    playing_now: set[str] = set()
    most = 0
    every_place_is_taken = asyncio.Event()

    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> loop.Result:
        nonlocal most
        playing_now.add(rollout["id"])
        most = max(most, len(playing_now))
        if len(playing_now) == 3:
            every_place_is_taken.set()
        async with session.post(rollout["base_url"] + "/completions", json={"prompt": rollout["prompt"]}) as response:
            assert response.status == 200
        await asyncio.wait_for(every_place_is_taken.wait(), SOON)
        playing_now.discard(rollout["id"])
        return {"reward": float(rollout["id"].endswith("0"))}

    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        reports = counted(play)
        plays = agent(play, do, at_once=3)
        await asyncio.wait_for(trained(play, 5), SOON)
        assert not plays.done()
        plays.cancel()
        assert most == 3
        assert max(reports) > 1, "several results in one request"
        assert sum(reports) >= 20, "of 10 prompts with 2 rollouts each"
        assert capsys.readouterr().err == ""


async def test_a_place_that_is_free_is_filled_also_while_the_others_are_slow(tmp_path: Path) -> None:
    """Few free places wait for the next report, but not for ever: no report may come for long."""
    begun: list[str] = []

    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> loop.Result:
        begun.append(rollout["id"])
        await asyncio.sleep(SOON)
        return {"error": "too slow"}

    async with playing(tmp_path, maxInFlightPrompts=3) as play:
        assert play.collector._players is not None
        (mine, other, *_) = await play.next(3)
        plays = agent(play, do, at_once=4)  # three rollouts are left for its four places
        await asyncio.wait_for(until(lambda: len(begun) == 3), SOON)
        await play.result(other, error="give the prompt to somebody else")
        await asyncio.wait_for(until(lambda: len(begun) == 4), SOON)
        assert mine["id"] not in begun
        plays.cancel()


async def test_what_is_wrong_with_a_result_is_told_and_the_others_count(tmp_path: Path, capsys: Any) -> None:
    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> loop.Result:
        if rollout["id"] == "0.0.0":
            return {"reward": "much"}
        return await hints.play(session, rollout, 1)

    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        plays = agent(play, do)
        try:
            await asyncio.wait_for(trained(play, 1), SOON)
            assert "0.0.0: 400 reward: much is no number" in capsys.readouterr().err
        finally:
            plays.cancel()


async def test_an_agent_that_fails_ends_with_its_failure(tmp_path: Path) -> None:
    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> loop.Result:
        raise ZeroDivisionError("of the agent's own")

    async with playing(tmp_path) as play:
        with pytest.raises(ZeroDivisionError, match="of the agent's own"):
            await asyncio.wait_for(agent(play, do), SOON)
        with pytest.raises(loop.AgentError, match="was answered with 401"):
            await asyncio.wait_for(loop.serve(do, play.url, "wrong"), SOON)


async def until(holds: Callable[[], bool]) -> None:
    """As soon as it holds."""
    while not holds():  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


def counted(play: Play) -> list[int]:
    """Results of each request for the book of rollouts; the request's are told under one lock."""
    front = play.collector._house._front  # type: ignore[union-attr]
    assert front is not None
    assert front._players is not None
    counts: list[int] = []
    original: Callable[..., Awaitable[Any]] = front._players.results

    async def results(request: Any) -> Any:
        before = play.collector._players.reports  # type: ignore[union-attr]
        answer = await original(request)
        counts.append(play.collector._players.reports - before)  # type: ignore[union-attr]
        return answer

    front._players.results = results  # type: ignore[method-assign]
    return counts
