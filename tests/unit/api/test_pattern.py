"""Patterns of failure rules say what Python's `re` says, and never take long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.pattern import MAX_TEXT, Pattern, PatternError

ATOMS = st.sampled_from(["a", "b", "c", ".", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[a-c1]", r"\.", "^", r"\n", "-"])


def _joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.builds(lambda one, sign: f"(?:{one}){sign}", parts, st.sampled_from(["*", "+", "?", ""]))
    either = st.builds(lambda one, other: f"({one}|{other})", parts, parts)
    return repeated | either | st.builds(lambda one, other: one + other, parts, parts)


@settings(max_examples=600, deadline=None)
@given(st.recursive(ATOMS, _joined, max_leaves=8), st.text(alphabet="abc1.-\n", max_size=12), st.booleans())
def test_a_pattern_says_what_re_says(pattern: str, text: str, to_end: bool) -> None:
    theirs = pattern + (r"\Z" if to_end else "")
    assert Pattern(pattern + ("$" if to_end else "")).search(text) == bool(re.search(theirs, text))


def test_a_pattern_that_makes_others_backtrack_ends() -> None:
    assert not Pattern("(a+)+$" + "a?" * 40).search("a" * (MAX_TEXT - 1) + "b")


def test_the_end_of_a_long_text_is_searched() -> None:
    assert Pattern("last word$").search("x" * 100_000 + " last word")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a{2}", r"'{' at position 2 of 'a{2}' is not in this language (nothing counts repetitions); \{ matches the character"),
        ("(a", "'(' at position 1 of '(a' has no ) after it"),
        ("a)", "')' at position 2 of 'a)' has no ( before it"),
        ("*a", "'*' at position 1"),
        ("(?=a)", "'?' at position 2"),
        (r"a\b", "'b' at position 3"),
        ("[a", "'[' at position 1 of '[a' has no ] after it"),
        ("[z-a]", "is no range from 'z' to 'a'"),
        ("a\\", "ends the pattern"),
    ],
)
def test_what_is_not_in_the_language_is_named(pattern: str, words: str) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern(pattern)
    assert words in str(caught.value)
