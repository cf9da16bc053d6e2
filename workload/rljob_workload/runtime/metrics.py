"""metrics.jsonl: one object per training step, appended over all attempts of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class LastMetrics:
    """Where earlier attempts got to."""

    step: int = 0
    elapsed_seconds: float = 0.0
    trained_prompts: int = 0


class MetricsFile:
    """Appends lines; reads the last complete one of earlier attempts."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last = _last_metrics(path)
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._file = path.open("a")
        if torn:
            # A killed writer left half a line; ours must not be glued to it.
            self._file.write("\n")

    def write(self, line: dict[str, Any]) -> None:
        """Append one step."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines (a killed writer may leave half a line)."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def _last_metrics(path: Path) -> LastMetrics:
    lines = read_metrics(path)
    if not lines:
        return LastMetrics()
    last = lines[-1]
    return LastMetrics(last["step"], last["elapsed_seconds"], last["prompts"]["trained"])


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
