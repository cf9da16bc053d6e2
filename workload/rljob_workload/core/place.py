"""Loader places as JSON: whatever `state_dict()` returns, as far as it is made of plain values. No pickle."""

from __future__ import annotations

import base64
from typing import Any

#: Keys that mark a value which JSON does not know.
_BYTES, _TUPLE, _PAIRS = "$bytes", "$tuple", "$pairs"


class PlaceError(Exception):
    """A place that cannot be written as JSON, or is not what was written."""


def encode_place(value: Any, path: str = "place") -> Any:
    """Plain JSON; tuples, bytes and dictionaries with other keys than text survive. Names what it cannot write."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode_place(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [encode_place(item, f"{path}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode_place(item, f"{path}.{key}") for key, item in value.items()}
        return {_PAIRS: [[encode_place(k, path), encode_place(v, f"{path}.{k}")] for k, v in value.items()]}
    raise PlaceError(f"the loader's {path} is a {type(value).__name__}, which cannot be saved as JSON; make it a list or bytes")


def decode_place(value: Any) -> Any:
    """The inverse of `encode_place`."""
    if isinstance(value, list):
        return [decode_place(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, inner), *_ = value.items()
        if key == _BYTES:
            return base64.b64decode(inner)
        if key == _TUPLE:
            return tuple(decode_place(item) for item in inner)
        if key == _PAIRS:
            return {decode_place(k): decode_place(v) for k, v in inner}
    return {key: decode_place(item) for key, item in value.items()}
