"""What is in a safetensors file, read from its header alone. Without torch: the driver looks before any rank exists.

The format is 8 bytes of length, JSON, raw bytes: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Types that are read, and their bytes.
BYTES = {"F32": 4, "BF16": 2, "F16": 2}
#: As in the reference implementation; more is no header.
_MAX_HEADER = 100_000_000


class FormatError(ValueError):
    """A file that is not what it must be; names the tensor."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    #: First byte in the file.
    begin: int

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def read_headers(path: Path) -> dict[str, Slot]:
    """The tensors of a file by name, each inside the file. Raises FormatError, OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(_MAX_HEADER, size - 8):
            raise FormatError(
                f"its header would be {length} bytes long and the file is {size}: it is cut off, or no safetensors"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        return {name: _slot(path, name, told, 8 + length, size) for name, told in header.items()}
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise FormatError(f"its header is malformed: {type(err).__name__}: {err}") from err


def _slot(path: Path, name: str, told: dict[str, Any], body: int, size: int) -> Slot:
    dtype, shape = str(told["dtype"]), tuple(int(one) for one in told["shape"])
    first, last = (int(one) for one in told["data_offsets"])
    if dtype not in BYTES:
        raise FormatError(f"{name} has the type {dtype}; {', '.join(BYTES)} are read")
    slot = Slot(path, dtype, shape, body + first)
    if min(shape, default=0) < 0 or first < 0 or last - first != slot.count * BYTES[dtype] or body + last > size:
        raise FormatError(f"{name} of the size {shape} does not lie in the bytes {first} to {last} of {size - body}")
    return slot
