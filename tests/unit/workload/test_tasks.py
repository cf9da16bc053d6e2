"""The built-in tasks and their judge."""

from __future__ import annotations

import pytest

from rljob_api.spec_task import Data, Environment
from rljob_workload.data.builtin import BUILTIN_TASKS, load_builtin
from rljob_workload.data.tokenizer import BOS, EOS, DigitTokenizer
from rljob_workload.environments import BUILTIN_ENVIRONMENTS, load_environment
from rljob_workload.environments.exact_match import ExactMatch


@pytest.mark.parametrize(
    ("answer", "expected", "fixed", "open_ended"),
    [
        ("123", "123", 1.0, 1.0),
        ("124", "123", 2 / 3, 1 / 3),
        ("12", "123", 2 / 3, 1 / 3),
        ("1234", "123", 3 / 4, 3 / 8),
        ("", "123", 0.0, 0.0),
        ("321", "123", 1 / 3, 1 / 6),
    ],
)
def test_exact_match_pays_for_right_characters_and_for_the_whole(
    answer: str, expected: str, fixed: float, open_ended: float
) -> None:
    assert ExactMatch(fixed_length=True).score(answer, expected).reward == pytest.approx(fixed)
    score = ExactMatch(fixed_length=False).score(answer, expected)
    assert score.reward == pytest.approx(open_ended)
    assert score.correct is (answer == expected)


@pytest.mark.parametrize("name", BUILTIN_TASKS)
def test_the_right_answer_fits_its_token_limit_and_scores_one(name: str) -> None:
    task = load_builtin(name)
    environment = load_environment("exactMatch", fixed_length=task.eos is None)
    for row in task.rows:
        assert row.tokens[0] == BOS
        right = [*task.tokenizer.tokenize(row.expected), *([EOS] if task.eos is not None else [])]
        assert len(right) <= task.new_tokens(task.answer_tokens)
        assert environment.score(task.tokenizer.decode(right), row.expected).reward == 1.0


def test_a_fixed_length_task_stops_at_its_length_and_an_open_one_at_the_limit() -> None:
    assert load_builtin("copy3").new_tokens(4) == 3
    assert load_builtin("copy3").new_tokens(2) == 2
    assert load_builtin("copyv").new_tokens(12) == 12


def test_answers_of_copyv_differ_in_length() -> None:
    assert {len(row.expected) for row in load_builtin("copyv").rows} == {1, 2, 3, 4, 5, 6}


def test_decoding_stops_at_the_end_and_shows_foreign_tokens() -> None:
    tokenizer = DigitTokenizer()
    assert tokenizer.decode([4, 5, EOS, 6]) == "12"
    assert tokenizer.decode([63, 4]) == "?1"


def test_the_spec_offers_exactly_what_is_built_in() -> None:
    def choices(model: type, field: str) -> set[str]:
        annotation = model.model_fields[field].annotation  # type: ignore[attr-defined]
        return {name for part in annotation.__args__ if part is not type(None) for name in part.__args__}

    assert choices(Data, "builtin") == set(BUILTIN_TASKS)
    assert choices(Environment, "builtin") == set(BUILTIN_ENVIRONMENTS)


@pytest.mark.parametrize("load", [load_builtin, lambda name: load_environment(name, fixed_length=True)])
def test_an_unknown_name_is_answered_with_the_known_ones(load: object) -> None:
    with pytest.raises(ValueError, match=r"'nope'; there (is|are) "):
        load("nope")  # type: ignore[operator]
