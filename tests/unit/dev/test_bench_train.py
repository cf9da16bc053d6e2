"""The pure parts of `make bench-train`: the form of its result, and what its arms are given."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from benchmarks import results, train, uneven
from benchmarks.local_run import Watched
from benchmarks.results import BenchError, Row, child, python, table
from benchmarks.stack import judged


def test_a_result_has_the_documented_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    rows = [Row("speed", "steps/s", 12.34567, 6.0, "higher", "peer: other"), Row("cost", "ms", 0.5, None, "lower", "alone")]
    found = json.loads(results.write("some", rows).read_text())
    assert list(found[0]) == ["measure", "unit", "ours", "peer", "ratio", "better", "note"]
    assert (found[0]["ours"], found[0]["ratio"]) == (12.35, 2.058)
    assert (found[1]["peer"], found[1]["ratio"]) == (None, None)
    assert "12.35" in table(rows)


def test_a_row_with_an_aim_says_whether_it_is_reached() -> None:
    slow, fast = (Row("whole", "ms", ours, 50.0, "lower", "peer: parts", 1.25) for ours in (63.0, 62.0))
    few, short = (
        Row("rate", "1/s", 1.4, 1.0, "higher", "peer: sync", 1.5),
        Row("save", "ms", 90.0, None, "lower", "median", 200),
    )
    assert (slow.reached, fast.reached, few.reached, short.reached) == (False, True, False, True)
    assert slow.as_json()["note"] == "peer: parts; aim: at most 1.25 times, NOT reached"
    assert short.as_json()["note"] == "median; aim: at most 200 ms, reached"
    assert "aim: at least 1.5 times, NOT reached" in table([few])


def test_a_part_that_fails_is_an_error_with_its_words() -> None:
    with pytest.raises(BenchError, match=r"the part ended with 1: .*no_such_module"):
        child("the part", python("benchmarks.no_such_module"), 60)


def test_both_sides_get_the_same_log_normal_lengths() -> None:
    drawn = sorted(length for ordinal in range(2000) for length in uneven.lengths(ordinal, uneven.ANSWERS))
    assert statistics.median(drawn) == pytest.approx(16, abs=1)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(320, rel=0.15)
    assert max(drawn) == uneven.CONTEXT - uneven.PROMPT_TOKENS
    assert uneven.lengths(7, 8) == uneven.lengths(7, 8) != uneven.lengths(8, 8)
    logs = [math.log(length / 16) for length in drawn if 1 < length < uneven.CONTEXT - uneven.PROMPT_TOKENS]
    assert statistics.fmean(logs) == pytest.approx(0, abs=0.1)


def test_the_stacks_overhead_is_its_time_over_the_two_parts() -> None:
    parts = {"engine": 0.03, "submit": 0.01, "train": 0.02, "take": 0.001, "handover": 0.002}
    alone = {"cpu": parts, "wall": parts, "samples": 128.0, "filtered": 1.0}
    line = {"seconds": {"generate": 0.045, "train": 0.02, "handover": 0.001, "commit": 0.003}, "filtered": [1, 2]}
    lines = [line | {"elapsed_seconds": round(0.069 * step + (step % 2) / 100, 3)} for step in range(40)]
    whole = Watched(lines, 30.0, {"rank": 6.0, "collector": 0.4, "driver": 0.2, "ray": 1.0}, 100)
    ratios = {row.measure: row.as_json()["ratio"] for row in judged([alone] * 3, [whole] * 3)}
    assert ratios["loop in one process, CPU"] == pytest.approx(63 / 60, rel=1e-3)
    assert ratios["whole job, CPU"] == pytest.approx(66 / 60, rel=1e-3)
    assert ratios["whole job, wall"] == pytest.approx(69 / 60, rel=1e-3)


def test_the_page_holds_what_was_measured_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{train.BEGIN}\nold\n{train.END}\nafter\n")
    train.write_page(page, [Row("speed", "steps/s", 2.0, 1.0, "higher", "peer: other")])
    text = page.read_text()
    assert text.startswith(f"before\n{train.BEGIN}\n")
    assert text.endswith(f"{train.END}\nafter\n")
    assert "| speed | 2 steps/s | 1 | 2 | peer: other |" in text
    assert "old" not in text
    page.write_text("no block")
    with pytest.raises(BenchError, match="has no block"):
        train.write_page(page, [])
