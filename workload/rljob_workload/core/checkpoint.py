"""Checkpoint directories: written aside, published by one rename, read only when complete.

A checkpoint is `step-NNNNNN-tTTTTTT/` in the run directory. It is written as `.tmp-...`, every file is flushed to disk,
`MANIFEST.json` is written last, and a rename makes it visible. A directory without a readable manifest, or whose files do
not have the sizes that the manifest names, is not a checkpoint; it is passed over and named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "MANIFEST.json"
MANIFEST_VERSION = 1
_NAME = re.compile(r"step-(\d{6,})-t(\d{6,})")
_TMP_PREFIX = ".tmp-"


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One published checkpoint."""

    path: Path
    step: int
    token: int
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name


def checkpoint_name(step: int, token: int) -> str:
    """The directory name of a checkpoint."""
    return f"step-{step:06d}-t{token:06d}"


class RunDirectory:
    """The directory of one run on the volume."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self) -> None:
        """Make the directory; names the path when the volume does not allow it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise CheckpointError(f"cannot create the run directory {self.root}: {err.strerror or err}") from err

    # ---- writing ----------------------------------------------------------------------------

    def begin(self, step: int, token: int) -> Path:
        """A fresh directory to write one checkpoint into."""
        tmp = self.root / f"{_TMP_PREFIX}{checkpoint_name(step, token)}"
        shutil.rmtree(tmp, ignore_errors=True)
        try:
            tmp.mkdir(parents=True)
        except OSError as err:
            raise CheckpointError(f"cannot write a checkpoint in {self.root}: {err.strerror or err}") from err
        return tmp

    def publish(self, tmp: Path, step: int, token: int, state: Mapping[str, Any]) -> Checkpoint:
        """Flush everything, write the manifest last and make the checkpoint visible with one rename."""
        final = self.root / checkpoint_name(step, token)
        files = sorted(p for p in tmp.rglob("*") if p.is_file())
        manifest = {
            "version": MANIFEST_VERSION,
            "step": step,
            "token": token,
            "files": {p.relative_to(tmp).as_posix(): p.stat().st_size for p in files},
            "state": state,
        }
        try:
            for path in files:
                _fsync(path)
            _write_durably(tmp / MANIFEST, json.dumps(manifest, separators=(",", ":"), allow_nan=False))
            for directory in [p for p in tmp.rglob("*") if p.is_dir()] + [tmp]:
                _fsync(directory)
            if final.exists():
                shutil.rmtree(final)
            tmp.rename(final)
            _fsync(self.root)
        except OSError as err:
            raise CheckpointError(f"cannot write the checkpoint {final}: {err.strerror or err}") from err
        return Checkpoint(final, step, token, state)

    def prune(self, keep_last: int) -> list[str]:
        """Remove all but the newest complete checkpoints, and what dead writers left. Returns the removed names."""
        complete = [c for c in self._candidates() if isinstance(read_checkpoint(c), Checkpoint)]
        doomed = complete[: max(0, len(complete) - max(1, keep_last))]
        for path in doomed:
            # Renamed away first, so that a crash half-way leaves no directory that looks like a checkpoint.
            gone = path.with_name(f"{_TMP_PREFIX}gone-{path.name}")
            path.rename(gone)
            shutil.rmtree(gone)
        return [path.name for path in doomed]

    def remove_unfinished(self) -> list[str]:
        """Remove what writers of earlier attempts left unfinished."""
        left = [p for p in self.root.iterdir() if p.name.startswith(_TMP_PREFIX)] if self.root.is_dir() else []
        for path in left:
            shutil.rmtree(path)
        return sorted(path.name for path in left)

    # ---- reading ----------------------------------------------------------------------------

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and why newer ones were passed over."""
        passed_over: list[str] = []
        for path in reversed(self._candidates()):
            found = read_checkpoint(path)
            if isinstance(found, Checkpoint):
                return found, passed_over
            passed_over.append(found)
        return None, passed_over

    def _candidates(self) -> list[Path]:
        """Whatever is named like a checkpoint, oldest first (token before step: a newer attempt supersedes)."""
        if not self.root.is_dir():
            return []
        named = [(m, p) for p in self.root.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [p for _, p in sorted(named, key=lambda mp: (int(mp[0][2]), int(mp[0][1])))]


def read_checkpoint(path: Path) -> Checkpoint | str:
    """The checkpoint in a directory, or what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["version"] != MANIFEST_VERSION:
            return f"{path.name}: manifest version {manifest['version']!r} is not {MANIFEST_VERSION}"
        for name, size in manifest["files"].items():
            actual = (path / name).stat().st_size
            if actual != size:
                return f"{path.name}: {name} has {actual} bytes, the manifest says {size}"
        return Checkpoint(path, int(manifest["step"]), int(manifest["token"]), dict(manifest["state"]))
    except OSError as err:
        return f"{path.name}: {Path(err.filename or path).name}: {err.strerror or err}"
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        return f"{path.name}: {MANIFEST} is malformed: {type(err).__name__}: {err}"


def write_json(path: Path, data: Any) -> None:
    """Replace a small JSON file in one step, so that a reader never sees half of it."""
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_text(json.dumps(data, indent=2) + "\n")
    tmp.replace(path)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
