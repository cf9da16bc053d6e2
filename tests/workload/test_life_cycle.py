"""The engine between training steps: the three cache modes, buffers that are put away, many cycles with requests in flight."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import pytest
import torch

from rljob_workload.algorithm.batch import Answer, Request, TrainBatch, TrainRow
from rljob_workload.core.handover import Handover, HandoverOrderError, Phase
from rljob_workload.megatron.colocated import Colocated
from rljob_workload.megatron.device import RankBarrier
from rljob_workload.megatron.engine import ResidentEngine, engines_built
from rljob_workload.megatron.errors import EngineError, EngineStepError

from .conftest import Loop, copy_spec

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def started(ranks: None) -> Iterator[None]:
    """As a rank does at its start: what exists now is left out of garbage collections, which some cache modes ask for."""
    long_answers()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def long_answers(mode: str = "Persist", *, offload: bool = False) -> tuple[Loop, Handover]:
    """A policy whose answers take several engine steps, and its hand-over."""
    cache = {"mode": mode, "size": "32Mi"}
    spec = copy_spec("copyv", maxRequests=64, maxInFlightPrompts=16, steps=100_000, kvCache=cache)
    loop = Loop.of(spec)
    return loop, Handover(0, Colocated(loop.policy, loop.engine, RankBarrier(10), offload=offload))


def tokens_of(number: int) -> tuple[int, ...]:
    return (3, 4, 5 + number % 5)


def requests(count: int, answers: int = 1) -> list[Request]:
    return [Request((number, 0), tokens_of(number), answers) for number in range(count)]


def finish(engine: ResidentEngine, done: list[Answer]) -> list[Answer]:
    while engine.in_flight:
        done.extend(engine.step())
    return sorted(done, key=lambda answer: answer.tag)


@contextmanager
def handed_over(handover: Handover) -> Iterator[None]:
    handover.to_train()
    yield
    handover.to_decode()


def interrupted(mode: str, *, scale: float, stops: tuple[int, ...] = (2, 4)) -> tuple[Loop, list[Answer]]:
    """Answers that were interrupted after so many engine steps; each time the weights changed by a factor."""
    loop, handover = long_answers(mode)
    loop.engine.submit(requests(6))
    done: list[Answer] = []
    for step in range(max(stops)):
        done.extend(loop.engine.step())
        if step + 1 in stops:
            with handed_over(handover):
                loop.policy.version += 1
                with torch.no_grad():
                    for parameter in loop.policy.parameters().values():
                        parameter.mul_(scale)
    return loop, finish(loop.engine, done)


def error_of(loop: Loop, answers: list[Answer], heads: Mapping[int, tuple[int, ...]] | None = None) -> float:
    """Largest difference of the answers' log-probs from those that training computes with the weights of now.

    `heads`: tokens between a prompt and its answer.
    """
    rows = []
    for answer in answers:
        before = tokens_of(answer.tag[0]) + (heads or {}).get(answer.tag[0], ())
        rows.append(TrainRow(before + answer.tokens, len(before), answer.logprobs, advantage=0.0, current=True))
    size = loop.policy.settings.micro_batch_size
    error = loop.train(TrainBatch(1, (), tuple((rows * size)[:size]))).gen_logprob_error
    assert error is not None
    return error


@pytest.mark.parametrize("mode", ["Persist", "Offload", "Recompute"])
def test_every_cache_mode_goes_on_where_it_was_interrupted(mode: str) -> None:
    """With unchanged weights every token has the log-prob that training computes, however often its answer was interrupted."""
    loop, answers = interrupted(mode, scale=1.0)
    assert any(len(answer.versions) == 3 for answer in answers)
    assert error_of(loop, answers) < 1e-5


@pytest.mark.parametrize("mode", ["Persist", "Offload", "Recompute"])
def test_each_token_remembers_the_version_that_sampled_it_in_every_mode(mode: str) -> None:
    _, answers = interrupted(mode, scale=0.98)
    assert len(answers) == 6
    for answer in answers:
        starts = [index for index, _ in answer.versions]
        assert len(answer.tokens) == len(answer.logprobs)
        assert answer.versions == tuple((2 * number, number) for number in range(len(starts)))
    assert any(len(answer.versions) == 3 for answer in answers)


@pytest.mark.parametrize("mode", ["Persist", "Offload", "Recompute"])
def test_only_recompute_reads_the_tokens_before_a_change_with_the_new_weights(mode: str) -> None:
    """The last token of an answer, sampled by the newest weights: exact if the cache before it is theirs too."""
    loop, answers = interrupted(mode, scale=0.7, stops=(4,))
    last = [answer for answer in answers if answer.last_version == 1]
    tails = [answer._replace(tokens=answer.tokens[4:], logprobs=answer.logprobs[4:]) for answer in last]
    heads = {answer.tag[0]: answer.tokens[:4] for answer in last}
    assert tails
    error = error_of(loop, tails, heads)
    assert (error < 1e-5) == (mode == "Recompute"), error


def test_offloaded_training_buffers_are_gone_in_decode_and_back_for_the_step() -> None:
    """Losses and gradients are those of a run that keeps them."""
    results = []
    for offload in (False, True):
        loop, handover = long_answers(offload=offload)
        for _ in range(3):
            loop.step(handover)
        results.append([(stats.loss, stats.grad_norm) for stats in loop.stats])
    assert results[0] == results[1]
    held = [buffer.grad_data.untyped_storage().size() for buffer in loop.policy.ddp.buffers]
    assert held == [0] * len(held)
    with handed_over(handover):
        assert all(buffer.grad_data.untyped_storage().size() > 0 for buffer in loop.policy.ddp.buffers)


def test_a_suspended_engine_takes_neither_requests_nor_steps() -> None:
    loop, handover = long_answers()
    loop.engine.submit(requests(1))
    handover.to_train()
    with pytest.raises(EngineError, match="the engine is suspended"):
        loop.engine.submit(requests(1))
    with pytest.raises(EngineError, match="the engine is suspended"):
        loop.engine.step()
    with pytest.raises(HandoverOrderError, match="rank 0 is in Train, not in Decode"):
        handover.expect(Phase.DECODE)
    handover.to_decode()
    assert len(finish(loop.engine, [])) == 1


def test_an_error_inside_the_engine_names_rank_step_and_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = long_answers()
    loop.engine.submit(requests(3))
    loop.engine.step()

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no page left")

    monkeypatch.setattr(loop.engine._engine.controller, "async_generate_output_tokens_dynamic_batch", fail)
    with pytest.raises(EngineStepError) as caught:
        loop.engine.step()
    assert str(caught.value) == (
        "rank 0, Decode: engine step 2 with the weights of step 0 failed, 3 answers in flight (prompts 0, 1, 2): "
        "ValueError: no page left"
    )


def test_a_request_longer_than_the_context_is_refused_by_its_ordinal() -> None:
    loop, _ = long_answers()
    with pytest.raises(EngineError, match=r"prompt 7 has 12 tokens; with \d+ new ones it exceeds generation.maxSequenceLength"):
        loop.engine.submit([Request((7, 0), (3,) * 12, 1)])
    assert loop.engine.in_flight == 0


@pytest.mark.parametrize("mode", ["Persist", "Offload", "Recompute"])
def test_suspend_and_resume_a_hundred_times_with_requests_in_flight(mode: str) -> None:
    """All requests complete, on one engine, in memory that does not grow. The long form is `make bench-handover`."""
    built = engines_built()
    loop, handover = long_answers(mode, offload=True)
    wanted, done = 0, 0
    for cycle in range(100):
        fresh = requests(2, answers=3)
        loop.engine.submit(fresh)
        wanted += 6
        done += len(loop.engine.step())
        assert loop.engine.in_flight > 0
        with handed_over(handover):
            loop.policy.version += 1
        if cycle == 20:
            before = psutil.Process().memory_info().rss
    done += len(finish(loop.engine, []))
    assert done == wanted
    assert engines_built() - built == 1
    assert psutil.Process().memory_info().rss < 1.05 * before
