"""A process of its own for dual mode: the stand-in for Transformer Engine must be there before Megatron is imported.

    python -m tests.workload.dual_mode DIRECTORY RANK WORLD LISTENER [experts]

LISTENER: the file descriptor of the listener at which the ranks meet.
With `experts` it is a mixture of experts on Transformer Engine's layers; Megatron has dual mode for other experts only.

Trains, hands over with answers in flight, saves, resumes, exports, and begins from the export. Prints what it found as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from pathlib import Path
from typing import Any

from tests.workload import fake_transformer_engine

fake_transformer_engine.install()

import torch  # noqa: E402
import yaml  # noqa: E402
from benchmarks.loop import Loop  # noqa: E402

from rljob_api.findings import errors  # noqa: E402
from rljob_api.manifest import judge  # noqa: E402
from rljob_api.spec import RLJobSpec  # noqa: E402
from rljob_workload.core.handover import Handover  # noqa: E402
from rljob_workload.core.store.facts import facts_of  # noqa: E402
from rljob_workload.huggingface.export import export  # noqa: E402
from rljob_workload.megatron import device, meeting, weights  # noqa: E402
from rljob_workload.megatron.colocated import Colocated  # noqa: E402
from rljob_workload.megatron.policy import Policy, init_process_groups, quiet_megatron  # noqa: E402
from rljob_workload.megatron.settings import model_settings  # noqa: E402
from tests.unit.workload.published import copies_of, published  # noqa: E402

ROOT = Path(__file__).parents[2]
CALLS = fake_transformer_engine.CALLS


EXPERTS = sys.argv[-1] == "experts"


def spec_of(world: int, model: dict[str, Any] | None = None) -> RLJobSpec:
    """The example in dual mode, one GPU for each tensor rank, which every rule has to accept."""
    raw = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
    raw["trainer"]["gpusPerNode"] = world
    raw["parallelism"] = {"tensor": world, "sequence": world > 1}
    if EXPERTS:
        raw["model"]["shape"] |= {"experts": 4, "topK": 2}
    if model:
        raw["model"] = model
    raw["model"] |= {"transformer": "TransformerEngine", "dtype": "bfloat16", "allowInferenceOptimizedTraining": True}
    raw["generation"]["inferenceOptimized"] = not EXPERTS
    verdict = judge("dual", raw)
    assert verdict.spec is not None, verdict.findings
    assert not errors(verdict.findings), verdict.findings
    return verdict.spec


def main(directory: Path, rank: int, world: int, listener: socket.socket) -> dict[str, Any]:
    """All of it; what is compared is left to the test. Tensor ranks get the same prompts and find the same answers."""
    spec = spec_of(world)
    # What is not as on a GPU machine, beside the kernels.
    device.require = lambda *_, **__: None
    quiet_megatron()
    mine = listener if rank == 0 else None
    store = meeting.meet(meeting.address_of(listener), rank=rank, world=world, timeout=60, listener=mine)
    init_process_groups(model_settings(spec), rank=rank, world=world, store=store, timeout=60)
    from megatron.core.inference import symmetric_memory

    symmetric_memory.HAVE_TORCH_SYMM_MEM = False  # memory that GPUs share; its absence is Megatron's own fallback
    loop = Loop(spec)
    layers = sorted({type(one).__name__ for one in loop.policy.model.modules()})
    found: dict[str, Any] = {"layers": layers, "generating": [], "training": [], "errors": []}
    handover = Handover(0, Colocated(loop.policy, loop.engine, device.RankBarrier(10), offload=True))
    for _ in range(3):
        CALLS.clear()
        loop.engine.submit(loop.rollouts.dispatch(loop.policy.version, 0.0))
        while (taken := loop.rollouts.take(loop.policy.version + 1, loop.policy.version)) is None:
            loop._accept(loop.engine.step())
            loop._submit(loop.policy.version, None)
        found["generating"].append(dict(CALLS))
        batch = taken[0]
        CALLS.clear()
        handover.to_train()
        stats = loop.policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
        found["training"].append(dict(CALLS))
        handover.to_decode()
        loop.rollouts.commit(batch.step, batch.ordinals)
        found["errors"].append(stats.gen_logprob_error)
    handover.to_train()

    saved = directory / "saved"
    saver = weights.Saver(loop.policy, None)
    saver.stage(saved)
    reports: list[Any] = [None] * world
    torch.distributed.all_gather_object(reports, saver.written())
    saver.finish(reports)
    torch.distributed.barrier()
    if rank == 0:
        export(published(directory / "run", facts_of(spec), copies_of(saved)), directory / "hf", dtype="bfloat16")
    torch.distributed.barrier()
    resumed = Policy(dataclasses.replace(loop.policy.settings, seed=99))
    weights.load(resumed, None, saved)
    begun = Policy(model_settings(spec_of(world, {"huggingFace": {"path": str(directory / "hf")}})))
    found["begun"] = [name for name, one in begun.parameters().items() if not torch.equal(one, loop.policy.parameters()[name])]
    for policy in (loop.policy, resumed):
        policy.enter_train()
        policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
    ours = loop.policy.parameters()
    found["resumed"] = [name for name, one in resumed.parameters().items() if not torch.equal(one, ours[name])]
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), socket.socket(fileno=int(sys.argv[4])))))
