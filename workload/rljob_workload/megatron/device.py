"""The one place that knows which device this process computes on.

CPU ranks run the same Megatron classes as GPU ranks. What differs is decided here: the communication backend, the device
that is synchronised (always the one of LOCAL_RANK, never "the calling thread's current one"), and whether the CPU shim and
the attention stand-ins are needed.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from rljob_workload.megatron.errors import DeviceError


def kind() -> str:
    """`cuda` when this process sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_rank() -> int:
    """This process's place among the ranks of its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def current() -> torch.device:
    """The device of LOCAL_RANK."""
    return torch.device("cuda", local_rank()) if kind() == "cuda" else torch.device("cpu")


def backend() -> str:
    """The collective backend for that device."""
    return "nccl" if kind() == "cuda" else "gloo"


def synchronize() -> None:
    """Wait until the device of LOCAL_RANK has finished its queued work."""
    if kind() == "cuda":
        torch.cuda.synchronize(current())


def prepare() -> None:
    """Make this process ready to import and run Megatron. Call once, before anything imports `megatron.core`."""
    check_transformer_engine()
    if kind() == "cuda":
        torch.cuda.set_device(current())
    else:
        from rljob_workload.megatron import shim

        # One thread per rank: the ranks of a CPU node share its cores, and the tiny models lose time to more threads.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        shim.install()


def prepare_attention() -> None:
    """Give the dynamic engine an attention that works here. Call after `megatron.core` was imported."""
    if kind() == "cpu" or importlib.util.find_spec("flash_attn") is None:
        from rljob_workload.megatron.shim import attention

        attention.install()


def check_transformer_engine() -> None:
    """Transformer Engine must be whole or absent: half of it makes `import megatron.core` fail in obscure ways."""
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except Exception as err:
        raise DeviceError(
            "Transformer Engine is installed but cannot be imported "
            f"({type(err).__name__}: {err}); install it whole (extra `gpu`) or uninstall every transformer-engine package"
        ) from err
