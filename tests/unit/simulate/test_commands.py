"""`rljob simulate` and `rljob ledger`, as they are typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rljob_cli.main import build_parser, main
from rljob_workload.core.checkpoint import RunDirectory
from rljob_workload.core.simulation.settings import RULES, SimSettings, random_schedule

PARTITION = ["trained", "filtered", "training", "buffered", "in_flight", "pending", "retryable", "skipped"]
KEYS = [
    *("handed_out", *PARTITION, "skipped_by", "lost", "trained_twice"),
    *("rolled_back_prompts", "extra_answers", "invariant_violations"),
]


@pytest.mark.parametrize("source", ["seekable", "replayable"])
@pytest.mark.parametrize("buffer", [[], ["--no-load-replay-buffer"]])
def test_simulate_reports_a_run_without_losses(source: str, buffer: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seed", "7", "--prompts", "960", "--crashes", "8", "--failure-rate", "0.02", "--source", source, *buffer]
    assert main(["simulate", *words, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(KEYS) <= found.keys()
    assert (found["lost"], found["trained_twice"], found["invariant_violations"], found["crashes"]) == (0, 0, 0, 8)
    assert sum(found["skipped_by"].values()) == found["skipped"]
    assert found["handed_out"] == sum(found[state] for state in PARTITION)


def test_another_rule_shows_its_losses_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--rule", "live-cursor", "--prompts", "960", "--crashes", "8"]) == 0
    assert "LOST 0 " not in capsys.readouterr().out


def test_the_text_names_skipped_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--prompts", "300", "--bad-rows", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "PromptTooLong: " in out
    assert "LOST 0  TRAINED TWICE 0  INVARIANT VIOLATIONS 0" in out


@pytest.mark.parametrize("words", [["--prompts", "0"], ["--failure-rate", "2"]])
def test_a_bad_option_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    assert capsys.readouterr().err.startswith(f"rljob: {words[0]} ")


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_s_command_repeats_it(seed: int) -> None:
    settings = random_schedule(seed)
    options = vars(build_parser().parse_args(shlex.split(settings.command())[1:]))
    del options["run"], options["output"]
    assert SimSettings(**options) == settings


def test_the_rules_are_those_of_the_workload() -> None:
    for rule in RULES:
        assert build_parser().parse_args(["simulate", "--rule", rule]).rule == rule


def checkpoint(directory: Path, step: int, state: dict[str, Any]) -> Path:
    run = RunDirectory(directory)
    return run.publish(run.begin(step, 1), step, 1, state).path


LEDGER = {
    "version": 2,
    "next_ordinal": 12,
    "frontier_ordinal": 4,
    "trained": 4,
    "filtered": 0,
    "skipped": {"BadRow": 1},
    "skipped_names": {"BadRow": [6]},
    "at_risk": 3,
    "window": "b,i,d,b,2i,b,r:1",
    "last_commit": {"step": 1, "count": 4, "digest": "x"},
}


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    checkpoint(tmp_path, 1, {"collector": {"ledger": LEDGER, "source": {"base_ordinal": 8}}})
    return tmp_path


@pytest.mark.parametrize("which", [".", "step-000001-t000001"])
def test_ledger_shows_the_books_of_a_checkpoint(run_directory: Path, which: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(run_directory / which), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in ("handed_out", "trained", "buffered", "in_flight", "retryable", "skipped")} == {
        "handed_out": 12,
        "trained": 4,
        "buffered": 3,
        "in_flight": 3,
        "retryable": 1,
        "skipped": 1,
    }
    assert (found["frontier_ordinal"], found["resume_base_ordinal"], found["step"], found["token"]) == (4, 8, 1, 1)
    assert (found["skipped_by"], found["skipped_names"], found["at_risk"]) == ({"BadRow": 1}, {"BadRow": [6]}, 3)
    assert found["undone"]["in_flight"] == [[5, 5], [8, 9]]


def test_ledger_prints_a_table_for_people(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(run_directory)]) == 0
    out = capsys.readouterr().out
    assert "in flight: 5, 8-9" in out
    assert "skipped (BadRow): 6" in out
    assert "up to 3 prompts" in out


def test_ledger_says_what_is_wrong_with_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    assert main(["ledger", str(tmp_path)]) == 2
    assert "no complete checkpoint in" in capsys.readouterr().err
    legacy = checkpoint(tmp_path, 1, {"step": 1})
    assert main(["ledger", str(legacy)]) == 1
    assert "has no prompt ledger" in capsys.readouterr().err
    broken = checkpoint(tmp_path, 2, {"collector": {"ledger": LEDGER | {"trained": 9}}})
    assert main(["ledger", str(broken)]) == 1
    assert "field 'window'" in capsys.readouterr().err
    (broken / "MANIFEST.json").write_text("{")
    assert main(["ledger", str(broken)]) == 1
    assert "MANIFEST.json is malformed" in capsys.readouterr().err
