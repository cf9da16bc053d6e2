"""Mends for Megatron's DistributedOptimizer: how its states are gathered for a save, and loading over torch's AdamW.

Transformer Engine and Apex keep Adam's step count per group, torch keeps it per parameter, and Megatron's load path knows
only the first: a fresh optimizer cannot be loaded into, `step` is missing on the way, and afterwards all parameters share
*one* step tensor, which then advances once per parameter and quietly changes the continued losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rljob_workload.megatron import device
from rljob_workload.megatron.buffers import Buffers

#: Where the states of the save under way go.
_buffers: Buffers | None = None


def install() -> None:
    """Save every parameter's own state, also where a buffer has several buckets. Call before the first save.

    A tied embedding of a pipeline stage has a bucket to itself. Megatron gathers the buckets without the padding between
    them, then cuts out each parameter at its place *with* padding: without this, a checkpoint of a pipeline holds the states
    of other elements, and resuming in another layout replaces the weights by them.

    On CPU ranks Megatron's gathering is replaced altogether (`_gathered`). It goes through fresh memory six times: seconds of
    the kernel's time for a model of 135 M parameters, with the engine down.
    """
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    if getattr(cls, "_rljob_padding_fix", False):
        return
    original = cls.get_parameter_state_dp_zero

    def get_state(
        self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[int, Any] | None:
        if _buffers is not None and not empty_data and device.kind() == "cpu":
            return _gathered(self, _buffers)
        state: dict[int, Any] | None = original(self, use_gloo_comm, empty_data, return_on_all_ranks)
        for index, buffer in enumerate(self.buffers):
            for tensors in state[index].values() if state is not None else ():
                tensors.update({name: _with_padding(t, buffer) for name, t in tensors.items() if torch.is_tensor(t)})
        return state

    cls.get_parameter_state_dp_zero = get_state
    cls._rljob_padding_fix = True


@contextmanager
def gathering_into(buffers: Buffers) -> Iterator[None]:
    """Optimizer states that are gathered for a save in here lie in this memory."""
    global _buffers
    _buffers = buffers
    try:
        yield
    finally:
        _buffers = None


def _gathered(optimizer: Any, buffers: Buffers) -> dict[int, Any]:
    """What `get_parameter_state_dp_zero` returns, each state copied once, to its place. Collective over data-parallel ranks.

    By gradient buffer and type: `param` and Adam's moments, flat, with the padding. Only the first data-parallel rank writes
    (the others are no main replicas), so the others send their part, and get tensors without data.
    """
    group = optimizer.data_parallel_group
    size, rank = group.size(), group.rank()
    keys = ("param", *optimizer.optimizer_state_keys)
    state: dict[int, Any] = {}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[index]
        ((dtype, of_buckets),) = ranges.items()
        world = {
            key: buffers.take((id(optimizer), index, key), (buffer.numel,), torch.float32)
            if rank == 0
            else torch.empty(buffer.numel, device="meta")
            for key in keys
        }
        for number, (bucket, of_bucket) in enumerate(zip(buffer.buckets, of_buckets, strict=True)):
            share = bucket.grad_data.numel() // size
            shares = {key: world[key][bucket.offset :][: share * size].view(size, share) for key in keys}
            mine = {
                key: shares[key][0] if rank == 0 else buffers.take((id(optimizer), index, number, key), (share,), torch.float32)
                for key in keys
            }
            for parameter, places in of_bucket["param_map"].items():
                tensors, place = optimizer._get_main_param_and_optimizer_states(parameter), places["gbuf_local"]
                for key in keys:
                    mine[key][place.start : place.end].copy_(tensors[key].detach())
            for key in keys:
                if rank != 0:
                    dist.send(mine[key], group=group, group_dst=0)
                    continue
                for other in range(1, size):
                    dist.recv(shares[key][other], group=group, group_src=other)
        state[index] = {dtype: world}
    return state


def _with_padding(gathered: torch.Tensor, buffer: Any) -> torch.Tensor:
    """Elements of all buckets, each bucket at its place in the buffer."""
    whole = gathered.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        size = bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + size] = gathered[start : start + size]
        start += size
    return whole


def prepare_for_load(optimizer: Any) -> None:
    """Make a fresh optimizer loadable. Call before its sharded state is described."""
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _tolerate_missing_step(distrib_optimizer.DistributedOptimizer)
    for part in _parts(optimizer):
        if hasattr(part, "_init_optimizer_states_with_dummy_values") and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()


def prepare_for_save(optimizer: Any) -> None:
    """Make an optimizer that has taken no step savable: Megatron asserts that there are states. Weights stay as they are."""
    for part in _parts(optimizer):
        if not hasattr(part, "_init_optimizer_states_with_dummy_values") or part.optimizer.state:
            continue
        part._init_optimizer_states_with_dummy_values()  # a step with gradients of zero, which is none
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].zero_()
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0


def unshare_steps(optimizer: Any) -> None:
    """Give every parameter its own step tensor again. Call after loading."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].detach().clone()


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _tolerate_missing_step(cls: Any) -> None:
    if getattr(cls, "_rljob_step_fix", False):
        return
    original = cls._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        tensors.setdefault("step", None)
        return original(self, model_param, tensors)

    cls._set_main_param_and_optimizer_states = set_states
    cls._rljob_step_fix = True
