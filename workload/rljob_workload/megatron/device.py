"""The one place that knows which device this process computes on.

CPU ranks run the same Megatron classes as GPU ranks. What differs is decided here: the communication backend, the device
that is synchronised (always the one of LOCAL_RANK, never "the calling thread's current one"), and whether the CPU shim and
the attention stand-ins are needed.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import os
import re

import torch
import torch.distributed as dist

from rljob_workload.core.handover import HandoverError, HandoverTimeoutError
from rljob_workload.megatron.errors import DeviceError

#: How much longer than rank 0 the others wait: only rank 0 learns who is absent, so it must be the first to say.
_RANK_0_FIRST_SECONDS = 5.0


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
    if kind() == "cpu":
        from rljob_workload.megatron.shim import admission, offload

        admission.install()
        offload.install()


def require(transformer: str, *, gpus: bool, inference_optimized: bool) -> None:
    """This process has what the job's layers need; the rules have asked the spec for it. Raises DeviceError."""
    if gpus and kind() == "cpu":
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise DeviceError(
            f"spec.trainer.gpusPerNode is above 0, and this rank sees no GPU (torch {torch.__version__}, built {built}); use a "
            "node with GPUs and an image whose torch can use them, or set it to 0"
        )
    if kind() == "cuda" and local_rank() >= torch.cuda.device_count():
        raise DeviceError(f"this rank is number {local_rank()} of its node, which shows it {torch.cuda.device_count()} GPUs")
    if transformer == "Local":
        return
    what = "spec.generation.inferenceOptimized true" if inference_optimized else "spec.model.transformer TransformerEngine"
    if kind() == "cpu":
        raise DeviceError(f"{what} needs a GPU, and this rank sees none; set spec.trainer.gpusPerNode, or Local would do")
    if importlib.util.find_spec("transformer_engine") is None:
        raise DeviceError(f"{what} needs Transformer Engine, which is not installed here (extra `gpu`); Local would do")


def settle() -> None:
    """Call once per process, when what lives as long as it does has been built.

    torch and Megatron are some 500,000 Python objects. Requests in flight keep the garbage collector going, and every full
    pass over all of them costs 0.2 s: a quarter of the time of a small model's steps. From here on it passes over them.
    """
    gc.collect()
    gc.freeze()


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


class RankBarrier:
    """Where all ranks meet during a hand-over: on a gloo group of its own, beside every communicator of the model.

    A barrier on those would be one more collective among the ones that it is to keep apart, and could not say who is absent.
    """

    def __init__(self, seconds: float) -> None:
        """Collective: every rank makes one, once. `seconds`: longest wait for the last rank."""
        self._seconds = seconds
        self._limit = datetime.timedelta(seconds=seconds)
        alone = dist.get_world_size() == 1
        limit = datetime.timedelta(seconds=seconds + _RANK_0_FIRST_SECONDS)
        self._group = None if alone else dist.new_group(backend="gloo", timeout=limit)

    def wait(self, phase: str) -> None:
        """Return when all ranks are here. Raises HandoverTimeoutError, or HandoverError when a rank is gone."""
        if self._group is None:
            return
        try:
            dist.monitored_barrier(self._group, timeout=self._limit, wait_all_ranks=True)
        except RuntimeError as err:
            raise self._explained(phase, str(err)) from err

    def _explained(self, phase: str, text: str) -> HandoverError:
        absent = re.search(r"Ranks? ([\d, ]+) failed to pass", text)
        if absent:
            return HandoverTimeoutError(phase, tuple(map(int, absent[1].split(","))), self._seconds)
        if "Timed out" in text:
            return HandoverTimeoutError(phase, (0,), self._seconds)
        return HandoverError(f"rank {dist.get_rank()} lost another rank at the hand-over ({phase}): {' '.join(text.split())}")
