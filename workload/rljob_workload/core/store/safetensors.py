"""The safetensors format for one-dimensional columns of numbers, without numpy or torch: 8 bytes of length, JSON, raw bytes.

Any safetensors reader opens the files. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any

Column = array[int] | array[float]
#: safetensors' name of a type: the code of `array` that has its bytes.
_CODES = {"I32": "i", "I64": "q", "F32": "f", "F64": "d"}
_NAMES = {code: name for name, code in _CODES.items()}
_ALIGNMENT = 8


class TensorFileError(ValueError):
    """Bytes that are no safetensors file of columns; names the column."""


def to_bytes(columns: Mapping[str, Column]) -> bytes:
    """A file of these columns; `array` codes i, q, f and d."""
    header, body = {}, bytearray()
    for name, column in columns.items():
        data = _little_endian(column).tobytes()
        header[name] = {
            "dtype": _NAMES[column.typecode],
            "shape": [len(column)],
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def from_bytes(data: bytes) -> dict[str, Column]:
    """The columns of a file. Raises TensorFileError."""
    if len(data) < 8 or (length := struct.unpack_from("<Q", data)[0]) > len(data) - 8:
        raise TensorFileError("the header is longer than the file")
    body = memoryview(data)[8 + length :]
    try:
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        return {name: _column(name, told, body) for name, told in header.items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as err:
        raise TensorFileError(f"the header is malformed: {type(err).__name__}: {err}") from err
    except ValueError as err:
        raise err if isinstance(err, TensorFileError) else TensorFileError(f"the header is malformed: {err}") from err


def _column(name: str, told: Mapping[str, Any], body: memoryview) -> Column:
    code = _CODES.get(str(told["dtype"]))
    first, last = told["data_offsets"]
    (count,) = told["shape"]
    if code is None:
        raise TensorFileError(f"column {name!r}: type {told['dtype']!r} is none of {', '.join(_CODES)}")
    column: Column = array(code)
    if not 0 <= first <= last <= len(body) or last - first != count * column.itemsize:
        raise TensorFileError(f"column {name!r}: {count} numbers are not the bytes {first} to {last} of {len(body)}")
    column.frombytes(body[first:last])
    return _little_endian(column)


def _little_endian(column: Column) -> Column:
    if sys.byteorder == "little":
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped
