"""Agents against the collector: rollouts out, turns, rewards in, batches."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from rljob_workload.algorithm.advantages import LARGEST_REWARD
from rljob_workload.algorithm.batch import Answer
from rljob_workload.core.collecting import CollectorState
from rljob_workload.runtime import pumps

from .fake_ranks import FakeTrainer
from .playing import SOON, free, playing, seen, untaken


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
