"""Loading a DistributedOptimizer that runs over torch's AdamW (no Transformer Engine, no Apex).

Those two keep Adam's step count per group, torch keeps it per parameter, and Megatron's load path knows only the first:
a fresh optimizer cannot be loaded into, `step` is missing on the way, and afterwards all parameters share *one* step
tensor, which then advances once per parameter and quietly changes the continued losses.
"""

from __future__ import annotations

from typing import Any

import torch


def prepare_for_load(optimizer: Any) -> None:
    """Make a fresh optimizer loadable. Call before its sharded state is described."""
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _tolerate_missing_step(distrib_optimizer.DistributedOptimizer)
    for part in _parts(optimizer):
        if hasattr(part, "_init_optimizer_states_with_dummy_values") and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()


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
