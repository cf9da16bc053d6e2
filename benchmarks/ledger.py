"""Cost of the ledger over a prompt's whole life, with every check on, and its memory and saved size.

python -m benchmarks.ledger [--prompts N]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

from rljob_workload.core.ledger import Ledger
from rljob_workload.core.ledger_file import ledger_from_json, ledger_to_json

P, WINDOW = 32, 96
LIMIT_MICROSECONDS, LIMIT_BYTES, LIMIT_CONSTANT = 20.0, 16, 4096


def resident_kilobytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def run(prompts: int) -> dict[str, Any]:
    """Hand prompts through in free order: 2 % fail once, some are evicted or filtered; check the sums after every step."""
    rng = random.Random(0)  # noqa: S311 - a benchmark
    ledger = Ledger()
    waiting: list[int] = []
    buffered: list[int] = []
    step, began, after_warm_up, widest = 0, time.perf_counter(), 0, 0.0
    while ledger.trained < prompts:
        while len(waiting) + len(buffered) < WINDOW:
            waiting.append(ledger.hand_out())
        rng.shuffle(waiting)
        asked, waiting = waiting[: P + 8], waiting[P + 8 :]
        for ordinal in asked:
            ledger.dispatch(ordinal)
            chance = rng.random()
            if chance < 0.02:
                ledger.fail(ordinal)
                waiting.append(ordinal)
                continue
            ledger.finish(ordinal)
            if chance < 0.03:
                ledger.evict(ordinal)
                waiting.append(ordinal)
            elif chance < 0.05:
                ledger.filter(ordinal)
            else:
                buffered.append(ordinal)
        if len(buffered) < P:
            continue
        batch, buffered = buffered[:P], buffered[P:]
        step += 1
        ledger.take(batch)
        ledger.commit(step, batch)
        ledger.check()
        if step % 200 == 0:
            live = ledger.counts().live
            size = len(json.dumps(ledger_to_json(ledger), separators=(",", ":")))
            widest = max(widest, (size - LIMIT_CONSTANT) / live, size / (LIMIT_BYTES * live + LIMIT_CONSTANT))
        if not after_warm_up and ledger.trained >= prompts // 10:
            after_warm_up = resident_kilobytes()
    seconds = time.perf_counter() - began
    counts = ledger.counts()
    assert ledger_from_json(ledger_to_json(ledger)).counts() == counts
    return {
        "prompts": counts.handed_out,
        "microseconds": seconds / counts.handed_out * 1e6,
        "growth": resident_kilobytes() - after_warm_up,
        "size": len(json.dumps(ledger_to_json(ledger), separators=(",", ":"))),
        "live": counts.live,
        "above_limit": widest > 1,
    }


def main() -> int:
    """Print, write build/bench/ledger.json; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000_000)
    found = run(parser.parse_args().prompts)
    note = f"{found['prompts']:,} prompts, window {WINDOW}, every check on"
    rows = [
        ("ledger cost per prompt, whole life", "us", round(found["microseconds"], 2), f"{note}; limit {LIMIT_MICROSECONDS:g}"),
        ("memory growth after the first tenth", "kB", found["growth"], note),
        ("saved ledger", "bytes", found["size"], f"{found['live']} live prompts; limit 16 bytes each plus 4 kB"),
    ]
    lines = [
        {"measure": name, "unit": unit, "ours": ours, "peer": None, "ratio": None, "better": "lower", "note": text}
        for name, unit, ours, text in rows
    ]
    path = Path("build/bench/ledger.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(lines, indent=2) + "\n")
    for name, unit, ours, text in rows:
        print(f"{name}: {ours} {unit} ({text})")
    missed = found["microseconds"] > LIMIT_MICROSECONDS or found["above_limit"] or found["growth"] > 4096
    if missed:
        print("a limit is missed", file=sys.stderr)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
