"""Requests with a sampling of their own on the real engine, beside the job's; and training on several turns."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rljob_workload.algorithm.batch import HTTP, Answer, Request, Sampling, TrainRow
from rljob_workload.core.handover import Handover
from rljob_workload.core.trajectory import Trajectory
from rljob_workload.megatron.colocated import Colocated
from rljob_workload.megatron.device import RankBarrier
from rljob_workload.megatron.policy import _Tensors

from .conftest import Loop, copy_spec

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(scope="module")
def loop(ranks: None) -> Loop:
    return Loop.of(copy_spec(maxNewTokens=8, maxSequenceLength=32))


def ask(loop: Loop, prompt: str, sampling: Sampling, answers: int = 1, number: int = 1) -> list[Answer]:
    """Answers to one request by HTTP, whatever else is in flight."""
    loop.engine.submit([Request((HTTP, number), loop.task.tokenizer.encode(prompt), answers, sampling=sampling)])
    found: list[Answer] = []
    while len(found) < answers:
        done = loop.engine.step()
        found += [answer for answer in done if answer.tag == (HTTP, number)]
        loop.accept([answer for answer in done if answer.tag[0] >= 0])
    return found


def test_a_seed_gives_the_same_answer_in_any_company_and_each_of_several_its_own(loop: Loop) -> None:
    sampling = Sampling(8, seed=7)
    alone = [answer.tokens for answer in ask(loop, "123=", sampling, answers=3)]
    assert len(set(alone)) == 3
    loop.engine.submit(loop.rollouts.dispatch(loop.policy.version, 0.0))
    assert [answer.tokens for answer in ask(loop, "123=", sampling, answers=3)] == alone
    (third,) = ask(loop, "123=", dataclasses.replace(sampling, seed=9))
    assert third.tokens == alone[2]
    (other,) = ask(loop, "123=", dataclasses.replace(sampling, seed=10))
    assert other.tokens not in alone


def test_a_stop_text_ends_an_answer_and_every_token_keeps_its_logprob(loop: Loop) -> None:
    (whole,) = ask(loop, "123=", Sampling(8, seed=3))
    words = [loop.task.tokenizer.decode([token]) for token in whole.tokens]
    place = next(place for place, word in enumerate(words) if word not in ("", "?") and word not in words[:place])
    (stopped,) = ask(loop, "123=", Sampling(8, seed=3, stop=("9" * 8, words[place])))
    assert stopped.tokens == whole.tokens[: place + 1]
    assert stopped.logprobs == pytest.approx(whole.logprobs[: place + 1], abs=1e-5)


def test_temperature_length_and_greed_are_the_requests_own(loop: Loop) -> None:
    greedy = [answer.tokens for answer in ask(loop, "123=", Sampling(5, greedy=True), answers=4)]
    assert len(set(greedy)) == 1
    assert len(greedy[0]) == 5
    cold = [answer.tokens for answer in ask(loop, "123=", Sampling(5, temperature=1e-4), answers=4)]
    assert cold == greedy
    nucleus = [answer.tokens for answer in ask(loop, "123=", Sampling(5, top_p=1e-6), answers=4)]
    assert nucleus == greedy
    hot = ask(loop, "123=", Sampling(5, temperature=5.0), answers=4)
    assert len({answer.tokens for answer in hot}) == 4


def test_training_sees_several_turns_as_the_engine_did(loop: Loop) -> None:
    """Log-probs of engine and training agree on generated tokens, over all turns and over a hand-over between two of them."""
    rows, bos = [], (loop.task.tokenizer.bos,)
    for number in range(8):
        trajectory = Trajectory()
        text = f"{number}23="
        for turn in range(3):
            prompt = trajectory.begin_with_text(text, loop.task.tokenizer.tokenize, bos)
            loop.engine.submit([Request((HTTP, number), prompt, 1, sampling=Sampling(2 + turn))])
            (answer,) = finish(loop)
            said = loop.task.tokenizer.decode(answer.tokens)
            trajectory.end(prompt, answer, text=text, said=said)
            text += said + ":"
            if number == 0 and turn == 0:
                switch(loop)
        whole = trajectory.as_answer((number, 0))
        assert whole.prompt is not None
        spans = tuple((start + len(whole.prompt), stop + len(whole.prompt)) for start, stop in whole.spans)
        length = len(whole.prompt)
        rows.append(TrainRow((*whole.prompt, *whole.tokens), length, whole.logprobs, 0.5, current=True, spans=spans))
        assert len(whole.logprobs) == 2 + 3 + 4
    loop.policy.enter_train()
    settings = dataclasses.replace(loop.policy.settings, micro_batch_size=4)
    loop.policy.settings = settings
    stats = loop.policy.train_step(rows, longest=max(len(row.tokens) for row in rows), answer_tokens=8 * 9)
    loop.policy.enter_generate()
    assert stats.gen_logprob_error is not None
    assert stats.gen_logprob_error <= 1e-5


def finish(loop: Loop) -> list[Answer]:
    found: list[Answer] = []
    while loop.engine.in_flight:
        found += loop.engine.step()
    return [answer for answer in found if answer.tag[0] == HTTP]


def switch(loop: Loop) -> None:
    """To training and back, with the same weights."""
    handover = Handover(0, Colocated(loop.policy, loop.engine, RankBarrier(10), offload=False))
    handover.to_train()
    handover.to_decode()


def test_one_span_is_what_no_span_means_and_several_leave_the_rest_out() -> None:
    where = torch.device("cpu")
    plain = TrainRow((1, 2, 3, 4, 5), 2, (-0.1, -0.2, -0.3), 1.0)
    one = plain._replace(spans=((2, 5),))
    for name in ("tokens", "behaviour", "mask"):
        whole, spread = (getattr(_Tensors.of([row], 7, where), name) for row in (plain, one))
        assert torch.equal(whole, spread)
    several = _Tensors.of([TrainRow((1, 2, 3, 4, 5, 6), 2, (-0.1, -0.2, -0.3), 1.0, spans=((2, 3), (4, 6)))], 7, where)
    assert several.mask.tolist() == [[0, 1, 0, 1, 1, 0]]
    assert several.behaviour[0].tolist() == pytest.approx([0, -0.1, 0, -0.2, -0.3, 0])
    assert several.longest == 6
