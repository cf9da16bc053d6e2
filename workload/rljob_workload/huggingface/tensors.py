"""Tensors in files: read from Megatron's distributed checkpoints in one process, written and read in the safetensors format."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rljob_workload.huggingface.errors import ExportError
from rljob_workload.huggingface.headers import Slot, read_headers

#: Prefixes of the model's tensors; the optimizer's stand beside them.
_MODEL = ("embedding.", "decoder.", "output_layer.")
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_ALIGNMENT = 8


class SavedWeights:
    """The model's tensors in the `weights` directory of a checkpoint, each of them whole, whatever ranks wrote it."""

    def __init__(self, directory: Path) -> None:
        """Raises ExportError when the directory holds none."""
        self._reader = FileSystemReader(directory)
        try:
            metadata = self._reader.read_metadata()
        except OSError as err:
            raise ExportError(f"cannot read {err.filename or directory}: {err.strerror or err}") from err
        #: Size and type by name.
        self.known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(told.size), told.properties.dtype)
            for name, told in metadata.state_dict_metadata.items()
            if isinstance(told, TensorStorageMetadata) and name.startswith(_MODEL)
        }

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors. Raises ExportError."""
        state = {name: torch.empty(self.known[name][0], dtype=self.known[name][1]) for name in names}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as wanted
                load(state, storage_reader=self._reader, no_dist=True)
        except (OSError, RuntimeError, CheckpointException) as err:  # the last is no Exception
            raise ExportError(f"cannot read the weights in {self._reader.path}: {err}") from err
        return state


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """A safetensors file of float32 or bfloat16 tensors, on the disk when this returns. Returns its SHA-256."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    found = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (struct.pack("<Q", len(text)), text):
            found.update(chunk)
            file.write(chunk)
        for tensor in tensors.values():
            data = memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
            found.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return found.hexdigest()


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory (a private copy is made of what is changed). Raises FormatError, OSError."""
    slots = read_headers(path)
    if not any(slot.count for slot in slots.values()):
        return {name: torch.empty(slot.shape, dtype=_TYPES[slot.dtype]) for name, slot in slots.items()}
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {name: _view(mapped, slot) for name, slot in slots.items()}


def _view(mapped: mmap.mmap, slot: Slot) -> Tensor:
    dtype = _TYPES[slot.dtype]
    if not slot.count:
        return torch.empty(slot.shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=slot.count, offset=slot.begin).view(slot.shape)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
