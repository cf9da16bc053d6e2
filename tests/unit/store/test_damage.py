"""Whatever may be wrong on a volume: named by file and field, never followed, never unpickled, never deleted."""

from __future__ import annotations

import json
import os
import pickle
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_workload.core.checkpoint import MANIFEST, CheckpointError, Origin, RunDirectory, open_checkpoint
from rljob_workload.core.store import collector_files
from rljob_workload.core.store.errors import InvalidCheckpointError
from rljob_workload.core.store.filesystem import Kind, OsFiles
from rljob_workload.core.store.safetensors import Column, TensorFileError, from_bytes, to_bytes

from .builders import COLLECTOR, owner, save

SECRET = b"outside"
OUT = "not the path of a file below the checkpoint"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Steps 10 and 20, and a file outside of the run's directory."""
    (tmp_path / "outside").write_bytes(SECRET)
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.take_token(owner(), None)
    for step in (10, 20):
        save(directory, step)
    return directory


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((path / MANIFEST).read_text())
    change(data)
    (path / MANIFEST).write_text(json.dumps(data))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)


def replace_by(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


class Bomb:
    """Unpickling it would be noticed."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/nonexistent/unpickled",)


def to_link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


#: What is done to step 20, and what is said: file, field, words.
DAMAGE: list[tuple[Callable[[Path], object], str, str, str]] = [
    (lambda p: os.truncate(p / "weights/shard", 7), "weights/shard", "size", "has 7 bytes, the manifest says 120"),
    (lambda p: flip(p / "weights/shard"), "weights/shard", "sha256", "has SHA-256"),
    (lambda p: flip(p / "buffer.safetensors"), "buffer.safetensors", "sha256", "has SHA-256"),
    (lambda p: (p / "weights/shard").unlink(), "weights/shard", "", "is missing"),
    (lambda p: (p / "weights/extra").write_text(""), "weights/extra", "", "the manifest does not name it"),
    (lambda p: (p / "extra.pt").write_bytes(pickle.dumps(Bomb())), "extra.pt", "", "the manifest does not name it"),
    (lambda p: replace_by(p / "weights/shard", to_link("../../../outside")), "weights/shard", "", "is neither a file nor"),
    (lambda p: (p / "weights/extra").mkdir(), "weights/extra", "", "the manifest has nothing below it"),
    (lambda p: (p / "a/b").mkdir(parents=True), "a", "", "the manifest has nothing below it"),
    (lambda p: replace_by(p / "weights/shard", os.mkfifo), "weights/shard", "", "is neither a file nor a directory"),
    (lambda p: replace_by(p / "weights/shard", Path.mkdir), "weights/shard", "", "is a directory, expected a file"),
    (lambda p: replace_by(p / MANIFEST, to_link("../../outside")), MANIFEST, "", "symbolic links"),
    (lambda p: replace_by(p / MANIFEST, Path.mkdir), MANIFEST, "", "a directory, expected a file"),
    (lambda p: replace_by(p / MANIFEST, os.mkfifo), MANIFEST, "", "neither a file nor a directory, expected a file"),
    (lambda p: (p / MANIFEST).unlink(), MANIFEST, "", "No such file"),
    (lambda p: (p / MANIFEST).write_bytes(pickle.dumps(Bomb())), MANIFEST, "", "is malformed: not JSON"),
    (lambda p: (p / MANIFEST).write_text("[" * 100_000), MANIFEST, "", "is malformed: not JSON"),
    (lambda p: (p / MANIFEST).write_text("null"), MANIFEST, "", "no field 'version'"),
    (lambda p: rewrite(p, lambda m: m.update(version=3)), MANIFEST, "version", "3 is not 2, which this build reads (a newer"),
    (lambda p: rewrite(p, lambda m: m.update(version="2")), MANIFEST, "version", "'2' is not 2"),
    (lambda p: rewrite(p, lambda m: m.update(version=True)), MANIFEST, "version", "True is not 2"),
    (lambda p: rewrite(p, lambda m: m.update(step=21)), MANIFEST, "step", "21 is not what the directory is named after"),
    (lambda p: rewrite(p, lambda m: m.update(token=9)), MANIFEST, "token", "9 is not what the directory is named after"),
    (lambda p: rewrite(p, lambda m: m.update(step="20")), MANIFEST, "step", "is malformed"),
    (lambda p: rewrite(p, lambda m: m.pop("files")), MANIFEST, "files", "is malformed"),
    (lambda p: rewrite(p, lambda m: m.update(more=1)), MANIFEST, "more", "is malformed"),
    (lambda p: rewrite(p, lambda m: m["files"].update({"../../outside": {"size": 7}})), MANIFEST, "files", OUT),
    (lambda p: rewrite(p, lambda m: m["files"].update({"/etc/passwd": {"size": 7}})), MANIFEST, "files", OUT),
    (lambda p: rewrite(p, lambda m: m["files"]["random.json"].update(size=-1)), MANIFEST, "files.random.json.size", ""),
    (lambda p: rewrite(p, lambda m: m["files"]["random.json"].update(sha256="")), MANIFEST, "files.random.json.sha256", ""),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "file", "field", "words"), DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_is_read(
    run: RunDirectory, damage: Callable[[Path], object], file: str, field: str, words: str
) -> None:
    path = run.root / "step-000020-t000001"
    damage(path)
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(path, "Full")
    assert (caught.value.checkpoint, caught.value.file, caught.value.field) == (path.name, file, field)
    assert words in str(caught.value)
    found, passed_over = run.newest("Full")
    assert found is not None
    assert found.step == 10
    assert passed_over == [str(caught.value)]
    save(run, 30)
    assert run.prune(1, 1) == ["step-000010-t000001"]
    assert path.exists()  # named, never deleted
    assert (run.root.parent / "outside").read_bytes() == SECRET


def test_bits_of_large_files_are_read_at_level_full_only(run: RunDirectory) -> None:
    tmp = run.begin(30, 1)
    (tmp / "large").write_bytes(b"\0" * (2**20 + 1))
    run.publish(tmp, 30, 1, {})
    flip(run.root / "step-000030-t000001" / "large")
    assert run.choose("Sizes").name == "step-000030-t000001"
    assert run.choose("Full").name == "step-000020-t000001"
    after_a_failed_load = run.choose("Sizes", {"step-000030-t000001"})
    assert after_a_failed_load.name == "step-000020-t000001"
    assert after_a_failed_load.passed_over[0].why.startswith("large has SHA-256")


def test_a_directory_that_is_a_link_is_passed_over(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.root / "step-000020-t000001").rename(elsewhere / "step-000030-t000001")
    (run.root / "step-000030-t000001").symlink_to(elsewhere / "step-000030-t000001")
    found, passed_over = run.newest()
    assert found is not None
    assert found.step == 10
    assert passed_over == [
        "step-000030-t000001: MANIFEST.json: Not a directory: step-000030-t000001 is a file or a symbolic link"
    ]


@pytest.mark.parametrize("name", ["step-0000030-t000001", "step-30-t1", "step-000030-t000001.old", "step-000030-t000001 "])
def test_other_names_are_no_checkpoints(run: RunDirectory, name: str) -> None:
    (run.root / "step-000020-t000001").rename(run.root / name)
    assert run.newest()[0].step == 10  # type: ignore[union-attr]


def test_links_are_removed_and_not_followed(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    tmp = run.begin(30, 1)
    (tmp / "link").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="link is neither a file nor a directory; it cannot be part of a checkpoint"):
        run.publish(tmp, 30, 1, {})
    run.begin(30, 1)  # begins anew
    assert (elsewhere / "kept").exists()
    with pytest.raises(OSError, match="not a path below"):
        run.files.remove_file("../outside")
    with pytest.raises(OSError, match="not a path below"):
        run.files.read("/etc/passwd", 10)


def test_what_was_not_begun_here_is_not_published(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was not begun in"):
        run.publish(tmp_path / "elsewhere", 30, 1, {})


def test_a_digest_of_a_file_that_was_not_written_is_refused(run: RunDirectory) -> None:
    with pytest.raises(CheckpointError, match="a digest is given for shard, which was not written"):
        run.publish(run.begin(30, 1), 30, 1, {}, Origin(digests={"shard": "0" * 64}))


def test_a_writer_s_wrong_digest_shows_when_the_checkpoint_is_read(run: RunDirectory) -> None:
    tmp = run.begin(30, 1)
    (tmp / "shard").write_bytes(b"stale")
    run.publish(tmp, 30, 1, {}, Origin(digests={"shard": "0" * 64}))
    assert run.choose().name == "step-000020-t000001"


def test_state_that_json_does_not_hold_is_an_error_and_publishes_nothing(run: RunDirectory) -> None:
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json cannot be written"):
        run.publish(run.begin(30, 1), 30, 1, {"loss": float("nan")})
    assert run.choose().name == "step-000020-t000001"


def test_the_real_file_system_is_as_the_interface_says(tmp_path: Path) -> None:
    files = OsFiles(tmp_path)
    files.make_directory("a")
    files.make_directory("b")
    files.write_new("a/file", b"12")
    with pytest.raises(FileExistsError):
        files.write_new("a/file", b"")
    with pytest.raises(OSError, match="more than 1 bytes"):
        files.read("a/file", 1)
    assert files.read("a/file", 2) == b"12"
    files.write_new("b/file", b"3")
    with pytest.raises(OSError) as caught:  # what a token and a checkpoint rest on
        files.rename("a", "b")
    assert caught.value.filename == "a"
    (tmp_path / "link").symlink_to("a")
    assert files.entries("") == {"a": Kind.DIRECTORY, "b": Kind.DIRECTORY, "link": Kind.OTHER}
    with pytest.raises(OSError, match="Not a directory") as caught:
        files.read("link/file", 10)
    assert caught.value.filename == "link/file"


# ---- the collector's files ---------------------------------------------------------------------


def test_a_snapshot_comes_back_as_it_was_and_its_books_without_its_answers(run: RunDirectory) -> None:
    found = open_checkpoint(run.root / "step-000020-t000001")
    assert found.state == {"collector": COLLECTOR, "totals": {"trained_prompts": 4}}
    slim = run.load("step-000020-t000001", buffer=False).state["collector"]
    assert slim == {key: value for key, value in COLLECTOR.items() if key != "buffer"}
    assert (run.root / "step-000020-t000001" / MANIFEST).stat().st_size < 4096


answers = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
        "logprobs": st.lists(st.floats(allow_nan=False, width=32) | st.floats(allow_nan=False), max_size=4),
        "reward": st.floats(allow_nan=False, allow_infinity=False),
        "versions": st.just([[0, 3]]),
    }
)


@given(st.lists(st.fixed_dictionaries({"ordinal": st.integers(0, 99), "answers": st.lists(answers, max_size=3)}), max_size=4))
def test_any_answers_survive_without_loss(groups: list[dict[str, Any]]) -> None:
    files = collector_files.to_files({"version": 1, "buffer": groups})
    assert collector_files.from_files(files.__getitem__, files) == {"version": 1, "buffer": groups}


def test_the_columns_are_a_safetensors_file() -> None:
    """Byte for byte as the format's own page has it: length, header padded to 8 bytes, numbers in little-endian order."""
    header = b'{"t":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"p":{"dtype":"F64","shape":[1],"data_offsets":[8,16]}}'
    padded = header + b" " * (-len(header) % 8)
    data = len(padded).to_bytes(8, "little") + padded + b"\1\0\0\0\xfe\xff\xff\xff" + b"\0\0\0\0\0\0\xe0\x3f"
    assert to_bytes({"t": array("i", [1, -2]), "p": array("d", [0.5])}) == data
    assert from_bytes(data) == {"t": array("i", [1, -2]), "p": array("d", [0.5])}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "longer than the file"),
        (b"\xff" * 8, "longer than the file"),
        (b"\2\0\0\0\0\0\0\0[]", "header is malformed"),
        (b"\2\0\0\0\0\0\0\0x}", "header is malformed"),
        (to_bytes({"a": array("i", [1])}).replace(b"I32", b"F16"), "column 'a': type 'F16'"),
        (to_bytes({"a": array("i", [1])}).replace(b"[0,4]", b"[0,9]"), "column 'a'"),
        (to_bytes({"a": array("i", [1])}).replace(b"[1]", b"[7]"), "column 'a': 7 numbers"),
    ],
)
def test_bytes_that_are_no_columns_are_named(data: bytes, words: str) -> None:
    with pytest.raises(TensorFileError, match=words.replace("[", r"\[")):
        from_bytes(data)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"collector.json": b"[]"}, "collector.json is malformed"),
        ({"buffer.json": b'[{"answers":[{"tokens":99,"logprobs":0}]}]'}, "it has fewer numbers"),
        ({"buffer.json": b"[]"}, "it has more numbers"),
        ({"buffer.json": b'[{"ordinal":1}]'}, "buffer.json is malformed"),
    ],
)
def test_files_that_contradict_each_other_are_named(files: dict[str, bytes], words: str) -> None:
    written = collector_files.to_files(COLLECTOR) | files
    with pytest.raises(ValueError, match=words):
        collector_files.from_files(written.__getitem__, written)


def test_columns_are_as_short_as_they_fit() -> None:
    def typecode(values: list[float]) -> str:
        column: Column = collector_files._real_numbers(values)
        return column.typecode

    assert (typecode([-0.5, 0.0]), typecode([0.1]), typecode([1e300])) == ("f", "d", "d")
