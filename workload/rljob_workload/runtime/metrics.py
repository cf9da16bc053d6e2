"""metrics.jsonl: one object per training step, appended over all attempts of a run."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("rljob.driver")


@dataclass(frozen=True, slots=True)
class LastMetrics:
    """Where earlier attempts got to."""

    step: int = 0
    elapsed_seconds: float = 0.0
    trained_prompts: int = 0
    #: Seconds of all attempts, start-ups included.
    active_seconds: float = 0.0
    #: Of the validation that followed that step; None: none did.
    validation_reward: float | None = None


class MetricsFile:
    """Appends lines; reads the last complete one of earlier attempts."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last = _last_metrics(path)
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._path = path
        # Unbuffered: what a full volume refused must not be tried again when the file is closed.
        self._file = path.open("ab", buffering=0)
        if torn:
            # A killed writer left half a line; ours must not be glued to it.
            self._append(b"\n")

    def write(self, line: dict[str, Any]) -> None:
        """Append one step."""
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as err:
            raise OSError(err.errno, err.strerror or os.strerror(err.errno or 0), str(self._path)) from err


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines (a killed writer may leave half a line)."""
    return [line for line in _objects(path) if isinstance(line, dict) and "step" in line]


def _objects(path: Path) -> list[Any]:
    objects = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            objects.append(json.loads(text))
        except ValueError:  # not JSON, or not UTF-8
            continue
    return objects


def _last_metrics(path: Path) -> LastMetrics:
    """The last line that says where its attempt got to; others are somebody else's, and named."""
    for line in reversed(read_metrics(path)):
        try:
            elapsed = float(line["elapsed_seconds"])
            active = float(line.get("active_seconds", elapsed))
            reward = None if line.get("validation_reward") is None else float(line["validation_reward"])
            return LastMetrics(int(line["step"]), elapsed, int(line["prompts"]["trained"]), active, reward)
        except (KeyError, TypeError, ValueError) as err:
            log.warning("%s: passed over a line that is not a step's (%s: %s)", path, type(err).__name__, err)
    return LastMetrics()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
