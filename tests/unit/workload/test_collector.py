"""The collector against ranks made of plain Python: what it waits for, retries, and how it fails."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from rljob_workload.core.source import SourceChangedError, SourceError
from rljob_workload.megatron.errors import EngineError, NonFiniteError
from rljob_workload.runtime import collector as module
from rljob_workload.runtime.errors import CollectorFailedError

from .fake_ranks import FakeEnvironment, FakeRank, counts, soon, steps


async def test_a_step_is_taken_committed_and_the_next_one_collected(make: Any) -> None:
    collector, rank = make(), FakeRank()
    await collector.start([[rank]], 0)
    taken, info = await soon(collector.take(1))
    assert (taken.ordinals, info.samples) == ((0, 1, 2, 3), 8)
    assert counts(collector) == {"handed_out": 8, "training": 4, "buffered": 4}
    await collector.commit(1, taken.ordinals)
    await collector.commit(1, taken.ordinals)
    await collector.resume(1)
    taken, _ = await soon(collector.take(2))
    assert taken.ordinals == (4, 5, 6, 7)
    assert counts(collector)["trained"] == 4


async def test_nothing_is_generated_between_take_and_resume(make: Any) -> None:
    collector, rank = make(), FakeRank()
    await collector.start([[rank]], 0)
    taken, _ = await soon(collector.take(1))
    before = rank.slices
    await asyncio.sleep(0.05)
    await collector.commit(1, taken.ordinals)
    assert rank.slices == before


async def test_a_commit_that_begins_the_next_stretch_may_be_repeated_at_any_time(make: Any) -> None:
    collector, rank = make(), FakeRank()
    await collector.start([[rank]], 0)
    taken, _ = await soon(collector.take(1))
    first = await collector.commit(1, taken.ordinals, True)
    assert first["counts"]["trained"] == 4
    assert (await collector.status())["state"] != "Paused"
    await collector.commit(1, taken.ordinals, True)
    again, info = await soon(collector.take(2))
    assert info.oldest_age == 1
    await collector.commit(1, taken.ordinals, True)
    assert (await collector.status())["state"] == "Paused"
    await collector.commit(2, again.ordinals)
    assert (await collector.status())["state"] == "Paused"


async def test_two_replicas_share_the_prompts_in_flight(make: Any) -> None:
    """One that is quick must not take what its slow neighbour has room for, nor more than its own share."""
    collector, quick, slow = make(), FakeRank(), FakeRank()
    slow.gate.clear()
    quick.hold = lambda request: True
    await collector.start([[quick], [slow]], 0)
    await asyncio.sleep(0.05)
    owners = list(collector._pumps._given.values())
    assert (owners.count(0), owners.count(1)) == (4, 4)


async def test_take_waits_until_every_replica_has_ended_its_slice(make: Any) -> None:
    """Otherwise one rank could train while its neighbour still decodes, and both would wait for ever."""
    collector, quick, slow = make(), FakeRank(), FakeRank()
    slow.gate.clear()
    await collector.start([[quick], [slow]], 0)
    take = asyncio.create_task(collector.take(1))
    await asyncio.sleep(0.1)
    assert slow.slices == 1
    assert not take.done()
    slow.gate.set()
    taken, _ = await soon(take)
    assert len(taken.ordinals) == 4


async def test_a_snapshot_is_refused_while_collecting_and_while_a_step_is_open(make: Any) -> None:
    collector = make()
    await collector.start([[FakeRank()]], 0)
    with pytest.raises(RuntimeError, match="no snapshot while Collecting"):
        await collector.snapshot()
    taken, _ = await soon(collector.take(1))
    with pytest.raises(Exception, match="no snapshot between take and commit"):
        await collector.snapshot()
    await collector.commit(1, taken.ordinals)
    saved = await collector.snapshot()
    other = make()
    report = await other.restore(saved)
    assert (report.handed_out, report.restored_groups, report.rehanded) == (8, 4, [])


async def test_a_dead_rank_ends_the_waiting_take_with_its_cause(make: Any) -> None:
    collector, rank = make(), FakeRank()
    rank.gate.clear()
    await collector.start([[rank]], 0)
    take = asyncio.create_task(collector.take(1))
    await asyncio.sleep(0.05)
    rank.error = ConnectionError("rank 0 is gone")
    rank.gate.set()
    with pytest.raises(CollectorFailedError, match="replica 0: ConnectionError: rank 0 is gone"):
        await soon(take)
    with pytest.raises(CollectorFailedError):
        await soon(collector.resume(1))
    assert (await collector.status())["state"] == "Failed"


class RemoteError(RuntimeError):
    """As Ray delivers a rank's exception: its own class around the cause, whose traceback is the text."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f'\x1b[36mray::Rank.decode()\x1b[39m (pid=1)\n  File "engine.py", line 1\n{cause}')
        self.cause = cause


@pytest.mark.parametrize("kind", [NonFiniteError, EngineError])
async def test_what_a_rank_says_on_purpose_keeps_its_kind_through_the_collector(make: Any, kind: type[Exception]) -> None:
    collector, rank = make(), FakeRank()
    rank.error = RemoteError(kind("said so"))
    await collector.start([[rank]], 0)
    with pytest.raises(kind, match=f"^replica 0: {kind.__name__}: said so$"):
        await soon(collector.take(1))


async def test_a_ranks_surprise_is_one_line_without_colours(make: Any) -> None:
    collector, rank = make(), FakeRank()
    trace = '\x1b[36mray::Rank.decode()\x1b[39m (pid=1)\n  File "engine.py", line 1, in step\nRuntimeError: sizes differ'
    rank.error = RemoteError(RuntimeError(trace))
    await collector.start([[rank]], 0)
    with pytest.raises(CollectorFailedError, match=r"^replica 0: RuntimeError: RuntimeError: sizes differ$"):
        await soon(collector.take(1))


@pytest.mark.parametrize("quick", [True, False])
async def test_an_environment_that_raises_once_costs_a_try_and_no_prompt(make: Any, quick: bool) -> None:
    failures = iter([True])

    def judge(answer: str, expected: str) -> float:
        if next(failures, False):
            raise OSError("sandbox gone")
        return 0.5

    collector = make(FakeEnvironment(quick=quick, judge=judge))
    await collector.start([[FakeRank()]], 0)
    trained = await steps(collector, 3)
    assert sorted(trained) == list(range(12))
    assert collector.counters()["skipped_names"] == {}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e308, 10**400])
async def test_a_prompt_whose_reward_is_no_number_is_skipped_by_name_and_the_step_goes_on(make: Any, reward: float) -> None:
    collector = make()
    bad = collector._rollouts.expected(0)
    collector._scorer.environment = FakeEnvironment(judge=lambda answer, expected: reward if expected == bad else 0.5)
    await collector.start([[FakeRank()]], 0)
    trained = await steps(collector, 3)
    assert collector.counters()["skipped_names"] == {"RetryBudgetExhausted": [0]}
    assert sorted(trained) == list(range(1, 13))


async def test_a_hanging_environment_is_given_up_after_its_deadline(make: Any) -> None:
    release = threading.Event()
    calls = iter([True])

    def judge(answer: str, expected: str) -> float:
        if next(calls, False):
            release.wait(10)
        return 0.5

    collector = make(FakeEnvironment(quick=False, judge=judge), steps=3)
    try:
        await collector.start([[FakeRank()]], 0)
        assert sorted(await steps(collector, 3)) == list(range(12))
        assert collector.counters()["skipped_names"] == {}
    finally:
        release.set()


async def test_an_answer_that_never_comes_is_retried_and_the_prompt_then_skipped(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(module.ActiveClock, "now", lambda self: float(next(seconds)))  # every look costs a second
    collector, rank = make(steps=4), FakeRank()
    rank.hold = lambda request: request.tag[0] == 0
    await collector.start([[rank]], 0)
    trained = await steps(collector, 4)
    assert collector.counters()["skipped_names"] == {"RetryBudgetExhausted": [0]}
    assert sorted(trained) == list(range(1, 17))


async def test_restored_groups_that_are_too_old_are_replaced_and_the_step_goes_on(make: Any) -> None:
    collector = make()
    await collector.start([[FakeRank()]], 0)
    taken, _ = await soon(collector.take(1))
    await collector.commit(1, taken.ordinals)
    saved = await collector.snapshot()
    resumed, rank = make(), FakeRank()
    rank.collector = resumed
    assert (await resumed.restore(saved)).restored_groups == 4
    await resumed.start([[rank]], 9)
    taken, info = await soon(resumed.take(10))
    assert taken.ordinals == (4, 5, 6, 7)
    assert info.oldest_age == 0


async def test_a_source_that_fails_ends_the_run_as_a_failure_of_the_data(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make()
    source = collector._rollouts._source
    monkeypatch.setattr(source, "pull", lambda: (_ for _ in ()).throw(SourceError("before prompt 0: the source ended")))
    await collector.start([[FakeRank()]], 0)
    with pytest.raises(SourceError, match="replica 0: SourceError: before prompt 0: the source ended"):
        await soon(collector.take(1))


async def test_without_load_replay_buffer_the_finished_groups_are_answered_again(make: Any) -> None:
    collector = make()
    await collector.start([[FakeRank()]], 0)
    taken, _ = await soon(collector.take(1))
    await collector.commit(1, taken.ordinals)
    saved = await collector.snapshot()
    other = make(checkpoint__loadReplayBuffer=False)
    report = await other.restore(saved, 1)
    assert (report.restored_groups, report.rehanded) == (0, [4, 5, 6, 7])


async def test_changed_data_is_given_up_only_when_the_job_says_so(make: Any) -> None:
    collector = make()
    await collector.start([[FakeRank()]], 0)
    taken, _ = await soon(collector.take(1))
    await collector.commit(1, taken.ordinals)
    saved = await collector.snapshot()
    with pytest.raises(SourceChangedError, match="seed was 0 and is 3"):
        await make(data__seed=3).restore(saved, 1)
    other = make(data__seed=3, data__onChange="Restart")
    assert (await other.restore(saved, 1)).source_changed == 4
    assert other.counters()["skipped_names"] == {"SourceChanged": [4, 5, 6, 7]}


async def test_the_status_names_the_cap(make: Any) -> None:
    assert (await make().status())["cap"] == {"configured": 8, "effective": 8, "reason": "", "warning": ""}
