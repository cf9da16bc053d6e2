"""A layout under `rljob local`, resumed in another: the driver, Ray's actors, checkpoints and the ledger over several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_workload.runtime.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS = 4, 4


@pytest.mark.timeout(600)
def test_layouts_resume_in_another_layout_through_ray(tmp_path: Path) -> None:
    """Experts over two nodes first, then attention and experts cut over two ranks of one node."""
    manifest = yaml.safe_load((ROOT / "examples" / "moe.yaml").read_text())
    spec = manifest["spec"]
    spec["algorithm"]["grpo"] |= {"promptsPerStep": PROMPTS, "microBatchSize": 4}
    spec["generation"]["maxInFlightPrompts"] = PROMPTS
    spec["validation"] = {"everySteps": STEPS, "prompts": 30}
    spec["checkpoint"]["everySteps"] = STEPS
    layouts: list[dict[str, Any]] = [
        {"trainer": {"nodes": 2, "ranksPerNode": 1}, "parallelism": {"expert": 2}},
        {"trainer": {"nodes": 1, "ranksPerNode": 2}, "parallelism": {"tensor": 2, "sequence": True}},
    ]
    for number, layout in enumerate(layouts, 1):
        spec["trainer"] |= layout["trainer"]
        spec["parallelism"] = layout["parallelism"]
        spec["algorithm"]["grpo"]["steps"] = number * STEPS
        report = run(manifest, tmp_path)
        assert report["resume"]["fromStep"] == (number - 1) * STEPS
        assert report["checkpoint"]["step"] == number * STEPS
        assert report["prompts"]["trained"] == number * STEPS * PROMPTS
        assert report["prompts"]["skipped"] == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 2 * STEPS + 1))
    assert [line["oldest_age"] for line in lines] == [0] * len(lines)
    # All answers are of the weights that they are trained on, so this compares the engine's log-probs with training's.
    assert max(line["largest_logprob_change"] for line in lines) < 1e-5


def run(manifest: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One attempt to its end; its last report."""
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "rljob_cli.main", "local", str(path), "--dir", str(directory / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads((directory / "run" / "progress.json").read_text())
    return report
