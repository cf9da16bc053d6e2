"""What a checkpoint costs at three model sizes, beside plain `torch.save` of the same state.

    .venv/bin/python -m benchmarks.checkpoint [--sizes 0.1M 10M 135M] [--repeats N] [--out build/bench/checkpoint.json]

Each size runs in a process of its own, one rank, one torch thread. Ours is what the trainer does: the engine stands still while
the copies are taken and compared (`stage`); files, digests, manifest and rename follow in the background. The peer is
`torch.save` of the same model and optimizer tensors with an fsync, during which training stands still, and `torch.load`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: layers, hidden, heads, query groups, ffn, vocabulary. The last is SmolLM-135M's shape.
SIZES = {
    "0.1M": (2, 64, 4, 4, 128, 64),
    "10M": (10, 256, 8, 4, 768, 8192),
    "135M": (30, 576, 9, 3, 1536, 49152),
}


def main() -> int:
    """Measure all sizes, print a table, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "checkpoint.json")
    parser.add_argument("--one", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.repeats)))
        return 0
    rows = []
    for size in options.sizes:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.checkpoint",
            "--one",
            size,
            "--repeats",
            str(options.repeats),
        ]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows += rows_of(size, found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=2) + "\n")
    for row in rows:
        peer = "" if row["peer"] is None else f"{row['peer']:>10} x{row['ratio']}"
        print(f"{row['measure']:42} {row['ours']:>10} {row['unit']:3} {peer:18} {row['note']}")
    print(f"written to {options.out}")
    return 0


def rows_of(size: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The common form of all benchmarks; `ratio` is ours over the peer's."""
    count = f"{found['parameters']:,} parameters"

    def row(measure: str, unit: str, ours: float, peer: float | None, note: str) -> dict[str, Any]:
        digits = 4 if unit == "s" else 2
        ratio = round(ours / peer, 3) if peer else None
        value = None if peer is None else round(peer, digits)
        return {
            "measure": f"{measure}, {size}", "unit": unit, "ours": round(ours, digits), "peer": value, "ratio": ratio,
            "better": "lower", "note": note,
        }  # fmt: skip

    return [
        row("engine stands still, p50", "s", found["stage"], found["torch_save"], f"{count}; peer: torch.save and fsync"),
        row("engine stands still, first save", "s", found["first_stage"], None, "first use of every code path"),
        row("published after, p50", "s", found["publish"], None, "in the background: write, fsync, SHA-256, manifest, rename"),
        row("load and compare, p50", "s", found["load"], found["torch_load"], "peer: torch.load(weights_only=True)"),
        row("size", "MB", found["bytes"] / 1e6, found["torch_bytes"] / 1e6, "model, Adam's moments, float32 main weights"),
    ]


def measure(size: str, repeats: int) -> dict[str, Any]:
    """One size, in this process."""
    import torch

    from rljob_api.layout import Layout
    from rljob_api.spec import Shape
    from rljob_workload.algorithm.grpo import LossSettings
    from rljob_workload.megatron import meeting
    from rljob_workload.megatron.policy import Policy, init_process_groups, quiet_megatron
    from rljob_workload.megatron.settings import ModelSettings
    from rljob_workload.megatron.shim import optimizer as fixes

    quiet_megatron()
    torch.set_num_threads(1)
    layers, hidden, heads, groups, ffn, vocabulary = SIZES[size]
    shape = Shape(
        layers=layers, hidden_size=hidden, attention_heads=heads, query_groups=groups, ffn_hidden_size=ffn,
        vocab_size=vocabulary,
    )  # fmt: skip
    settings = ModelSettings(
        shape,
        Layout(nodes=1, ranks_per_node=1, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1),
        sequence=False,
        seed=0,
        learning_rate=1e-3,
        max_sequence_length=64,
        micro_batch_size=1,
        loss=LossSettings(0.2, 0.28, 0.0, 1.0),
    )
    init_process_groups(settings, rank=0, world=1, store=meeting.alone(), timeout=60)
    policy = Policy(settings)
    fixes.prepare_for_load(policy.optimizer)  # Adam's moments, which come into being at the first step
    directory = Path(tempfile.mkdtemp(prefix="rljob-bench-checkpoint-", dir=os.environ.get("TMPDIR")))
    try:
        return {
            "parameters": sum(parameter.numel() for parameter in policy.parameters().values()),
            **ours(policy, directory, repeats),
            **peer(policy, directory / "plain.pt", repeats),
        }
    finally:
        shutil.rmtree(directory)


def ours(policy: Any, root: Path, repeats: int) -> dict[str, Any]:
    """Saves and loads as the trainer makes them."""
    from rljob_workload.core.checkpoint import RunDirectory
    from rljob_workload.megatron import weights

    run = RunDirectory(root / "run")
    run.create()
    saver = weights.Saver(policy, None)
    stages, publishes, loads = [], [], []
    path = root
    for step in range(1, repeats + 2):
        path = run.begin(step, 1)
        stages.append(timed(lambda path=path: saver.stage(path)))  # type: ignore[misc]

        def publish(path: Path = path, step: int = step) -> None:
            saver.finish([saver.written()])
            run.publish(path, step, 1, {})

        publishes.append(timed(publish))
        run.prune(1)
    last = run.root / f"step-{repeats + 1:06d}-t000001"
    for _ in range(repeats):
        loads.append(timed(lambda: weights.load(policy, None, last)))
    return {
        "first_stage": stages[0],
        "stage": statistics.median(stages[1:]),
        "publish": statistics.median(publishes[1:]),
        "load": statistics.median(loads),
        "bytes": sum(file.stat().st_size for file in last.rglob("*") if file.is_file()),
    }


def peer(policy: Any, path: Path, repeats: int) -> dict[str, Any]:
    """The same tensors by torch alone."""
    import torch

    state = {
        "model": policy.model.state_dict(),
        "optimizer": [
            {name: value for name, value in moments.items() if torch.is_tensor(value)} | {"weights": weight}
            for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
            for weight, moments in part.optimizer.state.items()
        ],
    }

    def save() -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    saves = [timed(save) for _ in range(repeats)]
    loads = [timed(lambda: torch.load(path, weights_only=True)) for _ in range(repeats)]
    return {
        "torch_save": statistics.median(saves),
        "torch_load": statistics.median(loads),
        "torch_bytes": path.stat().st_size,
    }


def timed(work: Callable[[], object]) -> float:
    """Wall-clock seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
