"""Host memory for the copies of a save, kept from one save to the next.

A copy into fresh memory is mostly the kernel's work: it clears each page, at several times the price of the copy. So the memory
stays with the process. Between two saves the kernel may take its pages when it needs them (MADV_FREE), so what is kept costs
nobody else anything: where memory is short the next save pays for fresh pages again, where it is not it finds the old ones.

Huge pages are not asked for: the kernel looks for them at the first touch, with the engine down. 1.7 GB took 3.6 s of its time
instead of 0.6, and were filled no faster at the next save.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rljob_workload.megatron.errors import WeightsError

#: From here on a buffer is a mapping of its own, whose pages can be given up.
_MAPPED_BYTES = 1 << 18
#: Bytes that are given up in one call: milliseconds, in which no other thread of the process runs Python.
_GIVEN_UP_BYTES = 1 << 24


class Buffers:
    """Tensors by name. `lend` begins a save and `give_back` ends it; in between nothing of them is handed out twice."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Tensor, mmap.mmap | None]] = {}
        self._taken: set[Hashable] = set()
        #: Where each begins and ends, in order; made when asked for.
        self._ranges: list[tuple[int, int]] = []
        self._lent = False

    def lend(self) -> None:
        """From here on the tensors belong to one save. Raises WeightsError while they belong to another one."""
        if self._lent:
            raise WeightsError("the copies of the save before are still being written; they cannot be taken for another save")
        self._taken.clear()
        self._lent = True

    def take(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A dense tensor on the host with a storage of its own; what it holds is not said. The same one at every save."""
        if not self._lent or name in self._taken:
            raise WeightsError(f"{name}: memory for a copy is handed out once in a save, and only there")
        self._taken.add(name)
        kept = self._kept.get(name)
        if kept is None or kept[0].shape != torch.Size(shape) or kept[0].dtype is not dtype:
            kept = self._kept[name] = _allocate(shape, dtype)
            self._ranges = []
        return kept[0]

    def owns(self, tensor: Tensor) -> bool:
        """Whether its elements lie in this memory."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return not tensor.numel()
        if not self._ranges:
            self._ranges = sorted((kept.data_ptr(), kept.data_ptr() + kept.nbytes) for kept, _ in self._kept.values())
        at = bisect.bisect_right(self._ranges, tensor.data_ptr(), key=lambda found: found[0]) - 1
        return at >= 0 and tensor.data_ptr() < self._ranges[at][1]

    def give_back(self) -> None:
        """The save has ended, well or badly: what it did not take is freed, and the kernel may take the pages of the rest."""
        for name in self._kept.keys() - self._taken:
            del self._kept[name]
        for mapping in [mapping for _, mapping in self._kept.values() if mapping is not None]:
            for start in range(0, len(mapping), _GIVEN_UP_BYTES):
                mapping.madvise(mmap.MADV_FREE, start, min(_GIVEN_UP_BYTES, len(mapping) - start))
        self._ranges = []
        self._lent = False


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, mmap.mmap | None]:
    count = math.prod(shape)
    if count * dtype.itemsize < _MAPPED_BYTES:
        return torch.empty(tuple(shape), dtype=dtype), None
    mapping = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(tuple(shape)), mapping
