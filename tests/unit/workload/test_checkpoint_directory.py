"""Checkpoint directories: only complete ones are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_workload.core.checkpoint import MANIFEST, CheckpointError, RunDirectory


def save(directory: RunDirectory, step: int, token: int = 1) -> Path:
    tmp = directory.begin(step, token)
    (tmp / "weights").mkdir()
    (tmp / "weights" / "shard").write_bytes(b"x" * (100 + step))
    return directory.publish(tmp, step, token, {"step": step}).path


def test_the_newest_complete_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (5, 10):
        save(directory, step)
    found, passed_over = directory.newest()
    assert found is not None
    assert (found.name, found.step, found.token, found.state) == ("step-000010-t000001", 10, 1, {"step": 10})
    assert passed_over == []


def test_a_newer_attempt_supersedes_a_higher_step_of_an_older_one(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 100, token=1)
    save(directory, 60, token=2)
    found, _ = directory.newest()
    assert found is not None
    assert found.name == "step-000060-t000002"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: (path / MANIFEST).unlink(), "MANIFEST.json: No such file"),
        (lambda path: (path / MANIFEST).write_text('{"ver'), "MANIFEST.json is malformed"),
        (lambda path: (path / MANIFEST).write_text("[]"), "MANIFEST.json is malformed"),
        (lambda path: (path / "weights" / "shard").write_bytes(b"x"), "weights/shard has 1 bytes, the manifest says 110"),
        (lambda path: (path / "weights" / "shard").unlink(), "weights/shard is missing"),
        (
            lambda path: (path / MANIFEST).write_text(json.dumps({"version": 9})),
            "manifest version 9 is not 2",
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: object, why: str) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 5)
    broken = save(directory, 10)
    damage(broken)  # type: ignore[operator]
    found, passed_over = directory.newest()
    assert found is not None
    assert found.step == 5
    assert len(passed_over) == 1
    assert passed_over[0].startswith("step-000010-t000001: ")
    assert why in passed_over[0]


def test_a_file_named_like_a_checkpoint_is_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "step-000030-t000001").write_text("")
    why = "step-000030-t000001: MANIFEST.json: Not a directory: step-000030-t000001 is a file or a symbolic link"
    assert RunDirectory(tmp_path).newest() == (None, [why])


def test_an_unfinished_checkpoint_is_invisible_and_removed_by_the_next_attempt(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    save(directory, 5)
    (directory.begin(10, 1) / "half").write_bytes(b"x")
    assert directory.newest()[0].step == 5  # type: ignore[union-attr]
    assert directory.remove_unfinished() == [".tmp-step-000010-t000001"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005-t000001"]


def test_pruning_keeps_the_newest_complete_ones_and_never_counts_broken_ones(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    paths = [save(directory, step) for step in (5, 10, 15, 20)]
    (paths[3] / MANIFEST).unlink()
    assert directory.prune(2) == ["step-000005-t000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in paths[1:]]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "nothing").newest() == (None, [])
