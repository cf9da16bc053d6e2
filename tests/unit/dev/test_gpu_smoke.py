"""The GPU look without a GPU: it says so; and how it tells passed, failed and skipped parts apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dev import gpu_smoke

from rljob_workload.megatron.errors import DeviceError


def test_without_a_gpu_every_part_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_smoke.main(["--out", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["part"] for row in rows] == list(gpu_smoke.PARTS)
    assert all(row["state"] == "skipped" and "no NVIDIA GPU" in row["note"] for row in rows)
    assert capsys.readouterr().out.count("no NVIDIA GPU") == len(rows)


def test_a_failed_part_fails_the_whole_and_the_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of the second part has no such module: it ends with an error, as a crash would."""
    monkeypatch.setattr("dev.gpu_smoke.why_no_gpu", lambda: None)
    programs = {"one": 'print(\'{"state": "passed", "note": "x"}\')', "two": "raise SystemExit('boom')"}
    monkeypatch.setattr("dev.gpu_smoke.PARTS", dict.fromkeys([*programs, "three"]))
    programs["three"] = programs["one"].replace("passed", "skipped")
    monkeypatch.setattr("dev.gpu_smoke.python", lambda module, option, name: ["python3", "-c", programs[name]])
    assert gpu_smoke.main(["--out", str(tmp_path / "out.json")]) == 1
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["state"] for row in rows] == ["passed", "failed", "skipped"]
    assert "boom" in rows[1]["note"]


def test_what_this_release_refuses_is_skipped_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"data": {"builtin": None, "jsonl": {"path": "/prompts.jsonl"}}}
    monkeypatch.setattr("dev.gpu_smoke.PARTS", {"one": lambda: gpu_smoke._train_variant(changes)})
    told = gpu_smoke.here("one")
    assert told["state"] == "skipped"
    assert "spec.data.jsonl.path: /prompts.jsonl is not supported yet by this version" in told["note"]


@pytest.mark.parametrize("part", ["transformer engine", "dual mode"])
def test_parts_for_transformer_engine_are_skipped_where_it_is_absent(part: str) -> None:
    assert gpu_smoke.here(part)["state"] == "skipped"


@pytest.mark.parametrize("part", ["transformer engine", "dual mode"])
def test_parts_for_transformer_engine_are_accepted_by_every_rule(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the check of the device, which refuses a CPU."""
    monkeypatch.setattr("dev.gpu_smoke._installed", lambda package: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    with pytest.raises(DeviceError, match=r"spec.trainer.gpusPerNode is above 0, and this rank sees no GPU"):
        gpu_smoke.here(part)
