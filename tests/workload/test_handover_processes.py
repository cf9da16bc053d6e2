"""The hand-over between real processes on gloo: a hundred cycles with random delays, and the wrong orders that must fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CYCLES = 100


def test_a_hundred_cycles_on_two_gloo_ranks_and_every_wrong_order_fails() -> None:
    """One process imports torch once and forks the ranks of all variants."""
    variants = ["right", "barrier-before-drain", "signal-before-barrier", "wrong-device"]
    run = subprocess.run(
        [sys.executable, "-m", "tests.workload.gloo_cycles", str(CYCLES), *variants],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    verdicts = dict(line.split(": ", 1) for line in run.stdout.splitlines() if line.split(": ")[0] in variants)
    assert verdicts == {
        "right": "ok",
        "barrier-before-drain": "mixed",
        "signal-before-barrier": "mixed",
        "wrong-device": "mixed",
    }, run.stdout + run.stderr[-2000:]
