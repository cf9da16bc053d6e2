"""The collector's snapshot as files: its books as JSON, the finished groups as JSON beside columns of numbers.

The manifest stays small, and no reader of the books has to read tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rljob_workload.core.store.errors import CheckpointError
from rljob_workload.core.store.safetensors import Column, TensorFileError, from_bytes, to_bytes

COLLECTOR = "collector.json"
GROUPS = "buffer.json"
COLUMNS = "buffer.safetensors"
_BUFFER = "buffer"
#: Of an answer in the snapshot: what becomes a column of all answers, one after the other.
_TOKENS, _LOGPROBS = "tokens", "logprobs"


def to_files(collector: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a snapshot. Raises CheckpointError for what they cannot hold."""
    try:
        files = {COLLECTOR: _json({key: value for key, value in collector.items() if key != _BUFFER})}
        if _BUFFER in collector:
            files |= _buffer_files(collector[_BUFFER])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as err:
        raise CheckpointError(f"the collector's snapshot cannot be written: {type(err).__name__}: {err}") from err
    return files


def from_files(read: Callable[[str], bytes], present: Iterable[str], *, buffer: bool = True) -> dict[str, Any] | None:
    """The snapshot, without its finished groups if `buffer` is False; None where none was saved. Raises ValueError."""
    names = set(present)
    if COLLECTOR not in names:
        return None
    collector = json.loads(read(COLLECTOR))
    if not isinstance(collector, dict):
        raise ValueError(f"{COLLECTOR} is malformed: expected an object, found {type(collector).__name__}")
    if buffer and GROUPS in names:
        collector[_BUFFER] = _buffer(json.loads(read(GROUPS)), read(COLUMNS))
    return collector


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def _buffer_files(groups: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    tokens: list[int] = []
    logprobs: list[float] = []
    slim = []
    for group in groups:
        answers = []
        for answer in group["answers"]:
            tokens += answer[_TOKENS]
            logprobs += answer[_LOGPROBS]
            answers.append({**answer, _TOKENS: len(answer[_TOKENS]), _LOGPROBS: len(answer[_LOGPROBS])})
        slim.append({**group, "answers": answers})
    columns: dict[str, Column] = {_TOKENS: _whole_numbers(tokens), _LOGPROBS: _real_numbers(logprobs)}
    return {GROUPS: _json(slim), COLUMNS: to_bytes(columns)}


def _buffer(groups: Any, data: bytes) -> list[dict[str, Any]]:
    try:
        columns = from_bytes(data)
    except TensorFileError as err:
        raise ValueError(f"{COLUMNS}: {err}") from err
    try:
        rest = {name: iter(columns[name]) for name in (_TOKENS, _LOGPROBS)}
        for group in groups:
            for answer in group["answers"]:
                for name, column in rest.items():
                    answer[name] = [next(column) for _ in range(answer[name])]
    except StopIteration:
        raise ValueError(f"{COLUMNS}: it has fewer numbers than {GROUPS} says") from None
    except (KeyError, TypeError) as err:
        raise ValueError(f"{GROUPS} is malformed: {type(err).__name__}: {err}") from err
    if any(next(column, None) is not None for column in rest.values()):
        raise ValueError(f"{COLUMNS}: it has more numbers than {GROUPS} says")
    found: list[dict[str, Any]] = groups
    return found


def _whole_numbers(values: list[int]) -> array[int]:
    """As short as they fit."""
    return array("i" if all(-(2**31) <= value < 2**31 for value in values) else "q", values)


def _real_numbers(values: list[float]) -> array[float]:
    """In single precision when that loses nothing: log-probabilities come from there."""
    try:
        single = array("f", values)
    except OverflowError:
        return array("d", values)
    return single if all(a == b for a, b in zip(single, values, strict=True)) else array("d", values)
