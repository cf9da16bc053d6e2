"""Refusals and forms that need no server: what rollouts may ask for, and what each parameter is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_workload.algorithm.batch import Answer
from rljob_workload.core.trajectory import Trajectory
from rljob_workload.data.tokenizer import BOS, EOS
from rljob_workload.server import openai, reply
from rljob_workload.server.errors import ApiError

from .serving import limits

ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.text(max_size=3) | st.sampled_from(["1=", "12", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner),
    max_leaves=6,
)
NAMES = sorted(openai.SERVED["completions"] | openai.SERVED["chat.completions"] | set(openai.NEUTRAL) | openai.IGNORED)
LIKELY = st.fixed_dictionaries({}, optional={"prompt": st.sampled_from(["1=", [1, 4], ["1", [5]]]), "n": st.integers(0, 200),
                                             "max_tokens": st.integers(0, 20)})  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no defect
@given(st.sampled_from(sorted(openai.SERVED)), LIKELY, st.dictionaries(st.sampled_from(NAMES), ODD, max_size=4))
def test_whatever_is_asked_is_refused_by_name_or_can_be_answered(
    kind: str, likely: dict[str, Any], odd: dict[str, Any]
) -> None:
    own = limits()
    ask, refused = None, None
    try:
        ask = openai.read(kind, likely | odd, own)
    except ApiError as err:
        refused = err
    if refused is not None or ask is None:
        assert refused is not None
        assert (refused.status, refused.body["error"]["param"] in NAMES) == (400, True)
        return
    assert ask.prompts
    assert 1 <= len(ask.prompts) * ask.n <= openai.MOST_ANSWERS
    assert 1 <= ask.sampling.new_tokens <= own.most_new_tokens
    assert openai.LEAST_TEMPERATURE <= ask.sampling.temperature <= 100
    assert openai.LEAST_TOP_P <= ask.sampling.top_p <= 1
    assert all(ask.sampling.stop)
    for prompt in ask.prompts:
        assert 1 <= len(prompt) <= own.sequence - ask.sampling.new_tokens
        assert all(0 <= token < own.vocabulary for token in prompt)


def test_every_parameter_is_served_ignored_or_neutral_and_in_one_table_only() -> None:
    for served in openai.SERVED.values():
        assert not served & openai.IGNORED
        assert not served & set(openai.NEUTRAL)
    assert not openai.IGNORED & set(openai.NEUTRAL)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": 0}, "temperature: 0 in a rollout that is trained; answers are sampled with generation.temperature 1"),
        ({"temperature": 0.5}, "temperature: 0.5 in a rollout"),
        ({"top_p": 0.9}, "top_p: 0.9 in a rollout"),
    ],
)
def test_a_trained_rollout_is_sampled_as_it_is_trained(body: dict[str, Any], words: str) -> None:
    """Any other way of sampling would make the recorded log-probs those of another policy."""
    ask = openai.read("completions", {"prompt": "1=", **body}, limits(), Trajectory())
    with pytest.raises(ApiError, match=words):
        openai.require_trained_sampling(ask.sampling, limits())


def test_the_jobs_own_temperature_may_be_named_and_is_taken_where_none_is() -> None:
    own = limits(temperature="0.7")
    for body in ({}, {"temperature": 0.7}, {"temperature": None}):
        ask = openai.read("completions", {"prompt": "1=", **body}, own, Trajectory())
        openai.require_trained_sampling(ask.sampling, own)
        assert ask.sampling.temperature == 0.7


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["1=", "2="]}])
def test_a_turn_is_one_answer(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="in a rollout"):
        openai.read("completions", {"prompt": "1=", **body}, limits(), Trajectory())


def test_text_ends_before_the_end_token_and_says_so() -> None:
    """The token itself is among the ids, so that who goes on with ids goes on with what was generated."""
    ask = openai.read("completions", {"prompt": "1=", "return_token_ids": True}, limits())
    ending = openai.Limits(**{name: getattr(limits(), name) for name in openai.Limits.__slots__} | {"eos": EOS})
    answer = Answer((-2, 1), (4, EOS), (-0.5, -0.5), ((0, 0),))
    choice = reply.respond(ask, [[answer]], ending, "x", 0)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("1", "stop", (4, EOS))


def test_a_chat_without_token_ids_has_the_begin_token_once_and_with_them_what_they_say() -> None:
    chat = {"messages": [{"role": "user", "content": "12"}, {"role": "user", "content": [{"type": "text", "text": "="}]}]}
    assert openai.read("chat.completions", chat, limits()).prompts == ((BOS, 4, 5, 13),)
    assert openai.read("chat.completions", {**chat, "prompt_token_ids": [9]}, limits()).prompts == ((9,),)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([1], r"messages\[0\]: must be an object"),
        ([{"role": "robot", "content": "1"}], r"messages\[0\].role: 'robot' is none of system"),
        ([{"role": "user", "content": "1"}, {"role": "user"}], r"messages\[1\].content: must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content: must be a text"),
        ([{"role": "user", "content": "hello"}], "messages: 'h' is not in the model's alphabet"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(messages: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        openai.read("chat.completions", {"messages": messages}, limits())
