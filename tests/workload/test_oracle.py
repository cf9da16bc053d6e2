"""The rule table against the real Megatron, in short; `make oracle SEED= N=` is the long form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_megatron_and_the_rules_agree_on_random_layouts(tmp_path: Path) -> None:
    out = tmp_path / "oracle.json"
    command = (sys.executable, "-W", "ignore", "-m", "dev.oracle", "--seed", "20", "-n", "250", "--out", str(out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["checked"] == 250
    assert result["unexplained"] == 0
    assert all(row["reason"] and row["ours"] and row["megatron"] for row in result["disagreements"])
    assert 60 < result["accepted"] < 220
