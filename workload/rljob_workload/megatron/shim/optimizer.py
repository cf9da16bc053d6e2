"""Mends for Megatron's DistributedOptimizer: states saved from several buckets, and loading over torch's AdamW.

Transformer Engine and Apex keep Adam's step count per group, torch keeps it per parameter, and Megatron's load path knows
only the first: a fresh optimizer cannot be loaded into, `step` is missing on the way, and afterwards all parameters share
*one* step tensor, which then advances once per parameter and quietly changes the continued losses.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_padding_between_buckets() -> None:
    """Save every parameter's own state, also where a buffer has several buckets (any device). Call before the first save.

    A tied embedding of a pipeline stage has a bucket to itself. Megatron gathers the buckets without the padding between
    them, then cuts out each parameter at its place *with* padding: without this, a checkpoint of a pipeline holds the states
    of other elements, and resuming in another layout replaces the weights by them.
    """
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    if getattr(cls, "_rljob_padding_fix", False):
        return
    original = cls.get_parameter_state_dp_zero

    def get_state(self: Any, *arguments: Any, **options: Any) -> Any:
        state = original(self, *arguments, **options)
        for index, buffer in enumerate(self.buffers):
            for tensors in state[index].values() if state is not None else ():
                tensors.update({name: _with_padding(t, buffer) for name, t in tensors.items() if torch.is_tensor(t)})
        return state

    cls.get_parameter_state_dp_zero = get_state
    cls._rljob_padding_fix = True


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
