"""Weights of a Hugging Face model as the tensors that Megatron's checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.architecture import Architecture
from rljob_workload.huggingface.headers import Slot
from rljob_workload.huggingface.mapping import pack
from rljob_workload.huggingface.names import table


class PretrainedWeights:
    """Whole tensors by the name that a checkpoint has for them; read from mapped files as they are asked for."""

    def __init__(self, of: Architecture, slots: Mapping[str, Slot]) -> None:
        self._of = of
        self._slots = slots
        self._entries = {name: entry for entry in table(of) for name in entry.names}
        self._files: dict[Path, dict[str, Tensor]] = {}
        self._last: tuple[str, Tensor] | None = None

    def whole(self, name: str) -> Tensor:
        """The tensor of all ranks, the vocabulary's without padding, in the type that the file has. Raises KeyError."""
        if self._last is None or self._last[0] != name:  # experts and halves of one tensor are asked for in a row
            entry = self._entries[name]
            self._last = name, pack(self._of, entry, [self._part(part) for part in entry.parts])
        return self._last[1]

    def _part(self, name: str) -> Tensor:
        file = self._slots[name].file
        if file not in self._files:
            self._files[file] = tensors.read(file)
        return self._files[file][name]
