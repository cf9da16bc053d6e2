"""Agents against the collector with ranks of plain Python: rollouts out, turns, rewards in, batches; and how it goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml

from rljob_workload.algorithm.advantages import LARGEST_REWARD
from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.core.collecting import CollectorState
from rljob_workload.core.slices import SliceGoal
from rljob_workload.data.builtin import load_builtin
from rljob_workload.runtime import collector as module
from rljob_workload.runtime import pumps
from rljob_workload.runtime.collector import Collector
from rljob_workload.runtime.errors import HungError
from rljob_workload.runtime.logs import close_files
from rljob_workload.server.place import ServerPlace

from .fake_ranks import FakeRank, FakeTrainer

ROOT = Path(__file__).parents[3]
#: Of every wait here; all of them take milliseconds on a machine that does nothing else.
SOON = 60.0
#: An agent that plays nothing: the tests do.
IDLE = ["python", "-c", "import time; time.sleep(600)"]


class Rank(FakeRank):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    async def remote(self, requests: list[Request], goal: SliceGoal) -> Any:
        self.asked += requests
        answered = await super().remote(requests, goal)
        if self.held and not answered.answers:
            await asyncio.sleep(0.001)  # as a slice takes time: a loop of empty ones would hold the lock nearly always
        return answered


@dataclass
class Play:
    """A collector, its rank, and an agent's view of it."""

    collector: Collector
    rank: Rank
    session: aiohttp.ClientSession
    url: str

    async def next(self, most: int = 64, wait: float = 10.0) -> list[dict[str, Any]]:
        async with self.session.get(f"{self.url}/rollouts/next", params={"max": most, "wait": wait}) as response:
            assert response.status == 200
            rollouts: list[dict[str, Any]] = (await response.json())["rollouts"]
            return rollouts

    async def turn(self, rollout: dict[str, Any], prompt: str | None = None, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"prompt": rollout["prompt"] if prompt is None else prompt, **more}
        async with self.session.post(rollout["base_url"] + "/completions", json=body) as response:
            return response.status, await response.json()

    async def result(self, rollout: dict[str, Any], **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.url}/rollouts/{rollout['id']}/result", json=body) as response:
            return response.status, await response.json()

    async def results(self, body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.url}/rollouts/results", json=body) as response:
            return response.status, await response.json()

    async def play(self, rollouts: list[dict[str, Any]]) -> None:
        """Two turns of each, rewards that differ."""
        rewards = itertools.cycle((0.0, 1.0))
        for rollout in rollouts:
            status, first = await self.turn(rollout)
            assert status == 200, first
            text = f"{rollout['prompt']}{first['choices'][0]['text']}:="
            status, _ = await self.turn(rollout, text)
            assert status == 200
            assert (await self.result(rollout, reward=next(rewards)))[0] == 200


@asynccontextmanager
async def playing(
    directory: Path, *, replicas: int = 1, environment: dict[str, Any] | None = None, **generation: Any
) -> AsyncIterator[Play]:
    """P = 2, G = 2, a retry budget of one."""
    spec = yaml.safe_load((ROOT / "examples" / "http-agent.yaml").read_text())["spec"]
    spec["algorithm"]["grpo"] |= {"promptsPerStep": 2, "generationsPerPrompt": 2, "microBatchSize": 2}
    spec["generation"] |= {"maxInFlightPrompts": 2, **generation}
    spec["environment"] = environment or {"agent": {"command": IDLE}}
    spec["prompts"] = {"retryBudget": 1}
    spec["trainer"]["ranksPerNode"] = replicas
    token = directory / "token"
    token.write_text("secret")
    collector = Collector(spec, str(directory), 1, ServerPlace("127.0.0.1", str(token), "agent"))
    ranks = [Rank() for _ in range(replicas)]
    for rank in ranks:
        rank.collector = collector
    urls = await collector.start([[rank] for rank in ranks], 0)
    try:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
            yield Play(collector, ranks[0], session, urls[0])
    finally:
        await collector.close()
        for task in list(collector._pumps._tasks):
            task.cancel()
        close_files()


async def test_a_batch_holds_what_the_engine_generated_and_nothing_else_counts(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        rollouts = await play.next()
        assert len(rollouts) == 4
        await play.play(rollouts)
        batch, info = await asyncio.wait_for(play.collector.take(1), SOON)
        assert info is not None
        assert batch is not None
        assert info.answer_tokens == batch.answer_tokens == 4 * 6
        for row in batch.rows:
            prompt = row.prompt_length
            assert row.spans == ((prompt, prompt + 3), (prompt + 5, prompt + 8))
            assert len(row.tokens) == prompt + 8
            assert row.logprobs == (-1.0,) * 6
            assert row.current
        assert sorted(row.advantage > 0 for row in batch.rows) == [False, False, True, True]


async def test_turns_wait_between_steps_and_none_fails(tmp_path: Path) -> None:
    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        rollouts = await play.next()
        await play.play(rollouts[:4])
        await asyncio.wait_for(play.collector.take(1), SOON)
        assert (await play.collector.status())["state"] == CollectorState.PAUSED
        slices = play.rank.slices
        waits = [asyncio.create_task(play.turn(rollout)) for rollout in rollouts[4:]]
        done, _ = await asyncio.wait(waits, timeout=0.2)
        assert done == set()
        assert play.rank.slices == slices
        await play.collector.commit(1, sorted({int(one["id"].split(".")[0]) for one in rollouts[:4]}), resume=True)
        assert [status for status, _ in await asyncio.wait_for(asyncio.gather(*waits), SOON)] == [200] * 4


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


async def test_a_burst_at_one_replica_does_not_hold_up_another(tmp_path: Path) -> None:
    seconds = [1.0]
    async with playing(tmp_path, replicas=2) as play:
        players, desk = play.collector._players, play.collector.desk
        assert players is not None
        players._clock = desk._clock = lambda: seconds[0]
        rollouts = await play.next(2)
        for rollout in rollouts:
            await play.turn(rollout)
        seconds[0] = 2.0
        replica = players.get(rollouts[1]["id"]).replica
        assert replica is not None
        await play.turn(rollouts[1], rollouts[1]["prompt"], return_token_ids=True)
        desk.submit(replica, (1,), 1, None, lambda got: None)
        assert (desk.newest(replica), desk.newest(1 - replica)) == (2.0, 1.0)
        await play.result(rollouts[1], reward=1.0)
        assert (players.newest(replica), players.newest(1 - replica)) == (2.0, 0.0)


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


async def test_one_turn_at_a_time_and_a_result_after_it(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        (rollout, *_) = await play.next()
        assert (await play.result(rollout, reward=1.0))[0] == 409, "nothing was generated"
        play.rank.hold = lambda request: True
        waits = asyncio.create_task(play.turn(rollout))
        await asyncio.wait_for(seen(play, 1), SOON)
        assert (await play.turn(rollout))[0] == 409
        assert (await play.result(rollout, reward=1.0))[0] == 409
        play.rank.hold = lambda request: False
        assert (await asyncio.wait_for(waits, SOON))[0] == 200
        for body in ({}, {"reward": "1"}, {"reward": True}, {"reward": 1, "correct": 1}, {"reward": 1, "tokens": []}):
            assert (await play.result(rollout, **body))[0] == 400
        status, answer = await play.turn(rollout, "9=")
        assert status == 400
        assert "does not begin with prompt and answer of turn 1" in answer["error"]["message"]
        assert (await play.result(rollout, reward=1.0))[0] == 200
        assert (await play.result({"id": "99.0.0"}, reward=1.0))[0] == 404


async def test_a_turn_whose_client_vanishes_leaves_the_rollout_as_it_was(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        (rollout, *_) = await play.next()
        play.rank.hold = lambda request: True
        leaves = asyncio.create_task(play.turn(rollout))
        await asyncio.wait_for(seen(play, 1), SOON)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        await asyncio.wait_for(free(play, rollout["id"]), SOON)  # the server has seen it before there is an answer
        play.rank.hold = lambda request: False
        status, answer = await play.turn(rollout, return_token_ids=True)
        assert status == 200, answer
        asked = len(play.rank.asked)
        assert asked == 2, "what was generated for nobody is no turn"
        again = await play.turn(rollout, return_token_ids=True)
        assert again[1]["choices"] == answer["choices"], "an answer that was lost on its way is told again"
        assert len(play.rank.asked) == asked, "and not generated anew"
        assert (await play.result(rollout, reward=1.0))[0] == 200


async def test_a_result_that_is_told_again_is_accepted_again_and_counts_once(tmp_path: Path) -> None:
    """An agent whose answer was lost must be able to tell a rollout that counts from one that was given up."""
    async with playing(tmp_path) as play:
        rollouts = await play.next()
        first, second, third, fourth = rollouts
        assert (await play.turn(first))[0] == (await play.turn(second))[0] == 200
        assert await play.result(first, reward=1.0, correct=True) == (200, {"accepted": True})
        assert await play.result(first, reward=1.0, correct=True) == (200, {"accepted": True}), "its group is open"
        assert (await play.result(first, reward=0.0))[0] == 410, "another verdict comes too late"
        assert (await play.result(second, reward=0.0))[0] == 200
        for rollout, verdict in ((first, {"reward": 1.0, "correct": True}), (second, {"reward": 0, "correct": None})):
            assert await play.result(rollout, **verdict) == (200, {"accepted": True}), "its group is complete"
        assert play.collector._players is not None
        assert play.collector._players.reports == 2
        assert (await play.turn(third))[0] == 200
        assert (await play.result(third, reward=1.0))[0] == 200
        for _ in range(2):
            assert (await play.result(fourth, error="the tool\nis \ud800 down"))[0] == 200
        status, answer = await play.result(third, reward=1.0)
        assert status == 410, "it was given up with its group"
        assert "the agent said: the tool is" in answer["error"]["message"]
        assert [one["id"] for one in await play.next() if one["id"][0] == "1"] == ["1.1.0", "1.1.1"], "one try is lost, not two"


async def test_results_of_one_request_count_each_by_itself_and_its_answer_brings_the_next_rollouts(tmp_path: Path) -> None:
    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        first, second, third, fourth = await play.next(4)
        for rollout in (first, second, third):
            assert (await play.turn(rollout))[0] == 200
        told = [
            {"id": first["id"], "reward": 1.0, "correct": True},
            {"id": second["id"], "reward": 0},
            {"id": third["id"], "reward": "much"},
            {"id": fourth["id"], "reward": 1.0},
            {"id": "99.0.0", "reward": 1.0},
        ]
        status, answer = await play.results({"results": told, "next": 3})
        assert (status, answer["over"]) == (200, False)
        assert [one["id"] for one in answer["results"]] == [one["id"] for one in told]
        assert [one["status"] for one in answer["results"]] == [200, 200, 400, 409, 404]
        assert "reward: much is no number" in answer["results"][2]["error"]["message"]
        assert [one["id"] for one in answer["rollouts"]] == ["2.0.0", "2.0.1", "3.0.0"]
        assert play.collector.counters()["counts"]["buffered"] == 1
        status, answer = await play.results({"results": [{"id": third["id"], "error": "no idea"}, *told[:1]]})
        assert [one["status"] for one in answer["results"]] == [200, 200], "the second was told before, and counts once"
        assert answer["rollouts"] == [], "none were asked for"
        await asyncio.wait_for(untaken(play, 3), SOON)
        assert [one["id"] for one in await play.next(3)] == ["1.1.0", "1.1.1", "3.0.1"], "its prompt is played again, and first"


@pytest.mark.parametrize(
    "body",
    [
        {"results": {}},
        {"results": [1]},
        {"results": [{"reward": 1.0}]},
        {"results": [{"id": 1, "reward": 1.0}]},
        {"results": [{"id": "0.0.0", "reward": 1.0}] * 257},
        {"results": [], "next": 257},
        {"results": [], "next": True},
        {"result": []},
    ],
)
async def test_a_request_that_holds_no_results_is_refused_as_a_whole(tmp_path: Path, body: dict[str, Any]) -> None:
    async with playing(tmp_path) as play:
        status, answer = await play.results(body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert len(await play.next()) == 4, "nothing was given out"


async def test_an_idle_engine_waits_until_every_rollout_that_agents_have_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when further prompts may be handed out: the first request of a burst was once answered by itself."""
    monkeypatch.setattr(pumps, "QUIET_SECONDS", 600.0)
    monkeypatch.setattr(pumps, "LONGEST_BURST_SECONDS", 600.0)
    async with playing(tmp_path, maxInFlightPrompts=4) as play:
        play.rank.hold = lambda request: False
        rollouts = await play.next(6)
        turns = [asyncio.create_task(play.turn(rollout)) for rollout in rollouts[:-1]]
        done, _ = await asyncio.wait(turns, timeout=0.1)
        assert (done, play.rank.slices) == (set(), 0)
        turns.append(asyncio.create_task(play.turn(rollouts[-1])))
        assert [status for status, _ in await asyncio.wait_for(asyncio.gather(*turns), SOON)] == [200] * 6
        assert (play.rank.slices, len(play.rank.asked)) == (1, 6)


async def test_an_agent_whose_answer_is_on_its_way_may_ask_again(tmp_path: Path) -> None:
    """Until the server's thread has looked at the answer, the rollout still has its turn."""
    async with playing(tmp_path) as play:
        players, desk = play.collector._players, play.collector.desk
        assert players is not None
        names = [rollout["id"] for rollout in await play.next()]
        with play.collector.monitor.reading():
            (rollout, *others) = map(players.get, names)
            for other in others:
                other.turn = desk.submit(0, (1,), 1, None, lambda got: None)
            assert players.thinking(0)
            rollout.turn = desk.submit(0, (1,), 1, None, lambda got: None)
            assert not players.thinking(0)
            desk.take(0)
            assert not players.thinking(0)
            desk.arrive([Answer((-2, rollout.turn), (4,), (-1.0,), ((0, 0),))])
            assert players.thinking(0)


@pytest.mark.parametrize("onward", [True, False])
async def test_agents_have_the_next_prompts_while_the_step_is_trained_unless_a_save_follows(
    tmp_path: Path, onward: bool
) -> None:
    async with playing(tmp_path) as play:
        got: list[str] = []

        async def ask() -> None:
            got.extend(rollout["id"] for rollout in await play.next(wait=0.0))

        trainer = FakeTrainer(0, [])
        trainer.during = ask
        play.rank.train = trainer  # type: ignore[attr-defined]
        rollouts = await play.next()
        for rollout in rollouts:
            await play.turn(rollout)
        told = [{"id": rollout["id"], "reward": number % 2} for number, rollout in enumerate(rollouts)]
        await play.results({"results": told})
        stepped = await asyncio.wait_for(play.collector.step(1, onward, onward), SOON)
        assert stepped is not None
        assert got == (["2.0.0", "2.0.1", "3.0.0", "3.0.1"] if onward else [])
        counts = stepped.counters["counts"]
        assert (counts["trained"], counts["in_flight"]) == (2, 2 if onward else 0)


async def test_a_reward_that_cannot_be_computed_with_is_refused(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        (rollout, *_) = await play.next()
        await play.turn(rollout)
        for reward in (1e308, -1e31, 10**400, 1e999):
            status, answer = await play.result(rollout, reward=reward)
            assert status == 400
            word = "Infinity is not a number" if reward == math.inf else "is no number from -1e+30 to 1e+30"
            assert word in answer["error"]["message"]
        assert (await play.result(rollout, reward=LARGEST_REWARD))[0] == 200


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


async def test_rollouts_are_spread_over_the_replicas_and_stay_where_they_are(tmp_path: Path) -> None:
    async with playing(tmp_path, replicas=2) as play:
        rollouts = await play.next()
        ports = [rollout["base_url"].split("/rollouts")[0] for rollout in rollouts]
        assert len(set(ports)) == 2
        assert ports.count(ports[0]) == 2
        await play.play(rollouts)
        taken, _ = await asyncio.wait_for(play.collector.take(1), SOON)
        assert taken is not None


async def test_agents_that_wait_at_the_end_are_told_that_it_is_over(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        await play.next()
        waits = asyncio.create_task(play.session.get(f"{play.url}/rollouts/next", params={"wait": 30}))
        await asyncio.sleep(0.05)
        await play.collector.close()
        response = await asyncio.wait_for(waits, SOON)
        assert await response.json() == {"rollouts": [], "over": True}


async def test_a_run_without_agents_serves_too_also_when_it_has_all_the_answers_that_it_wants(tmp_path: Path) -> None:
    async with playing(tmp_path, environment={"builtin": "exactMatch"}) as play:
        rollout = {"base_url": play.url, "prompt": "123="}
        for _ in range(3):  # nobody takes the step, so that soon no prompt may be handed out any more
            status, answer = await asyncio.wait_for(play.turn(rollout, n=2), SOON)
            assert status == 200
            assert len(answer["choices"]) == 2
        async with play.session.get(f"{play.url}/rollouts/next") as response:
            assert response.status == 404
        await play.collector.interrupt(1)
        assert await asyncio.wait_for(play.collector.take(1), SOON) == (None, None)
        waits = asyncio.create_task(play.turn(rollout))
        done, _ = await asyncio.wait([waits], timeout=0.1)
        assert done == set(), "the collector is paused"
        await play.collector.resume(0)
        assert (await asyncio.wait_for(waits, SOON))[0] == 200


async def seen(play: Play, count: int) -> None:
    """The rank has been asked so much."""
    while len(play.rank.asked) < count:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


async def free(play: Play, name: str) -> None:
    """The rollout has no turn under way."""
    assert play.collector._players is not None
    while play.collector._players.get(name).turn is not None:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


def failures(play: Play) -> dict[int, int]:
    """Of the prompts that are not done."""
    ledger = play.collector.rollouts.ledger
    return {ordinal: ledger.failures_of(ordinal) for ordinal in ledger.live()}


async def opened(play: Play, groups: int) -> None:
    """So many prompts are dispatched."""
    while play.collector.counters()["counts"]["in_flight"] < groups:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


async def untaken(play: Play, count: int) -> None:
    """So many rollouts may be taken."""
    assert play.collector._players is not None
    while play.collector._players.untaken < count:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


async def waiting(play: Play) -> None:
    """A request waits for rollouts: the server's thread sleeps in the monitor."""
    front = play.collector._house._front  # type: ignore[union-attr]
    assert front is not None
    loop = front._listeners._loop
    while loop not in [where for where, _ in list(play.collector.monitor._waiters)]:  # noqa: ASYNC110 - a few milliseconds
        await asyncio.sleep(0.005)


def called(players: Any, name: str) -> asyncio.Event:
    """Set when it is called, by whichever thread."""
    event, loop, original = asyncio.Event(), asyncio.get_running_loop(), getattr(players, name)

    def noted(*args: Any) -> Any:
        loop.call_soon_threadsafe(event.set)
        return original(*args)

    setattr(players, name, noted)
    return event
