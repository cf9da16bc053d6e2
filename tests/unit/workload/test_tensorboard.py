"""TensorBoard's files, read back with a reader of this test: checksums, protobuf, and what a restart voids."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_workload.runtime.tensorboard import BY_SECONDS, BY_STEP, TensorBoard, crc32c, masked, scalars


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_the_checksum_is_castagnolis(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(crc32c(data[:8]))
        body, rest = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", rest[:4])[0] == masked(crc32c(body))
        yield body
        data = rest[4:]


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not data[at - 1] & 0x80:
            return value, at


def message(data: bytes) -> dict[int, list[Any]]:
    """Protobuf's wire format: field number to values; doubles, floats, numbers and bytes."""
    fields: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value: Any
        if key & 7 == 0:
            value, at = varint(data, at)
        elif key & 7 == 1:
            (value,), at = struct.unpack("<d", data[at : at + 8]), at + 8
        elif key & 7 == 5:
            (value,), at = struct.unpack("<f", data[at : at + 4]), at + 4
        else:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        fields.setdefault(key >> 3, []).append(value)
    return fields


def events(directory: Path) -> list[dict[int, list[Any]]]:
    return [message(body) for path in sorted(directory.iterdir()) for body in records(path)]


def values(event: dict[int, list[Any]]) -> dict[str, float]:
    found = [message(value) for value in message(event[5][0])[1]]
    return {value[1][0].decode(): value[2][0] for value in found}


LINE = {
    "step": 300,
    "attempt": 2,
    "elapsed_seconds": 12.75,
    "reward": 0.5,
    "consumed_samples": 38400,
    "filtered": (1, 2),
    "ages": {"0": 3, "1": 5},
    "seconds": {"generate": 0.25},
    "memory/peak_bytes": {"train": 2**30},
    "totals": {"starved_seconds": 2.5},
    "prompts": {"trained": 2400, "skipped_by": {}},
    "engine/constructions": 1,
    "train/gen_logprob_error": None,
    "in_flight_cap": 16,
    "validation_reward": 0.75,
}
SHOWN = {
    "train/elapsed_seconds": 12.75,
    "train/reward": 0.5,
    "train/consumed_samples": 38400,
    "age/0": 3,
    "age/1": 5,
    "seconds/generate": 0.25,
    "memory/peak_bytes/train": 2**30,
    "total/starved_seconds": 2.5,
    "prompts/trained": 2400,
    "engine/constructions": 1,
    "prompts/in_flight_cap": 16,
    "validation/reward": 0.75,
}


def test_a_line_of_metrics_is_there_against_steps_and_against_seconds(tmp_path: Path) -> None:
    assert dict(scalars(LINE)) == SHOWN
    board = TensorBoard(tmp_path, attempt=2, step=299, seconds=11.5)
    board.write(LINE)
    board.close()
    for run, first, position in [(BY_STEP, 300, 300), (BY_SECONDS, 11, 12)]:
        version, start, line = events(tmp_path / run)
        assert version[3] == [b"brain.Event:2"]
        # What an earlier attempt wrote from here on never happened: TensorBoard drops it.
        assert (start[2], message(start[7][0])) == ([first], {1: [1]})
        assert line[2] == [position]
        assert values(line) == SHOWN
        assert line[1][0] > 1.7e9


def test_every_attempt_has_a_file_of_its_own(tmp_path: Path) -> None:
    for attempt in (1, 2):
        TensorBoard(tmp_path, attempt, 0, 0.0).close()
    assert len(list((tmp_path / BY_STEP).iterdir())) == 2
    assert [event.get(3) for event in events(tmp_path / BY_SECONDS)].count([b"brain.Event:2"]) == 2


def test_a_full_volume_names_the_file(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 1, 0, 0.0)
    board._by_step._file.close()
    board._by_step._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - closed below
    with pytest.raises(OSError, match="No space left on device") as caught:
        board.write(LINE)
    assert "events.out.tfevents." in str(caught.value.filename)
    board.close()
