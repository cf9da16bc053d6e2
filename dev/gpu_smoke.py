"""One look at the whole stack on a machine with NVIDIA GPUs: `make gpu-smoke`.

    .venv/bin/python -m dev.gpu_smoke [--out build/gpu-smoke.json]

Each part runs in a process of its own (`--part NAME`), so that one that crashes takes no other with it. Prints a table and
writes it as JSON: `[{part, state, seconds, note}]`, state `passed`, `failed` or `skipped`, the note saying why or what was
measured. Exit status 1 when a part failed. Without a GPU every part is skipped, and the status is 0.

It needs the extra `gpu` or a container that brings torch for CUDA. The same parts also run on a CPU when asked for by name,
which is how they are tried where there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from benchmarks.results import BenchError, child, python

from rljob_api.manifest import judge

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "gpu-smoke.json"
#: For one part, its imports and compilations included.
PART_SECONDS = 300.0
HANDOVERS = 100
#: Mean reward of ten steps in a row; an untrained policy has 0.02.
GOAL = 0.5
#: Largest difference between the engine's log-probs and the trainer's: kernels differ, weights do not.
LOGPROB_TOLERANCE = 1e-3
BFLOAT16_TOLERANCE = 0.1

State = Literal["passed", "failed", "skipped"]


class SkippedError(Exception):
    """This part cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Result:
    """One part."""

    part: str
    state: State
    seconds: float
    note: str


# ---- parts: each runs in its own process and returns a note --------------------------------------


def devices() -> str:
    """What there is: GPUs, communication, layers' libraries."""
    import torch

    from rljob_workload.megatron import device

    device.check_transformer_engine()
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{one.name} {one.total_memory / 2**30:.0f} GiB sm_{one.major}{one.minor}" for one in names) or "no GPU"
    libraries = ", ".join(
        f"{name} {'there' if _installed(name) else 'absent'}" for name in ("transformer_engine", "flash_attn")
    )
    return f"{gpus}; torch {torch.__version__}, {device.backend()}; {libraries}"


def train() -> str:
    """The copy task as in the example, asynchronously, on one rank: the reward has to rise within the example's steps."""
    loop = _loop()
    began = time.monotonic()
    rewards: list[float] = []
    while (last := sum(rewards[-10:]) / 10) < GOAL:
        if len(rewards) == loop.spec.algorithm.grpo.steps:
            raise RuntimeError(f"the reward is {last:.3f} after {len(rewards)} steps, not {GOAL}")
        loop.step()
        rewards.append(loop.infos[-1].reward)
    where = next(iter(loop.policy.parameters().values())).device
    each = 1000 * (time.monotonic() - began) / len(rewards)
    return f"reward {rewards[0]:.3f} to {last:.3f} in {len(rewards)} steps of {each:.0f} ms on {where}"


def handovers() -> str:
    """Many hand-overs with answers in flight and a train step in each, in every cache mode."""
    from benchmarks.handover import MODES, measure

    for mode in MODES:
        measured = measure(mode, HANDOVERS)
        if measured.done != measured.wanted or measured.engines != 1:
            raise RuntimeError(f"{mode}: {measured.done} of {measured.wanted} answers came, {measured.engines} engines")
    return f"{HANDOVERS} in each of {', '.join(MODES)}; every answer came, one engine"


def captured_decode() -> str:
    """The same with decode steps captured as CUDA graphs, which have to stay valid while the weights change in place."""
    import torch

    if not torch.cuda.is_available():
        raise SkippedError("CUDA graphs need a GPU")
    from benchmarks.loop import one_rank, spec_of

    from rljob_workload.algorithm.batch import Answer, Request, TrainRow
    from rljob_workload.core.handover import Handover
    from rljob_workload.data.builtin import load_builtin
    from rljob_workload.megatron import device
    from rljob_workload.megatron.colocated import Colocated
    from rljob_workload.megatron.engine import ResidentEngine
    from rljob_workload.megatron.policy import Policy
    from rljob_workload.megatron.settings import engine_settings, model_settings

    spec = spec_of({"algorithm.grpo": {"microBatchSize": 8}})
    one_rank(spec)
    task = load_builtin(str(spec.data.builtin))
    policy = Policy(dataclasses.replace(model_settings(spec), cuda_graphs=True))
    settings = dataclasses.replace(engine_settings(spec, task), cuda_graphs=4)
    engine = ResidentEngine(policy, settings, task.tokenizer)
    handover = Handover(0, Colocated(policy, engine, device.RankBarrier(30), offload=True))
    graphs = len(engine._engine.context.cuda_graph_batch_dimensions_list)
    if not graphs:
        raise RuntimeError("the engine captured no graph")
    done: list[Answer] = []
    for cycle in range(HANDOVERS):
        engine.submit([Request((cycle, 0), (3, 4, 5 + cycle % 5), 8)])
        done += engine.step()
        handover.to_train()
        with torch.no_grad():
            for parameter in policy.parameters().values():
                parameter.mul_(0.999)
        policy.version += 1
        handover.to_decode()
    while engine.in_flight:
        done += engine.step()
    if len(done) != 8 * HANDOVERS:
        raise RuntimeError(f"{len(done)} of {8 * HANDOVERS} answers came")
    engine.submit([Request((HANDOVERS, 0), (3, 4, 5), 8)])
    fresh: list[Answer] = []
    while engine.in_flight:
        fresh += engine.step()
    handover.to_train()
    rows = [TrainRow((3, 4, 5, *a.tokens), 3, a.logprobs, advantage=0.5, current=True) for a in fresh]
    error = policy.train_step(rows, longest=len(rows[0].tokens), answer_tokens=3 * len(rows)).gen_logprob_error
    if error is None or not error < LOGPROB_TOLERANCE:
        raise RuntimeError(f"log-probs of captured decode and of training differ by {error}")
    return f"{HANDOVERS} hand-overs over {graphs} graphs; log-probs agree to {error:.1e} after them"


def save_and_resume() -> str:
    """A save, and another policy that takes it over: the same weights, and the same weights after one more step."""
    import torch

    from rljob_workload.megatron import weights
    from rljob_workload.megatron.policy import Policy

    loop = _loop()
    for _ in range(3):
        loop.step()
    with tempfile.TemporaryDirectory(prefix="rljob-smoke-") as directory:
        saved = weights.save(loop.policy, None, Path(directory))
        other = Policy(dataclasses.replace(loop.policy.settings, seed=99))
        if weights.load(other, None, Path(directory)) != saved.digest:
            raise RuntimeError("the digest of the loaded weights is not that of the saved ones")
    batch, ends = loop.batches[-1], []
    for policy in (loop.policy, other):
        policy.enter_train()
        policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
        ends.append(policy.parameters())
    largest = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])
    if not largest < 1e-6 or not all(bool(torch.isfinite(one).all()) for one in ends[1].values()):
        raise RuntimeError(f"one step after the resume the weights differ by {largest}")
    return f"digest {saved.digest}; weights one step later differ by {largest:g}"


def transformer_engine() -> str:
    """The copy task on Transformer Engine's layers."""
    if not _installed("transformer_engine"):
        raise SkippedError("Transformer Engine is absent (extra `gpu`); the parts above used Megatron's local layers")
    return _train_variant({"trainer": {"gpusPerNode": 1}, "model": {"transformer": "TransformerEngine"}})


def dual_mode() -> str:
    """The copy task on the inference-optimized layers, trained through Transformer Engine."""
    import torch

    if not _installed("transformer_engine") or not _installed("flash_attn"):
        raise SkippedError("inference-optimized layers need Transformer Engine and flash-attn (extra `gpu`)")
    if torch.cuda.get_device_capability() < (8, 0):
        raise SkippedError("bfloat16 needs a GPU of compute capability 8.0 or newer")
    return _train_variant(
        {
            "trainer": {"gpusPerNode": 1},
            "model": {"transformer": "TransformerEngine", "dtype": "bfloat16", "allowInferenceOptimizedTraining": True},
            "generation": {"inferenceOptimized": True},
        }
    )


def two_ranks() -> str:
    """Two ranks that share every tensor, over NCCL, one GPU each."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        raise SkippedError("this machine has one GPU")
    from benchmarks.loop import spec_of
    from tests.workload.many_ranks import ManyRanks, Trainer

    spec = spec_of({"trainer": {"ranksPerNode": 2}, "parallelism": {"tensor": 2}})
    ranks = ManyRanks(2)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rljob-smoke-") as directory,
            Trainer.of(spec, ranks, Path(directory)) as trainer,
        ):
            losses = [trainer.step().loss for _ in range(3)]
    finally:
        ranks.close()
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"losses {losses}")
    return f"tensor 2, {len(losses)} steps, losses {', '.join(f'{loss:.4f}' for loss in losses)}"


PARTS: dict[str, Callable[[], str]] = {
    "devices": devices,
    "train": train,
    "hand-overs": handovers,
    "captured decode": captured_decode,
    "save and resume": save_and_resume,
    "two ranks": two_ranks,
    "transformer engine": transformer_engine,
    "dual mode": dual_mode,
}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _loop() -> Any:
    from benchmarks.loop import Loop, one_rank, spec_of

    spec = spec_of({})
    one_rank(spec)
    return Loop(spec)


def _train_variant(changes: Mapping[str, Mapping[str, Any]]) -> str:
    """Three steps of a spec that this release may refuse, in its own words; then the part is skipped with them."""
    raw = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
    for part, values in changes.items():
        raw[part] |= values
    verdict = judge("smoke", raw)
    refused = [f"{one.path}: {one.message}" for one in verdict.findings if one.severity == "error"]
    if refused or verdict.spec is None:
        raise SkippedError("this release refuses it: " + "; ".join(refused))
    from benchmarks.loop import Loop, one_rank

    one_rank(verdict.spec)
    loop = Loop(verdict.spec)
    for _ in range(3):
        loop.step()
    error, layers = loop.stats[-1].gen_logprob_error, {type(one).__name__ for one in loop.policy.model.modules()}
    tolerance = BFLOAT16_TOLERANCE if verdict.spec.model.dtype == "bfloat16" else LOGPROB_TOLERANCE
    if error is None or not error < tolerance:
        raise RuntimeError(f"log-probs of generation and of training differ by {error}")
    linear = ", ".join(sorted(name for name in layers if name.endswith("Linear")))
    return f"3 steps, reward {loop.infos[-1].reward:.3f}; log-probs agree to {error:.1e}; layers {linear}"


# ---- the whole -----------------------------------------------------------------------------------


def why_no_gpu() -> str | None:
    """Why nothing can run; None where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"no NVIDIA GPU that torch can use (torch {torch.__version__}, {built})"


def run_part(name: str) -> Result:
    """A part in its own process."""
    began = time.monotonic()
    try:
        told = child(name, python("dev.gpu_smoke", "--part", name), PART_SECONDS)
    except BenchError as err:
        return Result(name, "failed", time.monotonic() - began, " ".join(str(err).split())[-600:])
    return Result(name, told["state"], time.monotonic() - began, told["note"])


def here(name: str) -> dict[str, str]:
    """A part in this process; what goes wrong in it is raised."""
    try:
        return {"state": "passed", "note": PARTS[name]()}
    except SkippedError as why:
        return {"state": "skipped", "note": str(why)}


def report(results: Sequence[Result], out: Path) -> int:
    """Table, file, exit status."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n")
    for one in results:
        print(f"{one.part:20} {one.state:8} {one.seconds:6.1f} s  {one.note}")
    print(f"written to {out}")
    return int(any(one.state == "failed" for one in results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--part", choices=list(PARTS), help="only this one, in this process; prints JSON")
    options = parser.parse_args(arguments)
    if options.part:
        print(json.dumps(here(options.part)))
        return 0
    why = why_no_gpu()
    if why is not None:
        return report([Result(name, "skipped", 0.0, why) for name in PARTS], options.out)
    return report([run_part(name) for name in PARTS], options.out)


if __name__ == "__main__":
    sys.exit(main())
