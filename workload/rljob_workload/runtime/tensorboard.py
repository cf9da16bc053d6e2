"""TensorBoard's event files, written by hand: scalars only, no package.

The `tensorboard` package brings a web server and a dozen others into the trainer's image, and its writer in torch pulls torch
into the driver. The format is small and has not changed in ten years: a TFRecord (length, checksum, data, checksum) per
`Event` message of protobuf.

There are two runs beside each other: in `by-step` the horizontal axis is the step, in `by-seconds` the seconds of training
over all attempts. An attempt that goes on from an older checkpoint says so, and TensorBoard drops what was rolled back.
"""

from __future__ import annotations

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


def crc32c(data: bytes) -> int:
    """The checksum of TFRecords, unmasked."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """A checksum as TFRecords store it."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


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


def _event(step: int, payload: bytes) -> bytes:
    """`Event`: wall_time = 1 (double), step = 2, and one of file_version = 3, summary = 5, session_log = 7."""
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + payload


def _summary(scalars: Iterable[tuple[str, float]]) -> bytes:
    """`Summary`: value = 1, each with tag = 1 and simple_value = 2 (float)."""
    values = (_message(1, _message(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars)
    return _message(5, b"".join(values))


class EventFile:
    """One attempt's event file of one run."""

    def __init__(self, directory: Path, attempt: int, first: int) -> None:
        """`first`: the first position that this attempt writes; what earlier ones wrote from there on is void."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"events.out.tfevents.{int(time.time()):010d}.attempt-{attempt:06d}"
        self._file = self._path.open("ab", buffering=0)
        self._write(_event(0, _message(3, b"brain.Event:2")))
        self._write(_event(first, _message(7, b"\x08" + _varint(_START))))

    def scalars(self, position: int, values: Iterable[tuple[str, float]]) -> None:
        """Append values at a position of the horizontal axis. Raises OSError that names the file."""
        self._write(_event(position, _summary(values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        data = record(event)
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
        values = list(scalars(line))
        self._by_step.scalars(int(line["step"]), values)
        self._by_seconds.scalars(int(line["elapsed_seconds"]), values)

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
