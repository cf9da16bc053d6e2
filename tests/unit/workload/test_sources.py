"""Sources: what they give again after a restart, and what they refuse by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_workload.core.place import PlaceError, decode_place, encode_place
from rljob_workload.core.replayable import ReplayableSource
from rljob_workload.core.source import BadRow, Row, SeekableSource, Source, SourceChangedError, SourceError


class Loader:
    """Handouts of `batch` rows in order, with a place. Broken in whatever way a test wants."""

    def __init__(self, rows: int = 10, batch: int = 4, *, workers: int = 0, lengths: dict[int, int] | None = None) -> None:
        self.rows, self.batch, self.workers = rows, batch, workers
        self.lengths = lengths or {}
        self.epoch = self.offset = 0
        self.raises_at = -1
        self.reads = 0

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.lengths.get(self.epoch, self.rows)
        while self.offset < rows:
            self.reads += 1
            if self.offset == self.raises_at:
                raise OSError("disk gone")
            handout = list(range(self.offset, min(self.offset + self.batch, rows)))
            self.offset += len(handout)
            yield handout
        self.epoch, self.offset = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "offset": self.offset, "workers": self.workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["workers"] != self.workers:
            raise AssertionError("workers differ")
        self.epoch, self.offset = state["epoch"], state["offset"]


def read(index: int) -> Row:
    return Row((1, index), str(index))


def make(loader: Loader | None = None, *, reader: Callable[[Any], Row] = read, **options: Any) -> ReplayableSource:
    return ReplayableSource(loader or Loader(), reader, identity={"name": "ten"}, **options)


def pull(source: Source, count: int) -> list[str]:
    rows = [source.pull() for _ in range(count)]
    return [row.expected if isinstance(row, Row) else "bad" for row in rows]


def through_json(source: Source) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(json.dumps(source.save()))
    return saved


def test_epochs_roll_on_and_no_tail_is_dropped() -> None:
    assert pull(make(), 23) == [str(n % 10) for n in range(23)]


@pytest.mark.parametrize("keep_rows", [True, False])
@pytest.mark.parametrize("pulled", range(25))
def test_after_a_restart_the_undone_rows_are_at_hand_and_the_stream_goes_on(keep_rows: bool, pulled: int) -> None:
    first = make(keep_rows=keep_rows)
    pull(first, pulled)
    live = [ordinal for ordinal in range(pulled) if ordinal % 3 == 1]
    for ordinal in set(range(pulled)) - set(live):
        first.release(ordinal)
    second = make(keep_rows=keep_rows)
    second.restore(through_json(first), pulled, live)
    assert [second.row(ordinal).expected for ordinal in live] == [str(ordinal % 10) for ordinal in live]
    assert pull(second, 15) == [str(n % 10) for n in range(pulled, pulled + 15)]
    third = make(keep_rows=keep_rows)
    third.restore(through_json(second), pulled + 15, [*live, pulled + 14])
    assert pull(third, 5) == [str(n % 10) for n in range(pulled + 15, pulled + 20)]


def test_kept_rows_let_the_place_advance_and_the_fallback_replays_from_the_lowest_undone() -> None:
    for keep_rows, base in ((True, 20), (False, 4)):
        source = make(keep_rows=keep_rows)
        pull(source, 21)
        for ordinal in set(range(21)) - {6}:
            source.release(ordinal)
        assert source.save()["base_ordinal"] == base


def test_a_row_that_is_no_json_falls_back_to_the_place_before_it() -> None:
    source = make(reader=lambda index: Row((1, index), object() if index == 5 else str(index)))  # type: ignore[arg-type]
    pull(source, 14)
    assert source.save()["base_ordinal"] == 4
    source.release(5)
    assert source.save()["base_ordinal"] == 10  # 12 would do, but epochs end at 10: handouts are 0 4 8 10


def test_the_newest_places_are_kept_and_never_one_that_is_needed_dropped() -> None:
    source = make(keep_rows=False, places=3)
    pull(source, 60)
    assert source.places > 3  # nothing is done: all are needed
    assert source.save()["base_ordinal"] == 0
    for ordinal in range(58):
        source.release(ordinal)
    pull(source, 20)
    assert source.places == 7  # the one before 58, and those since
    for ordinal in range(58, 80):
        source.release(ordinal)
    pull(source, 5)
    assert source.places == 3


def test_another_batch_size_gives_the_same_rows_with_and_without_kept_ones() -> None:
    for keep_rows in (True, False):
        first = make(Loader(batch=4), keep_rows=keep_rows)
        pull(first, 13)
        for ordinal in set(range(13)) - {2, 7, 12}:
            first.release(ordinal)
        second = make(Loader(batch=3), keep_rows=keep_rows)
        second.restore(through_json(first), 13, [2, 7, 12])
        assert [second.row(o).expected for o in (2, 7, 12)] == ["2", "7", "2"]
        assert pull(second, 9) == [str(n % 10) for n in range(13, 22)]


def test_another_number_of_workers_is_refused_with_the_loader_s_reason() -> None:
    first = make()
    pull(first, 5)
    with pytest.raises(SourceChangedError, match=r"refuses the saved place \(AssertionError: workers differ\)"):
        make(Loader(workers=2)).restore(through_json(first), 5, [4])


def test_other_rows_at_the_same_place_are_caught_by_their_stamps() -> None:
    first = make()
    pull(first, 6)
    with pytest.raises(SourceChangedError, match="prompt 4 is another row now"):
        make(reader=lambda index: Row((2, index), str(index))).restore(through_json(first), 6, [4, 5])


def test_another_identity_is_refused_with_both_values() -> None:
    first = make()
    pull(first, 6)
    other = ReplayableSource(Loader(), read, identity={"name": "eleven"})
    with pytest.raises(SourceChangedError, match="name was ten and is eleven"):
        other.restore(through_json(first), 6, [])


def test_a_loader_that_drops_the_tail_of_its_epochs_is_refused() -> None:
    loader = Loader()
    loader.drop_last = True  # type: ignore[attr-defined]
    with pytest.raises(SourceError, match="drop_last"):
        make(loader)


def test_a_place_that_cannot_be_saved_is_refused_at_once() -> None:
    loader = Loader()
    loader.workers = object()  # type: ignore[assignment]
    with pytest.raises(PlaceError, match=r"place\.workers is a object"):
        make(loader)


def test_a_source_that_ends_raises_or_changes_its_length_says_where() -> None:
    empty = make(Loader(rows=0))
    with pytest.raises(SourceError, match=r"before prompt 0 \(epoch 0, row 0\): the source ended"):
        empty.pull()
    broken = Loader()
    broken.raises_at = 4
    source = make(broken)
    pull(source, 4)
    with pytest.raises(SourceError, match=r"before prompt 4 \(epoch 0, row 4\): the source raised OSError: disk gone"):
        source.pull()
    shrunk = make(Loader(lengths={1: 7}))
    with pytest.raises(SourceError, match=r"ended after 7 rows, the one before had 10"):
        pull(shrunk, 30)


def test_the_length_is_still_watched_after_a_restart() -> None:
    first = make()
    pull(first, 13)
    second = make(Loader(lengths={1: 7}))
    second.restore(through_json(first), 13, [])
    with pytest.raises(SourceError, match="ended after 7 rows"):
        pull(second, 10)


def test_a_row_that_cannot_be_read_takes_its_ordinal_and_the_stream_goes_on() -> None:
    def reader(index: int) -> Row:
        if index == 2:
            raise KeyError("prompt")
        return read(index)

    source = make(reader=reader)
    assert [type(source.pull()) for _ in range(4)] == [Row, Row, BadRow, Row]
    assert source.next_ordinal == 4
    with pytest.raises(SourceError, match="row of prompt 2 is not held"):
        source.row(2)


def test_restart_begins_the_data_again_under_the_next_ordinal() -> None:
    source = make()
    pull(source, 6)
    source.restart(30)
    assert (pull(source, 3), source.next_ordinal) == (["0", "1", "2"], 33)
    other = make()
    other.restore(through_json(source), 33, [31])
    assert (other.row(31).expected, pull(other, 2)) == ("1", ["3", "4"])


@pytest.mark.parametrize("field", ["base_ordinal", "place", "rows", "stamps", "epoch"])
def test_a_malformed_save_is_refused(field: str) -> None:
    source = make()
    pull(source, 5)
    saved = through_json(source)
    with pytest.raises(SourceError, match="malformed"):
        make().restore({name: value for name, value in saved.items() if name != field}, 5, [])
    with pytest.raises(SourceError):
        make().restore(saved | {field: "x"}, 5, [])


def test_a_save_of_another_kind_of_source_is_refused() -> None:
    seekable = SeekableSource([read(0)], seed=0, shuffle=False)
    with pytest.raises(SourceChangedError, match="'replayable', this job's is 'seekable'"):
        seekable.restore(through_json(make()), 0, [])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_any_restart_gives_exactly_the_undone_rows_again(rows: int, batch: int, other: int, keep: bool, seed: int) -> None:
    rng = random.Random(seed)
    source: Source = make(Loader(rows, batch), keep_rows=keep)
    live: set[int] = set()
    for _ in range(12):
        for _ in range(rng.randrange(6)):
            ordinal = source.next_ordinal
            row = source.pull()
            assert isinstance(row, Row)
            assert row.expected == str(ordinal % rows)
            live.add(ordinal)
        for ordinal in [o for o in live if rng.random() < 0.5]:
            live.discard(ordinal)
            source.release(ordinal)
        if rng.random() < 0.4:
            saved, at = through_json(source), source.next_ordinal
            source = make(Loader(rows, rng.choice((batch, other))), keep_rows=keep)
            source.restore(saved, at, sorted(live))
            assert source.next_ordinal == at
        assert all(source.row(ordinal).expected == str(ordinal % rows) for ordinal in live)


# ---- seekable ---------------------------------------------------------------------------------


def test_a_seekable_source_names_what_its_data_set_does() -> None:
    class Rows(list[Row]):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise OSError("shard gone")
            return super().__getitem__(index)

    source = SeekableSource(Rows(map(read, range(4))), seed=0, shuffle=False)
    pull(source, 2)
    with pytest.raises(SourceError, match=r"prompt 2 \(row 2\): the data set raised OSError: shard gone"):
        source.pull()
    data = list(map(read, range(4)))
    source = SeekableSource(data, seed=0, shuffle=True)
    pull(source, 4)
    data.pop()
    with pytest.raises(SourceError, match="epoch 1: the data set has 3 rows now, it had 4 before"):
        source.pull()


def test_a_seekable_source_begins_other_data_at_the_next_ordinal() -> None:
    source = SeekableSource(list(map(read, range(5))), seed=0, shuffle=False)
    source.restart(12)
    assert (pull(source, 6), source.next_ordinal, source.epoch_of(17)) == (["0", "1", "2", "3", "4", "0"], 18, 1)
    other = SeekableSource(list(map(read, range(5))), seed=0, shuffle=False)
    other.restore(through_json(source), 18, [13])
    assert (other.row(13).expected, pull(other, 1)) == ("1", ["1"])
    with pytest.raises(SourceError, match="before 12"):
        other.row(11)


# ---- places -----------------------------------------------------------------------------------

plain = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False, allow_infinity=False)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.dictionaries(st.integers() | st.just("$bytes"), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(nested)
def test_any_plain_place_survives_json(place: Any) -> None:
    assert decode_place(json.loads(json.dumps(encode_place(place)))) == place
