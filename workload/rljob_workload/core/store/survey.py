"""Which checkpoint a resume reads: the newest valid one on the lineage of the newest token. What is passed over is named."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from rljob_workload.core.store.errors import CheckpointError, InvalidCheckpointError
from rljob_workload.core.store.fence import Fence, Owner, read_fence
from rljob_workload.core.store.filesystem import Files, entries_or_none
from rljob_workload.core.store.lineage import Lineage, Name, lineage_of
from rljob_workload.core.store.manifest import Manifest, read_manifest
from rljob_workload.core.store.verify import Level, verified_level, verify


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that is not read."""

    name: str
    why: str
    #: False: another writer's, which was overtaken; its content was not looked at.
    on_lineage: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """What a resume goes on from."""

    #: The checkpoint's name; None: from scratch.
    name: str | None
    manifest: Manifest | None
    #: How it was verified.
    level: Level
    #: Newest first.
    passed_over: tuple[PassedOver, ...]
    fence: Fence


@dataclass(frozen=True, slots=True)
class Judged:
    """One directory that is named like a checkpoint."""

    name: Name
    on_lineage: bool
    #: None when it has none that can be read.
    manifest: Manifest | None
    level: Level
    valid: bool
    #: Why it is not valid, or not read; "" otherwise.
    why: str


def choose(
    files: Files, level: Level, unloadable: Collection[str], check: Callable[[str, Manifest], None], taker: Owner | None
) -> Choice:
    """The newest valid checkpoint on the lineage; what is `unloadable` is passed over, and read wholly to say what is wrong.

    `check` raises InvalidCheckpointError for one that its reader does not take. A `taker` that has already taken a token and
    saved nothing chooses as if it had not: its earlier choice narrows nothing.

    Raises CheckpointError when the directory or the fence cannot be read.
    """
    fence = read_fence(files)
    lineage = _lineage_for(files, fence, taker)
    passed_over: list[PassedOver] = []
    for name in candidates(files):
        if not lineage.admits(name):
            passed_over.append(PassedOver(str(name), lineage.why_not(name), on_lineage=False))
            continue
        failed = str(name) in unloadable
        try:
            manifest = verify(files, str(name), "Full" if failed else level)
            check(str(name), manifest)
        except InvalidCheckpointError as err:
            passed_over.append(PassedOver(str(name), err.why))
            continue
        if failed:
            passed_over.append(PassedOver(str(name), "an attempt could not load it, though every byte is as it was written"))
            continue
        return Choice(str(name), manifest, verified_level(manifest, level), tuple(passed_over), fence)
    return Choice(None, None, level, tuple(passed_over), fence)


#: Said of a whole checkpoint where there is no lineage to judge it by.
UNTOLD = "whole; whether a resume may read it only the fence can tell"


def judge_all(files: Files, level: Level, lineage: Lineage | None) -> list[Judged]:
    """All of them, newest first; without a lineage none may be read, and each is looked at all the same."""
    return [_judge(files, name, lineage, level) for name in candidates(files)]


def _judge(files: Files, name: Name, lineage: Lineage | None, level: Level) -> Judged:
    on_lineage = lineage is not None and lineage.admits(name)
    why = "" if on_lineage else UNTOLD if lineage is None else lineage.why_not(name)
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(files, str(name))
        verify(files, str(name), level)
    except InvalidCheckpointError as err:
        return Judged(name, on_lineage, manifest, level, valid=False, why=err.why)
    return Judged(name, on_lineage, manifest, verified_level(manifest, level), valid=True, why=why)


def _lineage_for(files: Files, fence: Fence, taker: Owner | None) -> Lineage:
    saved = {name.token for name in candidates(files)}
    return lineage_of(entry for entry in fence.entries if entry.token in saved or entry.owner != taker)


def candidates(files: Files) -> list[Name]:
    """Whatever is named like a checkpoint, newest first. Raises CheckpointError."""
    try:
        found = entries_or_none(files, "")
    except OSError as err:
        raise CheckpointError(f"cannot read the run's directory: {err.filename}: {err.strerror or err}") from err
    return sorted((name for text in found if (name := Name.parse(text))), reverse=True)
