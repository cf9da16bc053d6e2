"""The room rule, and the stream of prompts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_workload.core.ledger import Counts
from rljob_workload.core.source import Row, SeekableSource, SourceError
from rljob_workload.core.window import Window


@pytest.mark.parametrize(
    ("counts", "version", "room"),
    [
        (Counts(), 0, 16),  # (age 1 + 1) * 8
        (Counts(handed_out=16, in_flight=10, buffered=6), 0, 0),
        (Counts(handed_out=16, in_flight=4, buffered=2, trained=8, filtered=2), 1, 10),  # done ones take no room
        (Counts(handed_out=9, skipped=9), 0, 16),
        (Counts(), 99, 8),  # the last step of 100
        (Counts(), 100, 0),
        (Counts(in_flight=40), 0, 0),  # P became smaller
    ],
)
def test_room(counts: Counts, version: int, room: int) -> None:
    assert Window(prompts_per_step=8, max_age=1, steps=100).room(counts.live, version) == room


def rows(count: int) -> list[Row]:
    return [Row((1, index), str(index)) for index in range(count)]


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_every_epoch_shows_each_row_once_in_its_own_order(count: int, seed: int, epoch: int) -> None:
    source = SeekableSource(rows(count), seed=seed, shuffle=True)
    seen = [source.row(ordinal).expected for ordinal in range(epoch * count, (epoch + 1) * count)]
    assert sorted(seen) == sorted(str(index) for index in range(count))


def test_an_ordinal_is_the_same_row_in_every_process_and_in_any_order_of_asking() -> None:
    first, second = (SeekableSource(rows(50), seed=3, shuffle=True) for _ in range(2))
    forwards = [first.row(ordinal) for ordinal in range(200)]
    backwards = [second.row(ordinal) for ordinal in reversed(range(200))]
    assert forwards == backwards[::-1]
    assert forwards[:50] != forwards[50:100]


def test_without_shuffle_the_rows_keep_their_order() -> None:
    source = SeekableSource(rows(3), seed=3, shuffle=False)
    assert [source.row(ordinal).expected for ordinal in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_the_fingerprint_changes_with_rows_seed_and_order() -> None:
    prints = [
        SeekableSource(data, seed=seed, shuffle=shuffle).fingerprint()
        for data in (rows(5), rows(6))
        for seed in (0, 1)
        for shuffle in (False, True)
    ]
    assert all(a != b for a, b in itertools.combinations(prints, 2))
    assert SeekableSource(rows(5), seed=0, shuffle=True).fingerprint() in prints


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(SourceError, match="no rows"):
        SeekableSource([], seed=0, shuffle=True)
