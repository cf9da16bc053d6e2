"""Turns of an agent become one sequence: whatever the agent sends, what is trained is what the engine generated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_workload.algorithm.batch import Answer, Versions
from rljob_workload.core.groups import FinishedGroup, Scored, group_from_json, group_to_json
from rljob_workload.core.trajectory import Trajectory, TurnError
from rljob_workload.data.tokenizer import BOS, EOS, DigitTokenizer

TOKENIZER = DigitTokenizer()
PARTS = st.lists(st.tuples(st.lists(st.integers(3, 17), max_size=4), st.lists(st.integers(3, 17), min_size=1, max_size=4)),
                 min_size=1, max_size=5)  # fmt: skip


def answer(tokens: tuple[int, ...], versions: Versions = ((0, 0),), logprob: float = -0.5) -> Answer:
    return Answer((-2, 1), tokens, (logprob,) * len(tokens), versions)


def turn(trajectory: Trajectory, text: str, said: str) -> None:
    """A turn by text; the model says something."""
    prompt = trajectory.begin_with_text(text, TOKENIZER.tokenize, (BOS,))
    trajectory.end(prompt, answer(tuple(TOKENIZER.tokenize(said))), text=text, said=said)


@given(PARTS)
def test_generated_tokens_keep_their_places_and_their_logprobs(parts: list[tuple[list[int], list[int]]]) -> None:
    trajectory = Trajectory()
    generated: list[tuple[int, float]] = []
    for number, (told, said) in enumerate(parts):
        prompt = trajectory.begin_with_tokens((*trajectory.so_far, *((BOS, *told) if number == 0 else told)))
        trajectory.end(prompt, answer(tuple(said), logprob=-1.0 - number))
        generated += [(token, -1.0 - number) for token in said]
    whole = trajectory.as_answer((7, 0))
    spoken = [token for start, stop in whole.spans for token in whole.tokens[start:stop]]
    assert list(zip(spoken, whole.logprobs, strict=True)) == generated
    assert whole.prompt == (BOS, *parts[0][0])
    assert whole.spans[0][0] == 0, "the answer begins with the first generated token"
    assert whole.spans[-1][1] == len(whole.tokens), "and ends with the last one"
    everything = [token for told, said in parts for token in (*told, *said)]
    assert [*(whole.prompt or ()), *whole.tokens] == [BOS, *everything]


def test_text_of_earlier_turns_stands_for_the_tokens_that_were_generated() -> None:
    """The model said `1`, an end token and `2`: as text that is `1`, and encoding it again would lose two tokens."""
    trajectory = Trajectory()
    prompt = trajectory.begin_with_text("12=", TOKENIZER.tokenize, (BOS,))
    assert prompt == TOKENIZER.encode("12="), "the begin token stands there once"
    said = (*TOKENIZER.tokenize("1"), EOS, *TOKENIZER.tokenize("2"))
    trajectory.end(prompt, answer(said), text="12=", said="1")
    again = trajectory.begin_with_text("12=1:", TOKENIZER.tokenize, (BOS,))
    assert again == (*prompt, *said, *TOKENIZER.tokenize(":"))


def test_messages_of_earlier_turns_do_so_too() -> None:
    trajectory = Trajectory()
    first = [{"role": "user", "content": "12="}]
    prompt = trajectory.begin_with_messages(first, TOKENIZER.chat, TOKENIZER.tokenize, (BOS,))
    said = (*TOKENIZER.tokenize("1"), EOS)
    so_far = [*first, {"role": "assistant", "content": "1"}]
    trajectory.end(prompt, answer(said), messages=first, said="1")
    hint = {"role": "user", "content": ":2"}
    again = trajectory.begin_with_messages([*so_far, hint], TOKENIZER.chat, TOKENIZER.tokenize, (BOS,))
    assert again == (*prompt, *said, *TOKENIZER.tokenize(":2"))
    with pytest.raises(TurnError, match="do not begin with the 2 messages so far, the last of which is the answer of turn 1"):
        trajectory.begin_with_messages([*first, hint], TOKENIZER.chat, TOKENIZER.tokenize, (BOS,))


def test_a_turn_that_does_not_go_on_from_the_one_before_is_refused_with_the_place() -> None:
    trajectory = Trajectory()
    turn(trajectory, "12=", "34")
    with pytest.raises(
        TurnError, match=r"turn 2 does not go on from turn 1: token 5 is 8, prompt and answer so far \(6 tokens\)"
    ):
        trajectory.begin_with_tokens((*TOKENIZER.encode("12=3"), 8, 9))
    with pytest.raises(TurnError, match="token 3 is nothing"):
        trajectory.begin_with_tokens(TOKENIZER.encode("12"))
    with pytest.raises(TurnError, match="does not begin with prompt and answer of turn 1"):
        trajectory.begin_with_text("12=35:", TOKENIZER.tokenize, (BOS,))
    with pytest.raises(TurnError, match="turn 1 was not given as messages"):
        trajectory.begin_with_messages([{"role": "user", "content": "1"}], TOKENIZER.chat, TOKENIZER.tokenize, (BOS,))


def test_age_counts_from_the_first_generated_token_and_versions_follow_the_turns() -> None:
    trajectory = Trajectory()
    prompt = trajectory.begin_with_tokens((BOS, 4))
    trajectory.end(prompt, answer((5, 6), ((0, 3), (1, 4))))
    prompt = trajectory.begin_with_tokens((BOS, 4, 5, 6, 9))
    trajectory.end(prompt, answer((7, 8), ((0, 4), (1, 5))))
    whole = trajectory.as_answer((0, 0))
    assert whole.versions == ((0, 3), (1, 4), (4, 5))
    assert (whole.first_version, whole.last_version) == (3, 5)


def test_a_finished_group_of_several_turns_comes_back_from_a_checkpoint_as_it_was() -> None:
    trajectory = Trajectory()
    turn(trajectory, "12=", "34")
    turn(trajectory, "12=34:", "5")
    group = FinishedGroup.of(3, [Scored(trajectory.as_answer((3, 1)), reward, reward > 0) for reward in (0.0, 1.0)])
    assert group_from_json(group_to_json(group)) == group


def test_a_turn_asked_again_is_the_same_turn() -> None:
    """Its answer may have been lost on the way to the agent."""
    trajectory = Trajectory()
    first = [{"role": "user", "content": "12="}]
    prompt = trajectory.begin_with_messages(first, TOKENIZER.chat, TOKENIZER.tokenize, (BOS,))
    assert not trajectory.repeats(prompt)
    trajectory.end(prompt, answer((4,)), messages=first, said="1")
    assert trajectory.repeats(trajectory.begin_with_messages(first, TOKENIZER.chat, TOKENIZER.tokenize, (BOS,)))
    assert trajectory.repeats(trajectory.begin_with_tokens(prompt))
    assert not trajectory.repeats(trajectory.begin_with_tokens((*prompt, 4, 5)))
    turn(trajectory := Trajectory(), "12=", "34")
    assert trajectory.repeats(trajectory.begin_with_text("12=", TOKENIZER.tokenize, (BOS,)))
    assert trajectory.turns == 1
