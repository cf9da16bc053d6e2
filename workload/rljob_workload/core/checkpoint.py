"""A run's directory on the volume: its checkpoints, who may write them, and which of them a resume may read.

A checkpoint is `step-NNNNNN-tTTTTTT/`. It is written as `.tmp-...`, every file is flushed to disk, `MANIFEST.json` is written
last, and one rename makes it visible. What protects a run from a writer that was overtaken is on the reading side: only
checkpoints on the newest token's lineage are read (`store.lineage`). A directory that is not what its manifest says is passed
over and named, and never deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_workload.core.store import collector_files, survey, writing
from rljob_workload.core.store.errors import CheckpointError, FencedError, FenceError, InvalidCheckpointError
from rljob_workload.core.store.fence import Entry, Fence, Owner, read_fence, take_token
from rljob_workload.core.store.filesystem import Files, OsFiles, make_durable_directory
from rljob_workload.core.store.lineage import Name
from rljob_workload.core.store.manifest import MANIFEST, MANIFEST_VERSION, Manifest
from rljob_workload.core.store.survey import Choice, Judged
from rljob_workload.core.store.verify import Level, verify
from rljob_workload.core.store.writing import Origin

__all__ = [
    "MANIFEST",
    "MANIFEST_VERSION",
    "Checkpoint",
    "CheckpointError",
    "Choice",
    "FenceError",
    "FencedError",
    "InvalidCheckpointError",
    "Judged",
    "Level",
    "Manifest",
    "Origin",
    "Owner",
    "RunDirectory",
    "open_checkpoint",
    "read_checkpoint",
    "write_json",
]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One published checkpoint. `state["collector"]` is the collector's snapshot."""

    path: Path
    step: int
    token: int
    state: Mapping[str, Any]
    manifest: Manifest | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name


class RunDirectory:
    """The directory of one run on the volume."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self.files: Files = files or OsFiles(root)

    def create(self) -> None:
        """Make the directory; names the path when the volume does not allow it."""
        try:
            make_durable_directory(self.root)
        except OSError as err:
            raise CheckpointError(f"cannot create the run directory {self.root}: {err.strerror or err}") from err

    # ---- tokens -----------------------------------------------------------------------------

    def fence(self) -> Fence:
        """All tokens taken in this directory. Raises FenceError."""
        return read_fence(self.files)

    def take_token(self, owner: Owner, resumed_from: str | None, source: str | None = None, time: str = "") -> Entry:
        """Become the writer, going on from the checkpoint of that name (see `store.fence.take_token`)."""
        return take_token(self.files, owner, resumed_from, source, time)

    def require(self, token: int) -> None:
        """Raises FencedError when a newer token has been taken."""
        self.fence().require(token)

    # ---- writing ----------------------------------------------------------------------------

    def begin(self, step: int, token: int) -> Path:
        """A fresh directory to write one checkpoint into. Raises FencedError, CheckpointError."""
        return self.root / writing.begin(self.files, Name(token, step))

    def publish(self, tmp: Path, step: int, token: int, state: Mapping[str, Any], origin: Origin | None = None) -> Checkpoint:
        """Flush everything, write the manifest last and make the checkpoint visible with one rename.

        `state["collector"]` goes to files of its own. Raises FencedError when the token has been overtaken, CheckpointError
        when the volume does not take it; what was saved before stays as it is.
        """
        name = Name(token, step)
        if tmp.parent != self.root:
            raise CheckpointError(f"{tmp} was not begun in {self.root}")
        try:
            manifest = writing.publish(self.files, tmp.name, name, state, origin or Origin())
        except OSError as err:
            writing.discard(self.files, tmp.name)
            raise CheckpointError(f"cannot write the checkpoint {self.root / str(name)}: {_reason(err)}") from err
        return Checkpoint(self.root / str(name), step, token, state, manifest)

    def discard(self, tmp: Path) -> None:
        """Give up a begun checkpoint, so that what is left of a full volume suffices for the next attempt."""
        writing.discard(self.files, tmp.name)

    def prune(self, keep_last: int, token: int | None = None) -> list[str]:
        """Remove checkpoints beyond the newest `keep_last` valid ones of the lineage. Returns the removed names.

        Nothing goes before `token` has a valid save of its own; an overtaken writer removes nothing (FencedError).
        """
        try:
            return writing.prune(self.files, keep_last, token)
        except OSError as err:
            raise CheckpointError(f"cannot remove an old checkpoint in {self.root}: {_reason(err)}") from err

    def remove_unfinished(self, token: int | None = None) -> list[str]:
        """Remove what writers of older tokens left unfinished. Returns the removed names."""
        try:
            return writing.remove_unfinished(self.files, token)
        except OSError as err:
            raise CheckpointError(f"cannot remove what is unfinished in {self.root}: {_reason(err)}") from err

    # ---- reading ----------------------------------------------------------------------------

    def choose(
        self,
        level: Level = "Sizes",
        unloadable: Collection[str] = (),
        check: Callable[[Checkpoint], object] | None = None,
        taker: Owner | None = None,
    ) -> Choice:
        """The newest valid checkpoint on the lineage and why others were passed over.

        What is `unloadable` is passed over by name. `check` gets a checkpoint without its finished groups and may find more
        wrong with it by raising InvalidCheckpointError. Who chooses in order to take a token is its `taker`. Raises
        FenceError, CheckpointError where nothing can be told.
        """

        def more(name: str, manifest: Manifest) -> None:
            if check is not None:
                check(_with_state(self.files, self.root / name, name, manifest, buffer=False))

        return survey.choose(self.files, level, unloadable, more, taker)

    def still_there(self, name: str) -> bool:
        """For the taker of a token: whether what it goes on from is there, brought back if its deletion had begun."""
        try:
            writing.restore(self.files, name)
            verify(self.files, name, "Sizes")
        except InvalidCheckpointError:
            return False
        except OSError as err:
            raise CheckpointError(f"cannot bring {self.root / name} back: {_reason(err)}") from err
        return True

    def judge_all(self, level: Level, fence: Fence | None) -> list[Judged]:
        """Every directory that is named like a checkpoint, newest first; no fence: it cannot be read."""
        return survey.judge_all(self.files, level, fence.lineage if fence is not None else None)

    def load(self, name: str, level: Level = "Sizes", *, buffer: bool = True) -> Checkpoint:
        """One checkpoint with its state, verified. Raises InvalidCheckpointError.

        Without `buffer` the finished groups are left out of `state["collector"]`.
        """
        manifest = verify(self.files, name, level)
        return _with_state(self.files, self.root / name, name, manifest, buffer=buffer)

    def newest(self, level: Level = "Sizes") -> tuple[Checkpoint | None, list[str]]:
        """The newest valid checkpoint of the lineage, and why newer ones were passed over."""
        choice = self.choose(level)
        passed_over = [f"{one.name}: {one.why}" for one in choice.passed_over]
        return (self.load(choice.name, level) if choice.name else None), passed_over


def open_checkpoint(path: Path, level: Level = "Sizes", *, buffer: bool = True) -> Checkpoint:
    """The checkpoint in a directory, wherever it is. Raises InvalidCheckpointError."""
    return RunDirectory(path.parent).load(path.name, level, buffer=buffer)


def read_checkpoint(path: Path) -> Checkpoint | str:
    """The checkpoint in a directory, or what is wrong with it."""
    try:
        return open_checkpoint(path)
    except InvalidCheckpointError as err:
        return str(err)


def write_json(path: Path, data: Any) -> None:
    """Replace a small JSON file in one step, so that a reader never sees half of it."""
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_text(json.dumps(data, indent=2) + "\n")
    tmp.replace(path)


def _with_state(files: Files, path: Path, name: str, manifest: Manifest, *, buffer: bool) -> Checkpoint:
    def read(file: str) -> bytes:
        return files.read(f"{name}/{file}", manifest.files[file].size)

    file = collector_files.COLLECTOR
    try:
        collector = collector_files.from_files(read, manifest.files, buffer=buffer)
    except OSError as err:
        raise InvalidCheckpointError(name, err.filename or file, err.strerror or str(err)) from err
    except (ValueError, KeyError, RecursionError) as err:
        raise InvalidCheckpointError(name, file, f"is malformed: {err}") from err
    state = dict(manifest.state) if collector is None else {**manifest.state, "collector": collector}
    return Checkpoint(path, manifest.step, manifest.token, state, manifest)


def _reason(err: OSError) -> str:
    return f"{err.filename}: {err.strerror or err}" if err.filename else str(err.strerror or err)
