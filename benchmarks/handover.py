"""What a hand-over between generation and training costs, in each mode of the key/value cache.

    .venv/bin/python -m benchmarks.handover [--cycles 1000] [--json]

One real rank in this process: every cycle takes in prompts, generates a little, hands over, takes an optimizer step and
hands back, always with answers in flight. Reports the processor time of both directions, whether every answer came, and how
much the process grew after the first tenth of the cycles; writes build/bench/handover.json, or prints the rows (`--json`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import psutil
import yaml
from benchmarks.results import ROOT, Row, table, write

from rljob_api.manifest import judge
from rljob_workload.algorithm.batch import Request, TrainBatch, TrainRow
from rljob_workload.core.slices import SliceGoal
from rljob_workload.runtime.rank import Rank, RankPlace

MODES = ("Persist", "Offload", "Recompute")
#: Prompts of a cycle, answers to each, engine steps of a cycle.
PROMPTS, ANSWERS, STEPS = 2, 4, 2
#: Answers in flight at most: what one cycle adds and the cycles before have left.
ROOM = 48
ROWS = 8
#: Milliseconds of processor time that a direction may take, at the median.
AIM = 10


@dataclass
class Measured:
    """One mode's cycles."""

    suspend: list[float] = field(default_factory=list)
    wake: list[float] = field(default_factory=list)
    wanted: int = 0
    done: int = 0
    in_flight: int = 0
    early_bytes: int = 0
    late_bytes: int = 0
    engines: int = 0


def main() -> int:
    """Measure all modes and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--mode", choices=MODES, action="append", help="only this mode (may be repeated)")
    parser.add_argument("--json", action="store_true", help="print the rows instead of writing them")
    options = parser.parse_args()
    logging.getLogger("rljob").propagate = False  # two lines for each cycle; they are in the rank's own file
    rows: list[Row] = []
    for mode in options.mode or MODES:
        measured = measure(mode, options.cycles)
        rows += rows_of(mode, options.cycles, measured)
        if measured.done != measured.wanted or measured.engines != 1:
            print(f"{mode}: {measured.done} of {measured.wanted} answers, {measured.engines} engines", file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(table(rows))
        print(f"written to {write('handover', rows).relative_to(ROOT)}")
    return 0


def measure(mode: str, cycles: int) -> Measured:
    """Run the cycles on a fresh rank."""
    from rljob_workload.megatron.engine import engines_built

    before = engines_built()
    with started(mode) as rank:
        measured = run(rank, cycles)
    measured.engines -= before
    return measured


class started:  # noqa: N801 - reads as what it does in a with statement
    """A rank of one mode, alone in its world; its process groups are gone afterwards."""

    def __init__(self, mode: str) -> None:
        raw = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
        raw["data"]["builtin"] = "copyv"
        raw["model"]["shape"]["vocabSize"] = 18
        raw["generation"] |= {"maxNewTokens": 7, "maxSequenceLength": 16, "offloadTrainingBuffers": True}
        raw["generation"]["kvCache"] |= {"mode": mode}
        raw["algorithm"]["grpo"] |= {"microBatchSize": ROWS, "learningRate": "0"}
        verdict = judge("copy", raw)
        assert verdict.spec is not None, verdict.findings
        self._spec = verdict.spec
        self._directory = tempfile.TemporaryDirectory(prefix="rljob-bench-")

    def __enter__(self) -> Rank:
        rank = Rank(RankPlace(0, 1, 0, 1, self._directory.name), self._spec.to_wire())
        rank.setup("127.0.0.1:0")
        return rank

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.inference.utils import InferenceMode

        from rljob_workload.runtime.logs import close_files

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        InferenceMode.unset_active()
        close_files()
        self._directory.cleanup()


def run(rank: Rank, cycles: int) -> Measured:
    """The cycles, and then the rest of the answers."""
    measured, process = Measured(), psutil.Process()
    ordinals = iter(range(10**9))
    for cycle in range(cycles):
        room = measured.in_flight + PROMPTS * ANSWERS <= ROOM
        requests = list(prompts(ordinals)) if room else []
        measured.wanted += ANSWERS * len(requests)
        took = rank.decode(requests, SliceGoal(10**6, iterations=STEPS))
        measured.done, measured.in_flight = measured.done + len(took.answers), took.left
        assert took.left, "nothing in flight at the hand-over"
        step = rank.train(batch(cycle + 1), True)
        assert step.wake is not None
        measured.suspend.append(step.suspend.cpu_seconds)
        measured.wake.append(step.wake.cpu_seconds)
        measured.engines = step.engines
        if cycle == cycles // 10:
            measured.early_bytes = process.memory_info().rss
    measured.late_bytes = process.memory_info().rss
    measured.done += len(rank.decode([], SliceGoal(10**6, iterations=10**6)).answers)
    return measured


def prompts(ordinals: Iterator[int]) -> Iterator[Request]:
    """The next prompts; tokens of the task's digits."""
    for _ in range(PROMPTS):
        number = next(ordinals)
        yield Request((number, 0), (3, 4, 5 + number % 5), ANSWERS)


def batch(step: int) -> TrainBatch:
    """Rows to train on; what they teach does not matter, the learning rate is 0."""
    row = TrainRow((3, 4, 5, 6, 7, 8), 3, (-2.0, -2.0, -2.0), advantage=0.5)
    return TrainBatch(step, (step,), (row,) * ROWS)


def rows_of(mode: str, cycles: int, measured: Measured) -> list[Row]:
    """The report's rows of one mode."""
    growth = 100 * (measured.late_bytes / measured.early_bytes - 1)
    note = f"{cycles} cycles, answers always in flight; gradients freed in decode"
    rows = []
    for name, seconds in (("decode to train", measured.suspend), ("train to decode", measured.wake)):
        for share, aim in ((50, AIM), (99, None)):
            value = 1000 * percentile(seconds, share)
            rows.append(Row(f"{mode}: {name}, p{share}", "CPU ms", value, None, "lower", note, aim))
    came = 100 * measured.done / measured.wanted
    rows.append(Row(f"{mode}: answers that came", "%", came, None, "higher", f"of {measured.wanted}", 100))
    between = f"from cycle {cycles // 10} to {cycles}, of {measured.early_bytes / 2**20:.0f} MiB"
    rows.append(Row(f"{mode}: memory growth", "%", growth, None, "lower", between))
    return rows


def percentile(values: Sequence[float], share: int) -> float:
    """The value that `share` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


if __name__ == "__main__":
    sys.exit(main())
