"""Weights, optimizer and random state to disk and back, through Megatron's distributed checkpoints.

Sharded by Megatron, so that a checkpoint can be read in another layout. Random states travel beside it in our own file,
as hexadecimal JSON: nothing of ours is pickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rljob_workload.megatron.errors import WeightsError
from rljob_workload.megatron.policy import Policy

WEIGHTS = "weights"
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def save(policy: Policy, sampler: torch.Generator | None, directory: Path) -> None:
    """Write this rank's part. Collective: every rank calls it, and it returns when all have written."""
    from megatron.core import dist_checkpointing

    target = directory / WEIGHTS
    _use_thread_queue()
    try:
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        dist_checkpointing.save(_state(policy, loading=False), str(target))
        _save_random_state(policy, sampler, directory)
        dist.barrier()
    except Exception as err:
        raise WeightsError(f"cannot write the weights to {directory}: {type(err).__name__}: {err}") from err


def load(policy: Policy, sampler: torch.Generator | None, directory: Path) -> None:
    """Read this rank's part. Collective."""
    from megatron.core import dist_checkpointing

    from rljob_workload.megatron.shim import optimizer as fixes

    fixes.prepare_for_load(policy.optimizer)
    try:
        state = dist_checkpointing.load(_state(policy, loading=True), str(directory / WEIGHTS))
        policy.model.load_state_dict(state["model"])
        policy.optimizer.load_state_dict(state["optimizer"])
    except Exception as err:
        raise WeightsError(f"cannot load the weights in {directory}: {type(err).__name__}: {err}") from err
    fixes.unshare_steps(policy.optimizer)
    _load_random_state(policy, sampler, directory)


def _state(policy: Policy, *, loading: bool) -> dict[str, Any]:
    model = policy.model.sharded_state_dict(metadata=_METADATA)
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_METADATA),
    }


def _use_thread_queue() -> None:
    """Saves are synchronous here: a queue inside the process is enough.

    Megatron would start a multiprocessing manager for it at the first save: 3 seconds, and a process that outlives a
    killed rank.
    """
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _random_file(policy: Policy, directory: Path) -> Path:
    return directory / f"random-{dist.get_rank():05d}.json"


def _save_random_state(policy: Policy, sampler: torch.Generator | None, directory: Path) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {name: _to_hex(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    data = {
        "world": dist.get_world_size(),
        "torch": _to_hex(torch.get_rng_state()),
        "tracker": states,
        "sampler": _to_hex(sampler.get_state()) if sampler is not None else None,
    }
    _random_file(policy, directory).write_text(json.dumps(data))


def _load_random_state(policy: Policy, sampler: torch.Generator | None, directory: Path) -> None:
    """Random states belong to a rank of a layout: with another number of ranks the fresh seeds stay."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    path = _random_file(policy, directory)
    if not path.exists():
        return
    data = json.loads(path.read_text())
    if data["world"] != dist.get_world_size():
        return
    torch.set_rng_state(_from_hex(data["torch"]))
    get_cuda_rng_tracker().set_states({name: _from_hex(text) for name, text in data["tracker"].items()})
    if sampler is not None and data["sampler"] is not None:
        sampler.set_state(_from_hex(data["sampler"]))


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy().tobytes()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
