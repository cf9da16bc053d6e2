"""A `torch` for `megatron.*` modules in which the CUDA device is the CPU."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rljob_workload.megatron.shim import gemm, uneven

CPU = torch.device("cpu")
_GIB = 1 << 30
#: Functions that create tensors on a device named by a keyword.
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "linspace", "eye"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "as_tensor", "randperm", "empty_strided", "scalar_tensor"),
)

#: The module of Megatron's linear layers.
_LINEAR = "megatron.core.tensor_parallel.layers"
#: Functions of `megatron.core.tensor_parallel.mappings` that need another form on gloo.
_UNEVEN = {
    "_gather_along_first_dim": uneven.gather_along_first_dim,
    "_reduce_scatter_along_first_dim": uneven.reduce_scatter_along_first_dim,
}

_installed = False


class _Stream:
    """Stands in for CUDA streams and events: everything on a CPU has already happened."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Proxy(types.ModuleType):
    """A module with some names replaced; everything else is the real module's."""

    def __init__(self, real: types.ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update({k: v for k, v in real.__dict__.items() if not k.startswith("__")})
        self.__dict__.update(replaced)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        """Attributes that the real module makes lazily."""
        return getattr(self.__dict__["_real"], name)


def install() -> None:
    """Show the proxy to all `megatron.*` modules, loaded already or later. Does nothing when there is a GPU."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    proxy = _torch_proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module is not None:
            _fix_module(module, proxy)
    sys.meta_path.insert(0, _ImportHook(proxy))
    _patch_tensor()
    _installed = True


def _torch_proxy() -> _Proxy:
    real = torch.cuda
    rng: dict[str, Any] = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    cuda = _Proxy(
        real,
        current_device=lambda: CPU,
        set_device=_nothing,
        device_count=lambda: 1,
        synchronize=_nothing,
        empty_cache=_nothing,
        Stream=_Stream,
        Event=_Stream,
        stream=lambda stream=None: contextlib.nullcontext(),
        current_stream=_Stream,
        default_stream=_Stream,
        manual_seed=torch.manual_seed,
        random=_Proxy(real.random, **rng),
        nvtx=_Proxy(real.nvtx, range_push=_zero, range_pop=_zero, range=lambda *_, **__: contextlib.nullcontext()),
        memory_allocated=_zero,
        max_memory_allocated=_zero,
        memory_reserved=_zero,
        memory_stats=lambda *_: collections.defaultdict(int),
        memory_snapshot=lambda *_, **__: [],
        reset_peak_memory_stats=_nothing,
        mem_get_info=lambda *_: (8 * _GIB, 16 * _GIB),
        is_current_stream_capturing=lambda: False,
        get_device_capability=lambda *_: (0, 0),
        **rng,
    )
    return _Proxy(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _fix_module(module: types.ModuleType, proxy: _Proxy) -> None:
    """Replace the names of one Megatron module that stand for the GPU."""
    names = module.__dict__
    if names.get("torch") is torch:
        names["torch"] = proxy
    if module.__name__ == _LINEAR:
        names["torch"] = _Proxy(proxy, matmul=gemm.matmul)
    for name in ("range_push", "range_pop"):
        if getattr(names.get(name), "__module__", "") == "torch.cuda.nvtx":
            names[name] = _zero
    if module.__name__ == "megatron.core.inference.communication_utils":
        names["_is_cuda"] = _nothing  # asserts that a tensor is on a GPU
    if module.__name__ == "megatron.core.tensor_parallel.random":
        # The original defers to a queue that only CUDA's start-up empties: the fork of the generator would do nothing,
        # and every train step would leak the queued closure with its stack trace (0.2 MB).
        names["_set_cuda_rng_state"] = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    if module.__name__ == "megatron.core.tensor_parallel.mappings":
        for name, wrapped in _UNEVEN.items():
            names[name] = wrapped(names[name])
    if "maybe_move_tensor_to_cpu" in names:
        names["maybe_move_tensor_to_cpu"] = _move_to_cpu


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron makes host lists of split sizes only for CUDA tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _ImportHook(importlib.abc.MetaPathFinder):
    """Fixes Megatron modules right after they were imported."""

    def __init__(self, proxy: _Proxy) -> None:
        self._proxy = proxy

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _fix_module(module, self._proxy)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _called_from_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


def _patch_tensor() -> None:
    """Four tensor methods cannot be scoped by module; they differ only when Megatron calls them."""
    real_type, real_cuda, real_pin = torch.Tensor.type, torch.Tensor.cuda, torch.Tensor.pin_memory
    real_matmul = torch.Tensor.matmul

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        # Optimizers compare with the string 'torch.cuda.FloatTensor'.
        if not args and not kwargs and isinstance(result, str) and _called_from_megatron():
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from_megatron() else real_cuda(self, *args, **kwargs)

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from_megatron() else real_pin(self, *args, **kwargs)

    def matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        linear = sys._getframe(1).f_globals.get("__name__") == _LINEAR
        return gemm.matmul(self, other) if linear else real_matmul(self, other)

    torch.Tensor.matmul = matmul  # type: ignore[method-assign,assignment]
    torch.Tensor.type = type_  # type: ignore[assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
