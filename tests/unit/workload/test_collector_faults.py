"""What goes wrong around the collector, and how it says so: silence, hangs, holes, the end of the data, an interruption."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rljob_workload.algorithm.batch import DecodeSlice, Request
from rljob_workload.core.collecting import CollectorState
from rljob_workload.core.slices import SliceGoal
from rljob_workload.runtime import scoring
from rljob_workload.runtime.collector import Collector
from rljob_workload.runtime.errors import CollectorFailedError, HungError
from rljob_workload.runtime.rollouts_of import cap_of
from rljob_workload.runtime.scoring import EnvironmentHungError

from .fake_ranks import FakeEnvironment, FakeRank, counts, soon, steps


class Silent(FakeRank):
    """Loses the answers of some prompts and does not even know that they are still to come."""

    def __init__(self, *lost: int) -> None:
        super().__init__()
        self.lost = lost

    async def remote(self, requests: list[Request], goal: SliceGoal) -> DecodeSlice:
        kept = [request for request in requests if request.tag[0] not in self.lost]
        return await super().remote(kept, goal)


async def state(collector: Collector) -> str:
    return str((await collector.status())["state"])


# ---- no answer -----------------------------------------------------------------------------------


async def test_an_answer_that_the_engine_forgot_is_given_up_though_nothing_else_happens(make: Any) -> None:
    """Nobody decodes any more then: the deadline itself has to wake somebody up."""
    collector = make(steps=1, generation__answerTimeoutSeconds=1, prompts__retryBudget=0)
    await collector.start([[Silent(0, 1)]], 0)
    assert await steps(collector, 1) == [2, 3, 4, 5]
    assert collector.counters()["skipped_names"] == {"RetryBudgetExhausted": [0, 1]}
    assert counts(collector) == {"handed_out": 6, "trained": 4, "skipped": 2}


@pytest.mark.parametrize(("allowed", "trained"), [(1, None), (2, [2, 3, 4, 5])])
async def test_where_skips_end_the_run_a_step_is_given_up_with_the_first_prompt_too_many(
    make: Any, allowed: int, trained: list[int] | None
) -> None:
    limits = {"prompts__onExceeded": "Fail", "prompts__maxSkipped": allowed, "prompts__retryBudget": 0}
    collector = make(steps=1, generation__answerTimeoutSeconds=1, **limits)
    await collector.start([[Silent(0, 1)]], 0)
    batch, _ = await soon(collector.take(1))
    assert (batch and [*batch.ordinals]) == trained
    assert counts(collector)["skipped"] == 2
    assert await state(collector) == "Paused"


async def test_a_step_without_a_batch_names_the_prompts_that_it_waits_for(make: Any) -> None:
    collector = make(deadlines__stallSeconds=1, deadlines__handoverSeconds=1)
    rank = FakeRank()
    rank.hold = lambda request: request.tag[0] in (1, 2)
    await collector.start([[rank]], 0)
    rank.hold = lambda request: True
    await asyncio.sleep(0)
    with pytest.raises(HungError) as caught:
        await soon(collector.take(1))
    assert str(caught.value).startswith("step 1: no batch within 1 s (deadlines.stallSeconds); the collector is Collecting")
    assert "decoding: replica 0 for 0 s; in flight longest: prompt 0 (0 of 2 answers after" in str(caught.value)


async def test_ranks_that_do_not_answer_a_slice_are_named(make: Any) -> None:
    collector = make(deadlines__stallSeconds=1, deadlines__handoverSeconds=1)
    ranks = [FakeRank() for _ in range(4)]
    ranks[3].gate.clear()
    await collector.start([ranks[:2], ranks[2:]], 0)
    with pytest.raises(HungError, match=r"^replica 1: HungError: decode: no answer of rank 3 within 1 s"):
        await soon(collector.take(1))
    assert await state(collector) == "Failed"


async def test_dead_engines_beside_an_empty_buffer_end_the_step_at_once_and_nobody_polls(make: Any) -> None:
    collector = make()
    ranks = [FakeRank(), FakeRank()]
    for rank in ranks:
        rank.error = ConnectionError("the engine is gone")
    await collector.start([[rank] for rank in ranks], 0)
    with pytest.raises(CollectorFailedError, match="the engine is gone"):
        await soon(collector.take(1))
    await asyncio.sleep(0.05)
    assert [rank.slices for rank in ranks] == [1, 1]
    assert counts(collector).get("buffered") is None


# ---- status and interruption ---------------------------------------------------------------------


async def test_the_status_is_answered_while_everything_blocks_and_names_the_oldest(make: Any) -> None:
    collector, rank = make(), FakeRank()
    rank.gate.clear()
    await collector.start([[rank]], 0)
    takes = [asyncio.create_task(collector.take(1)) for _ in range(5)]
    await asyncio.sleep(0.01)
    said = await soon(collector.status())
    assert said["state"] == "Collecting"
    assert [one["ordinal"] for one in said["oldest_in_flight"]] == list(range(8))
    assert said["oldest_in_flight"][0] | {"age_seconds": 0} == {
        "ordinal": 0,
        "age_seconds": 0,
        "tokens": 0,
        "answers": 0,
        "attempt": 0,
        "tag": [0, 0],
    }
    assert said["counts"]["in_flight"] == 8
    assert not any(take.done() for take in takes)
    for take in takes:
        take.cancel()
    rank.gate.set()


async def test_the_status_is_answered_from_another_thread_while_the_loop_of_the_work_is_stuck(make: Any) -> None:
    """Ray runs control calls in a thread of their own; a quick environment that hangs blocks the other one."""
    stuck, release = threading.Event(), threading.Event()

    def judge(answer: str, expected: str) -> float:
        stuck.set()
        release.wait(10)
        return 0.5

    collector = make(FakeEnvironment(judge=judge))
    work = asyncio.new_event_loop()

    async def collect() -> Any:
        await collector.start([[FakeRank()]], 0)
        return await collector.take(1)

    thread = threading.Thread(target=lambda: work.run_until_complete(collect()))
    thread.start()
    try:
        assert await asyncio.to_thread(stuck.wait, 5)
        assert (await collector.status())["state"] == "Collecting"
        assert thread.is_alive()
    finally:
        release.set()
        await asyncio.to_thread(thread.join, 10)
        work.close()
    assert await state(collector) == "Paused"


@pytest.mark.parametrize("first", ["take", "interrupt"])
async def test_an_interrupted_take_ends_without_a_batch_and_can_be_repeated(make: Any, first: str) -> None:
    collector, rank = make(), FakeRank()
    rank.hold = lambda request: True
    await collector.start([[rank]], 0)
    if first == "interrupt":
        await collector.interrupt(1)
    take = asyncio.create_task(collector.take(1))
    await asyncio.sleep(0.01)
    if first == "take":
        assert not take.done()
        await collector.interrupt(1)
    assert await soon(take) == (None, None)
    assert await state(collector) == "Paused"
    snapshot = await collector.snapshot()
    assert await state(collector) == "Saving"
    rank.hold = lambda request: False
    await collector.resume(0)
    taken, _ = await soon(collector.take(1))
    assert taken.ordinals == (0, 1, 2, 3)
    report = await make().restore(snapshot, 0)
    assert (report.handed_out, report.rehanded) == (8, list(range(8)))


async def test_an_interruption_of_a_step_that_is_over_does_not_touch_the_next(make: Any) -> None:
    collector = make()
    await collector.start([[FakeRank()]], 0)
    taken, _ = await soon(collector.take(1))
    await collector.interrupt(1)
    await collector.commit(1, taken.ordinals)
    await collector.resume(1)
    assert (await soon(collector.take(2)))[0].ordinals == (4, 5, 6, 7)


# ---- the data, the window -------------------------------------------------------------------------


async def test_a_trainer_that_is_faster_than_the_data_ends_right(make: Any) -> None:
    """The last steps' prompts are out: nothing new is pulled, the states end at 0."""
    collector, rank = make(steps=3), FakeRank()
    await collector.start([[rank]], 0)
    assert sorted(await steps(collector, 2)) == list(range(8))
    taken, _ = await soon(collector.take(3))
    await collector.commit(3, taken.ordinals)
    assert counts(collector) == {"handed_out": 12, "trained": 12}
    moves = [(move.before, move.after) for move in collector._machine.log]
    assert moves[-3:] == [("Collecting", "Exhausted"), ("Exhausted", "Draining"), ("Draining", "Paused")]


async def test_a_step_that_nothing_can_fill_ends_at_once(make: Any) -> None:
    collector = make(steps=2)
    await collector.start([[FakeRank()]], 2)  # beyond the last step: there is no room for any prompt
    with pytest.raises(CollectorFailedError, match="step 3 lacks 4 groups and none can come"):
        await soon(collector.take(3))


async def test_while_the_environment_thinks_the_collector_is_throttled(make: Any) -> None:
    release = threading.Event()
    collector = make(FakeEnvironment(quick=False, judge=lambda *_: float(release.wait(10)) / 2))
    await collector.start([[FakeRank()]], 0)
    take = asyncio.create_task(collector.take(1))

    # The answers are all there, and the window is full: nothing is generated, nothing may be handed out.
    assert await collector.monitor.first(lambda: collector._machine.state is CollectorState.THROTTLED or None, 5)
    assert not collector._pumps.slices
    release.set()
    assert len((await soon(take))[0].ordinals) == 4


async def test_a_hole_that_is_older_than_the_window_is_filled(make: Any) -> None:
    """A prompt of the first version never comes: the steps wait for it once, until its deadline, and it is handed out again."""
    collector, rank = make(FakeEnvironment(), steps=6, generation__answerTimeoutSeconds=1), FakeRank()
    rank.hold = lambda request: request.tag == (1, 0)
    await collector.start([[rank]], 0)
    trained = await steps(collector, 6)
    assert sorted(trained) == list(range(24))
    assert 1 not in trained[:8]


async def test_64_groups_of_16_answers_are_in_flight_at_once_and_the_steps_go_on(make: Any) -> None:
    """P = 32, G = 16, age 2: 1,024 answers, more than an actor runs calls."""
    grpo = {"promptsPerStep": 32, "generationsPerPrompt": 16, "microBatchSize": 512, "maxTrajectoryAgeSteps": 2}
    collector: Collector = make(**{f"algorithm__grpo__{name}": value for name, value in grpo.items()},
                                algorithm__grpo__steps=4, generation__maxInFlightPrompts=None)  # fmt: skip
    rank, most = FakeRank(), 0

    def seen(request: Request) -> bool:
        nonlocal most
        most = max(most, collector.rollouts.in_flight)
        return False

    rank.hold = seen
    assert cap_of(collector._spec).effective == 64
    await collector.start([[rank]], 0)
    trained = await steps(collector, 4)
    assert most == 64
    assert sorted(trained) == list(range(128))


# ---- the environment ------------------------------------------------------------------------------


async def test_an_environment_that_hangs_for_ever_costs_prompts_by_name_and_then_the_attempt(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MOST_HUNG", 6)
    release = threading.Event()
    collector = make(FakeEnvironment(quick=False, judge=lambda *_: float(release.wait(30))))
    collector.scorer._timeout = 0.05
    try:
        await collector.start([[FakeRank()]], 0)
        with pytest.raises(HungError, match="7 calls of the environment have not returned"):
            await soon(collector.take(1))
        assert collector.scorer.hung >= 7
    finally:
        release.set()
    assert issubclass(EnvironmentHungError, HungError)


async def test_hung_calls_do_not_keep_the_others_from_being_scored(make: Any) -> None:
    release = threading.Event()
    names: set[str] = set()

    def judge(answer: str, expected: str) -> float:
        if len(names) < scoring.SLOTS and threading.current_thread().ident:
            names.add(str(threading.get_ident()))
            release.wait(30)
        return 0.5

    collector = make(FakeEnvironment(quick=False, judge=judge), steps=2)
    collector.scorer._timeout = 0.2
    try:
        await collector.start([[FakeRank()]], 0)
        assert sorted(await steps(collector, 2)) == list(range(8))
        assert collector.counters()["skipped_names"] == {}
    finally:
        release.set()


async def test_the_log_of_transitions_tells_a_steps_story(make: Any) -> None:
    collector = make()
    await collector.start([[FakeRank()]], 0)
    await steps(collector, 1)
    story = [move.after for move in collector._machine.log if move.after is not CollectorState.THROTTLED]
    assert story[0] == "Collecting"
    assert story[-3:] == ["Draining", "Paused", "Collecting"]
    assert all(line.split(": ")[1] for line in (await collector.status())["log"])
