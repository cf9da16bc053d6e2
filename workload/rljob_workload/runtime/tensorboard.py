"""TensorBoard's event files, written by hand: scalars only, no package.

The `tensorboard` package brings a web server and a dozen others into the trainer's image, and its writer in torch pulls torch
into the driver. The format is small and has not changed in ten years: a TFRecord (length, checksum, data, checksum) per
`Event` message of protobuf.

There are two runs beside each other: in `by-step` the horizontal axis is the step, in `by-seconds` the seconds of training
over all attempts. An attempt that goes on from an older checkpoint says so, and TensorBoard drops what was rolled back.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

BY_STEP, BY_SECONDS = "by-step", "by-seconds"

#: CRC-32C (Castagnoli), reflected.
_POLYNOMIAL = 0x82F63B78
_START = 1  # SessionLog.SessionStatus.START


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes, before: int = 0) -> int:
    """The checksum of TFRecords, unmasked. `before`: of what stands in front of the data."""
    crc, table = before ^ 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """A checksum as TFRecords store it."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(payload: bytes, rest: bytes = b"", before: int | None = None) -> bytes:
    """One TFRecord of both parts. `before`: the payload's checksum, where it is known."""
    length = struct.pack("<Q", len(payload) + len(rest))
    crc = crc32c(rest, crc32c(payload) if before is None else before)
    return length + struct.pack("<I", masked(crc32c(length))) + payload + rest + struct.pack("<I", masked(crc))


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _position(step: int) -> bytes:
    """The fields of every `Event`: wall_time = 1 (double), step = 2. Others: file_version = 3, summary = 5, session_log = 7."""
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step)


@functools.cache
def _before_value(tag: str) -> bytes:
    """A value's bytes up to its four of number: tag = 1 and simple_value = 2 (float)."""
    named = _message(1, tag.encode()) + b"\x15"
    return b"\x0a" + _varint(len(named) + 4) + named


def _summary(scalars: Iterable[tuple[str, float]]) -> bytes:
    """`Summary`: value = 1, repeated."""
    return _message(5, b"".join(_before_value(tag) + struct.pack("<f", value) for tag, value in scalars))


class EventFile:
    """One attempt's event file of one run."""

    def __init__(self, directory: Path, attempt: int, first: int) -> None:
        """`first`: the first position that this attempt writes; what earlier ones wrote from there on is void."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"events.out.tfevents.{int(time.time()):010d}.attempt-{attempt:06d}"
        self._file = self._path.open("ab", buffering=0)
        self._write(record(_message(3, b"brain.Event:2"), _position(0)))
        self._write(record(_message(7, b"\x08" + _varint(_START)), _position(first)))

    def append(self, position: int, summary: bytes, crc: int) -> None:
        """Append a summary, with its checksum, at a position of the horizontal axis. Raises OSError that names the file."""
        self._write(record(summary, _position(position), crc))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as err:
            raise OSError(err.errno, err.strerror or os.strerror(err.errno or 0), str(self._path)) from err


class TensorBoard:
    """Both runs of one attempt, fed with the lines of metrics.jsonl."""

    def __init__(self, directory: Path, attempt: int, step: int, seconds: float) -> None:
        """The attempt goes on from this step and these seconds of training."""
        self._by_step = EventFile(directory / BY_STEP, attempt, step + 1)
        self._by_seconds = EventFile(directory / BY_SECONDS, attempt, int(seconds))

    def write(self, line: Mapping[str, Any]) -> None:
        """One step."""
        summary = _summary(scalars(line))
        crc = crc32c(summary)  # a loop over its bytes in Python: once for both files, which is why positions stand behind
        self._by_step.append(int(line["step"]), summary, crc)
        self._by_seconds.append(int(line["elapsed_seconds"]), summary, crc)

    def close(self) -> None:
        """Close the files."""
        self._by_step.close()
        self._by_seconds.close()


#: Keys of a line that are no measure of training.
_NOT_SHOWN = frozenset({"step", "attempt", "filtered"})
#: Objects in a line, and the prefix of what is in them.
_INSIDE = {
    "memory/peak_bytes": "memory/peak_bytes",
    "seconds": "seconds",
    "prompts": "prompts",
    "ages": "age",
    "totals": "total",
}
#: Numbers that have a name of their own.
_NAMES = {
    "in_flight_cap": "prompts/in_flight_cap",
    "validation_reward": "validation/reward",
}


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl with the names that TensorBoard groups them by."""
    for key, value in line.items():
        if prefix := _INSIDE.get(key):
            for name, number in value.items():
                if isinstance(number, int | float):
                    yield f"{prefix}/{name}", float(number)
        elif key not in _NOT_SHOWN and isinstance(value, int | float):
            yield _NAMES.get(key, key if "/" in key else f"train/{key}"), float(value)
