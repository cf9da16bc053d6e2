"""`rljob checkpoints` and `rljob ledger` on directories that a trainer left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_cli.main import main
from rljob_workload.core.checkpoint import MANIFEST, RunDirectory

from .builders import owner, save


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Token 1 wrote 10, 20 (damaged) and, overtaken, 30; token 2 went on from 10 and wrote 15."""
    directory = RunDirectory(tmp_path)
    directory.take_token(owner(1), None)
    for step in (10, 20, 30):
        save(directory, step)
    directory.take_token(owner(2), "step-000010-t000001")
    save(directory, 15, 2, parent="step-000010-t000001", writer=owner(2))
    (tmp_path / "step-000020-t000001" / "random.json").unlink()
    return directory


def shown(run: RunDirectory, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["checkpoints", str(run.root), "-o", "json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_checkpoints_says_of_each_what_it_is(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(run, capsys)
    assert (found["chosen"], found["token"], found["resumed_from"]) == ("step-000015-t000002", 2, "step-000010-t000001")
    rows = {row["step"]: row for row in found["checkpoints"]}
    assert [row["step"] for row in found["checkpoints"]] == [15, 30, 20, 10]
    assert {step: (row["valid"], row["on_lineage"], row["verified"]) for step, row in rows.items()} == {
        15: (True, True, "Sizes"),
        30: (True, False, "Sizes"),
        20: (False, False, None),
        10: (True, True, "Sizes"),
    }
    assert rows[15]["parent"] == "step-000010-t000001"
    files = [path for path in (run.root / rows[15]["name"]).rglob("*") if path.is_file() and path.name != MANIFEST]
    assert rows[15]["bytes"] == sum(path.stat().st_size for path in files)
    assert rows[20]["why"] == "random.json is missing; the manifest names it"
    assert "its writer was overtaken" in rows[30]["why"]
    assert shown(run, capsys, "--full")["checkpoints"][0]["verified"] == "Full"


def test_checkpoints_prints_a_table_for_people(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(run.root)]) == 0
    heads, first, *_, last = capsys.readouterr().out.splitlines()
    assert heads.split() == ["CHECKPOINT", "STEP", "TOKEN", "PARENT", "SIZE", "VERIFIED", "STATE"]
    assert first.split()[:5] == ["*", "step-000015-t000002", "15", "2", "step-000010-t000001"]
    assert first.split()[-1] == "valid"
    assert last == "token 2: attempt 2 of default/copy (uid u1), from step-000010-t000001"


def test_exit_statuses_tell_what_a_resume_would_find(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step-000015-t000002", "step-000010-t000001"):
        (run.root / name / "MANIFEST.json").unlink()
    assert main(["checkpoints", str(run.root)]) == 1
    assert "MANIFEST.json: No such file" in capsys.readouterr().out
    assert main(["checkpoints", str(run.root / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_a_damaged_fence_hides_no_checkpoint(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    entry = next((run.root / "fence").glob("t*")) / "entry.json"
    for damaged in (entry, run.root / "fence.json"):
        whole = damaged.read_text()
        damaged.write_text("{")
        assert main(["checkpoints", str(run.root)]) == 1
        *rows, last = capsys.readouterr().out.splitlines()
        assert [row.split()[0] for row in rows[1:]] == [
            "step-000015-t000002",
            *(f"step-0000{step}-t000001" for step in (30, 20, 10)),
        ]
        assert rows[1].endswith("whole; whether a resume may read it only the fence can tell")
        assert "random.json" in rows[3]
        assert last.startswith(f"no resume goes on from here: {damaged.relative_to(run.root)} is malformed")
        damaged.write_text(whole)
    assert main(["checkpoints", str(run.root)]) == 0


def test_a_directory_without_checkpoints_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"no checkpoint in {tmp_path}\n"


def test_ledger_reads_the_books_of_the_checkpoint_that_a_resume_would_take(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", str(run.root), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = ("step", "token", "handed_out", "trained", "skipped", "frontier_ordinal", "resume_base_ordinal")
    assert [found[key] for key in keys] == [15, 2, 12, 4, 1, 4, 8]
    assert main(["ledger", str(run.root / "step-000020-t000001")]) == 1
    assert "random.json is missing" in capsys.readouterr().err
