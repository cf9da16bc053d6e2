"""Agents that fail, die, vanish or are slow: what it costs their prompts, and that nothing waits for ever."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from rljob_workload.core.source import Row
from rljob_workload.runtime import collector as module
from rljob_workload.runtime.errors import HungError
from rljob_workload.server.wire import hung_up

from .playing import SOON, called, failures, opened, playing, seen, untaken, waiting


async def test_an_error_costs_the_group_one_of_its_tries_and_then_the_prompt(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        rollouts = await play.next()
        assert (await play.result(rollouts[0], error="the tool is down"))[0] == 200
        status, answer = await play.turn(rollouts[1])
        assert status == 410, "its group has failed as a whole"
        assert "the tool is down" in answer["error"]["message"]
        again = await play.next()
        assert [one["id"] for one in again] == ["0.1.0", "0.1.1"]
        await play.result(again[0], error="still down")
        counters = play.collector.counters()
        assert counters["skipped_names"] == {"RetryBudgetExhausted": [0]}
        assert counters["counts"]["in_flight"] == 2, "another prompt has taken its place"


async def test_rollouts_of_a_dead_agent_are_played_again_and_those_it_had_not_taken_go_on(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        assert play.collector._players is not None
        (taken,) = await play.next(1)
        with play.collector.monitor.changing():
            play.collector._players.agent_ended("the agent ended with exit code 3", by_itself=True)
        assert (await play.turn(taken))[0] == 410
        await asyncio.wait_for(untaken(play, 4), SOON)
        rest = await play.next()
        assert sorted(one["id"] for one in rest) == ["0.1.0", "0.1.1", "1.0.0", "1.0.1"]
        assert play.collector.counters()["counts"]["skipped"] == 0
        assert failures(play) == {0: 0, 1: 0}


async def test_only_a_prompt_that_the_agent_has_at_two_ends_of_its_own_has_failed(tmp_path: Path) -> None:
    """Or a prompt that always ends it would be played for ever; whoever kills the agent from outside costs no prompt a try."""
    async with playing(tmp_path) as play:
        assert play.collector._players is not None
        for by_itself, most, failed in ((False, 4, {0: 0, 1: 0}), (False, 4, {0: 0, 1: 0}), (True, 1, {0: 0, 1: 0}),
                                        (False, 4, {0: 0, 1: 0}), (True, 4, {0: 1, 1: 0})):  # fmt: skip
            await asyncio.wait_for(untaken(play, 4), SOON)
            taken = await play.next(most)
            assert len(taken) == most
            with play.collector.monitor.changing():
                play.collector._players.agent_ended("the agent ended", by_itself=by_itself)
            assert failures(play) == failed
        await asyncio.wait_for(untaken(play, 4), SOON)
        assert len(await play.next()) == 4
        with play.collector.monitor.changing():
            play.collector._players.agent_ended("the agent ended", by_itself=True)
        assert play.collector.counters()["skipped_names"] == {"RetryBudgetExhausted": [0]}


async def test_what_an_agents_end_sets_free_is_not_given_to_those_of_its_requests_that_still_wait(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        assert play.collector._players is not None
        assert len(await play.next()) == 4
        waits = asyncio.create_task(play.next(wait=SOON))
        await asyncio.wait_for(waiting(play), SOON)
        with play.collector.monitor.changing():
            play.collector._players.agent_ended("the agent ended with exit code -9", by_itself=False)
        assert await asyncio.wait_for(waits, SOON) == []
        await asyncio.wait_for(untaken(play, 4), SOON)
        assert len(await play.next()) == 4


@pytest.mark.parametrize("how", ["next", "results"])
async def test_rollouts_for_a_client_that_is_gone_are_given_to_the_next_one(tmp_path: Path, how: str) -> None:
    body = b'{"results":[],"next":4}'
    line = b"GET /v1/rollouts/next?max=4 HTTP/1.1" if how == "next" else b"POST /v1/rollouts/results HTTP/1.1"
    head = b"\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    request = line + head + (b"\r\n" if how == "next" else b"Content-Length: %d\r\n\r\n" % len(body) + body)
    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        assert play.collector._players is not None
        await asyncio.wait_for(opened(play, 4), SOON)
        put_back = called(play.collector._players, "put_back")
        address = urlsplit(play.url)
        there = (str(address.hostname), address.port or 0)
        # Nothing is handed out before the client is gone.
        with play.collector.monitor.reading(), socket.create_connection(there) as client:
            client.sendall(request)
        await asyncio.wait_for(put_back.wait(), SOON)
        assert len(await play.next(8)) == 8
        assert failures(play) == dict.fromkeys(range(4), 0)


async def test_a_client_that_hangs_up_is_seen_before_the_event_loop_has_read_it() -> None:
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
    request: Any = SimpleNamespace(transport=transport)
    assert not hung_up(request)
    theirs.sendall(b"the next request")
    assert not hung_up(request)
    theirs.close()
    assert not transport.is_closing(), "the loop has had no turn"
    assert hung_up(request)
    transport.close()
    assert hung_up(request)


@pytest.mark.parametrize("purpose", ["train", "validate"])
async def test_a_rollout_that_still_counts_says_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str
) -> None:
    seconds = [0.0]
    monkeypatch.setattr(module.ActiveClock, "now", lambda self: seconds[0])
    async with playing(tmp_path, answerTimeoutSeconds=5) as play:
        assert play.collector._players is not None
        monkeypatch.setattr(play.collector._players, "_clock", lambda: seconds[0])
        name = "0.0.0"
        if purpose == "validate":
            name = "v1.7.1"
            with play.collector.monitor.changing():
                play.collector._players.open_validation([(7, Row((1, 4), "4"))])
        assert (await play.state(name))[0] == 404, "no agent has it"
        (rollout,) = await play.next(1)
        assert rollout["id"] == name
        told = {"id": name, "purpose": purpose, "turns": 0, "answering": False, "seconds_left": 5.0}
        assert await play.state(name) == (200, told)
        seconds[0] = 3.5
        play.rank.hold = lambda request: True
        turn = asyncio.create_task(play.turn(rollout))
        await asyncio.wait_for(seen(play, 1), SOON)
        assert await play.state(name) == (200, told | {"answering": True, "seconds_left": 1.5})
        play.rank.hold = lambda request: False
        assert (await asyncio.wait_for(turn, SOON))[0] == 200
        assert await play.state(name) == (200, told | {"turns": 1, "seconds_left": 1.5})
        async with play.session.post(f"{play.url}/rollouts/{name}", json={}) as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET")
        assert (await play.result(rollout, reward=0.5, correct=True))[0] == 200
        status, answer = await play.state(name)
        assert status == 410
        assert "it was reported" in answer["error"]["message"]
        assert (await play.state("9.9.9"))[0] == 404


async def test_a_rollout_that_was_given_up_says_why(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        first, second, *_ = await play.next()
        assert (await play.result(first, error="the tool is down"))[0] == 200
        status, answer = await play.state(second["id"])
        assert status == 410
        assert "the tool is down" in answer["error"]["message"]


async def test_a_rollouts_time_begins_when_an_agent_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rollouts than an agent plays at once, the others are not late for waiting."""
    seconds = [0.0]
    monkeypatch.setattr(module.ActiveClock, "now", lambda self: seconds[0])
    async with playing(tmp_path, answerTimeoutSeconds=5) as play:
        for number in range(4):
            seconds[0] += 4.0
            (rollout,) = await play.next(1)
            assert rollout["id"] == f"{number // 2}.0.{number % 2}", "of the first try"
            assert (await play.turn(rollout))[0] == 200
            seconds[0] += 4.0
            assert (await play.result(rollout, reward=number % 2))[0] == 200
        batch, _ = await asyncio.wait_for(play.collector.take(1), SOON)
        assert batch is not None
        assert batch.ordinals == (0, 1)


async def test_a_run_whose_agent_takes_nothing_ends_and_says_so(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        play.collector._spec = play.collector._spec.model_copy(
            update={"deadlines": play.collector._spec.deadlines.model_copy(update={"stall_seconds": 0.05})}
        )
        with pytest.raises(HungError, match=r"\(deadlines.stallSeconds\).*prompt 0 .*; 4 rollouts are taken by no agent"):
            await asyncio.wait_for(play.collector.take(1), SOON)


async def test_a_slow_agent_loses_its_rollout_and_its_turn_under_way_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    monkeypatch.setattr(module.ActiveClock, "now", lambda self: seconds[0])
    async with playing(tmp_path, answerTimeoutSeconds=5) as play:
        rollouts = await play.next(3)
        play.rank.hold = lambda request: True
        waits = asyncio.create_task(play.turn(rollouts[0]))
        await asyncio.wait_for(seen(play, 1), SOON)
        seconds[0] = 6.0
        with play.collector.monitor.changing():
            pass  # have the keeper of deadlines look
        status, answer = await asyncio.wait_for(waits, SOON)
        assert status == 410
        assert (
            "0 rollouts reported; rollout 0.0.0 is not, 5 s after an agent took it (generation.answerTimeoutSeconds)"
            in (answer["error"]["message"])
        )
        status, answer = await play.turn(rollouts[2])
        assert "0 rollouts reported, 1 taken by no agent; rollout 1.0.0 is not, 5 s after" in answer["error"]["message"]
        assert (await play.result(rollouts[0], reward=1.0))[0] == 410
