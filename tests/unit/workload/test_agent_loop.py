"""The loop that agents in Python may use, against a collector whose ranks are plain Python."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy
import pytest
import torch
from aiohttp import web

from rljob_workload.agents import hints, loop
from rljob_workload.agents.results import UnusableError, result_of
from rljob_workload.server.errors import ApiError

from .fake_ranks import FakeTrainer
from .playing import SOON, Play, playing


async def played_out(play: Play, plays: asyncio.Task[None]) -> None:
    """Five steps, and an agent that ends with the run: every prompt of theirs is trained and none skipped."""
    await asyncio.wait_for(trained(play, 5), SOON)
    await play.collector.close()
    await asyncio.wait_for(plays, SOON)
    assert play.collector.counters()["counts"]["trained"] == 10
    assert play.collector.counters()["counts"]["skipped"] == 0


async def trained(play: Play, steps: int) -> None:
    """So many steps; the ranks train nothing."""
    play.rank.train = FakeTrainer(0, [])  # type: ignore[attr-defined]
    for step in range(1, steps + 1):
        assert await play.collector.step(step, True, step < steps) is not None


def agent(play: Play, do: loop.Play, at_once: int = 64) -> asyncio.Task[None]:
    return asyncio.create_task(loop.serve(do, play.url, "secret", at_once))


async def test_the_example_plays_a_run_from_its_first_prompt_to_its_end(tmp_path: Path) -> None:
    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        await played_out(play, agent(play, lambda session, rollout: hints.play(session, rollout, 2)))


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
        await asyncio.wait_for(until(lambda: sum(reports) >= 20), SOON)  # of 10 prompts with 2 rollouts each
        assert not plays.done()
        plays.cancel()
        assert most == 3
        assert max(reports) > 1, "several results in one request"
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


class Rude:
    """What raises wherever it is looked at."""

    def __float__(self) -> float:
        raise ZeroDivisionError("of its own")

    def __repr__(self) -> str:
        raise ZeroDivisionError("of its own")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"reward": math.nan}, "play gave {'reward': nan}: reward is not finite"),
        ({"reward": "much"}, "reward is no number"),
        ({"reward": True}, "reward is no number"),
        ({"correct": True}, "reward is no number"),
        ({"reward": 1.0, "correct": {1}}, "correct is not true or false"),
        ({"reward": 1.0, "id": "0.0.1"}, "'id' is unknown"),
        ({"reward": 10**5000}, "play gave a dict: int too large"),
        ({"reward": Rude()}, "of its own"),
        ({"error": Rude()}, "of its own"),
        (None, "play gave None: a result is"),
        ("x" * 10_000, "a result is"),
        (asyncio.CancelledError(), "cancelled, and not by the loop"),
        # refused by the trainer
        ({"reward": 1e40}, "400 reward: 1e+40 is no number"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_is_no_result_costs_its_rollout_and_no_other(tmp_path: Path, capsys: Any, given: Any, told: str) -> None:
    """Its try fails at once: with the hour that a late one takes here, the step would not end."""
    tries: list[str] = []

    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> Any:
        result = await hints.play(session, rollout, 1)
        if rollout["id"] in ("0.0.0", "0.1.0"):
            tries.append(rollout["id"])
        if rollout["id"] != "0.0.0":
            return result
        if isinstance(given, asyncio.CancelledError):
            raise given
        return given

    async with playing(tmp_path, maxInFlightPrompts=2, answerTimeoutSeconds=3600) as play:
        plays = agent(play, do)
        try:
            await asyncio.wait_for(trained(play, 1), SOON)
            await asyncio.wait_for(until(lambda: len(tries) == 2), SOON)
        finally:
            plays.cancel()
        line = capsys.readouterr().err
        assert told in line
        assert line.startswith("0.0.0: ")
        assert len(line) <= 320
        assert line.count("\n") == 1
        assert tries == ["0.0.0", "0.1.0"], "the prompt was played again"


def test_scalars_of_numerical_libraries_are_numbers_and_long_errors_are_cut() -> None:
    class Scalar:
        def __float__(self) -> float:
            return 0.5

    assert result_of({"reward": Scalar()}) == {"reward": 0.5}
    for half, true in ((numpy.float32(0.5), numpy.bool_(True)), (torch.tensor(0.5), torch.tensor(True))):
        read = result_of({"reward": half, "correct": true})
        assert read == {"reward": 0.5, "correct": True}
        assert type(read["correct"]) is bool
        with pytest.raises(UnusableError, match="reward is no number"):
            result_of({"reward": true})
        with pytest.raises(UnusableError, match="correct is not true or false"):
            result_of({"reward": half, "correct": half})
    assert result_of({"error": ValueError("y" * 200_000)}) == {"error": "y" * 300}
    with pytest.raises(UnusableError, match=r"play gave {'reward': array"):
        result_of({"reward": numpy.ones(2)})


async def test_a_result_without_a_turn_is_refused_and_its_prompt_played_again_at_once(tmp_path: Path, capsys: Any) -> None:
    begun: list[str] = []

    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> loop.Result:
        begun.append(rollout["id"])
        return {"reward": 0.0} if rollout["id"] == "0.0.0" else await hints.play(session, rollout, 1)

    async with playing(tmp_path, maxInFlightPrompts=2, answerTimeoutSeconds=3600) as play:
        plays = agent(play, do)
        try:
            await asyncio.wait_for(trained(play, 1), SOON)
            await asyncio.wait_for(until(lambda: "0.1.0" in begun), SOON)
            assert "0.0.0: 409 rollout 0.0.0: nothing was generated" in capsys.readouterr().err
            assert play.collector.counters()["counts"]["skipped"] == 0
        finally:
            plays.cancel()


async def test_a_play_that_hangs_is_given_up_when_its_rollout_is_over_and_not_before(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's clock stands still in pauses, so that `timeout_seconds` have passed says nothing yet."""
    monkeypatch.setattr(loop, "LOOK_SECONDS", 0.01)
    tries: list[str] = []
    asked = 0
    original = loop.Loop._left

    async def left(self: loop.Loop, rollout: loop.Rollout) -> float | None:
        nonlocal asked
        asked += 1
        return await original(self, rollout)

    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> loop.Result:
        tries.append(rollout["id"])
        if len(tries) <= 4:
            await asyncio.Event().wait()  # a tool that never answers
        return await hints.play(session, rollout, 1)

    monkeypatch.setattr(loop.Loop, "_left", left)
    async with playing(tmp_path, maxInFlightPrompts=2, answerTimeoutSeconds=3600) as play:
        front = play.collector._house._front  # type: ignore[union-attr]
        assert front is not None
        assert front._players is not None
        monkeypatch.setattr(front._players, "_rollout_seconds", 0.02)
        plays = agent(play, do, at_once=4)
        try:
            await asyncio.wait_for(until(lambda: asked >= 12), SOON)
            assert sorted(tries) == ["0.0.0", "0.0.1", "1.0.0", "1.0.1"]
            for name in ("0.0.0", "1.0.0"):
                assert (await play.result({"id": name}, error="over"))[0] == 200
            await asyncio.wait_for(trained(play, 1), SOON)
            told = capsys.readouterr().err.splitlines()
            assert sorted(told) == [f"{name}: not played within 0.02 s" for name in ("0.0.0", "0.0.1", "1.0.0", "1.0.1")]
        finally:
            plays.cancel()


@pytest.mark.parametrize("trouble", ["full", "dropped before", "dropped after"])
async def test_requests_that_nobody_served_are_repeated_and_results_count_once(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(hints, "RETRY_SECONDS", 0.01)
    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        front = play.collector._house._front  # type: ignore[union-attr]
        assert front is not None
        assert front._players is not None
        met = {name: troubled(front._players, name, trouble, monkeypatch) for name in ("next", "results", "turn")}
        if trouble == "dropped after":  # rollouts of a lost answer come again when they are late
            monkeypatch.setattr(front._players, "next", met["next"].original)
        await played_out(play, agent(play, lambda session, rollout: hints.play(session, rollout, 2)))
        assert met["results"].left == met["turn"].left == 0
        assert capsys.readouterr().err == ""


async def test_an_agent_waits_for_a_server_that_is_not_there_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 0.01)
    address = socket.socket()
    address.bind(("127.0.0.1", 0))  # nobody listens
    url = f"http://127.0.0.1:{address.getsockname()[1]}/v1"

    async def do(session: aiohttp.ClientSession, rollout: loop.Rollout) -> loop.Result:
        raise AssertionError("no rollout was given out")

    async def over(request: web.Request) -> web.Response:
        return web.json_response({"rollouts": [], "over": True})

    with monkeypatch.context() as short:
        short.setattr(loop, "TROUBLE_SECONDS", 0.05)
        with pytest.raises(loop.AgentError, match=r"GET rollouts/next failed: ClientConnectorError.*tried for 0.05 s"):
            await asyncio.wait_for(loop.serve(do, url, "secret"), SOON)
    waits = asyncio.create_task(loop.serve(do, url, "secret"))
    await asyncio.wait({waits}, timeout=0.05)
    assert not waits.done()
    app = web.Application()
    app.router.add_get("/v1/rollouts/next", over)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, address).start()
        await asyncio.wait_for(waits, SOON)
    finally:
        await runner.cleanup()


def test_a_full_server_says_when_to_come_again() -> None:
    def wait(**headers: str) -> float:
        return loop.retry_after(SimpleNamespace(headers=headers), 0.1)  # type: ignore[arg-type]

    assert wait() == 0.1
    assert wait(**{"Retry-After": "3"}) == 3.0
    assert wait(**{"Retry-After": "0"}) == 0.1
    assert wait(**{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}) == 0.1


async def test_a_turn_is_asked_for_once_more_and_no_oftener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "RETRY_SECONDS", 0.01)
    async with playing(tmp_path) as play:
        front = play.collector._house._front  # type: ignore[union-attr]
        assert front is not None
        assert front._players is not None
        (rollout, *_) = await play.next()
        with monkeypatch.context() as broken:
            met = troubled(front._players, "turn", "full", broken, times=3)
            result = await hints.play(play.session, rollout, 1)
        assert result["error"].startswith("turn 1: 503")
        assert met.left == 1
        assert "reward" in await hints.play(play.session, rollout, 1)


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


class Troubled:
    """A request's handler in whose way something comes the first times."""

    def __init__(self, original: Callable[..., Awaitable[Any]], trouble: str, times: int) -> None:
        self.original = original
        self.left = times
        self._trouble = trouble

    async def __call__(self, request: Any, *args: Any) -> Any:
        if not self.left:
            return await self.original(request, *args)
        self.left -= 1
        if self._trouble == "full":
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "full", headers={"Retry-After": "0.01"})
        if self._trouble == "dropped after":
            await self.original(request, *args)
        request.transport.abort()
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "nobody reads this")


def troubled(players: Any, name: str, trouble: str, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> Troubled:
    """Puts it before a handler of the server's."""
    handler = Troubled(getattr(players, name), trouble, times)
    monkeypatch.setattr(players, name, handler)
    return handler
