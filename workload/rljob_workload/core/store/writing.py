"""Writing and deleting, in an order in which a stop between any two operations leaves the newest checkpoint chosen.

Publishing: files, manifest, directories, rename. Deleting: rename aside, look at the fence once more, then remove. A check
before an operation is never enough on its own, since a writer may pause between the two; see `store.lineage` for what makes
a late rename harmless, and `_remove` for a late deletion.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_workload.core.store import collector_files
from rljob_workload.core.store.errors import CheckpointError, FencedError, InvalidCheckpointError
from rljob_workload.core.store.fence import CLAIMS, TEMPORARY, Fence, Owner, read_fence
from rljob_workload.core.store.filesystem import Files, Kind, entries_or_none, exists, remove_tree, walk, write_durably
from rljob_workload.core.store.lineage import Name
from rljob_workload.core.store.manifest import MANIFEST, Facts, File, Manifest, encode
from rljob_workload.core.store.survey import candidates
from rljob_workload.core.store.verify import verify

_COLLECTOR = "collector"
_UNFINISHED = re.compile(re.escape(TEMPORARY) + r"(?:gone-t(\d{6,12})-)?step-\d{6,12}-t(\d{6,12})")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a manifest says of where a checkpoint comes from."""

    writer: Owner = field(default_factory=Owner)
    #: The checkpoint that the weights descend from.
    parent: str | None = None
    facts: Facts = field(default_factory=dict)
    fingerprint: Mapping[str, Any] | None = None
    weight_digest: str | None = None
    #: SHA-256 of files whose writer knows it, by path below the checkpoint; the others are read once more.
    digests: Mapping[str, str] = field(default_factory=dict)


def begin(files: Files, name: Name) -> str:
    """Make the directory to write into; a failed earlier try of the same token goes."""
    temporary = f"{TEMPORARY}{name}"
    try:
        read_fence(files).require(name.token)
        if exists(files, temporary):
            remove_tree(files, temporary)
        files.make_directory(temporary)
    except OSError as err:
        raise CheckpointError(f"cannot write the checkpoint {name}: {err.filename}: {err.strerror or err}") from err
    return temporary


def publish(files: Files, temporary: str, name: Name, state: Mapping[str, Any], origin: Origin) -> Manifest:
    """Make a written directory the checkpoint of that name. Raises OSError, CheckpointError, FencedError."""
    for file, data in collector_files.to_files(state[_COLLECTOR]).items() if state.get(_COLLECTOR) is not None else ():
        files.write_new(f"{temporary}/{file}", data)
    found, directories = {}, [temporary]
    for path, kind in walk(files, temporary):
        below = path[len(temporary) + 1 :]
        if kind is Kind.DIRECTORY:
            directories.append(path)
        elif kind is Kind.FILE:
            files.sync(path)
            digest = origin.digests.get(below) or files.digest(path)
            found[below] = File(size=files.stat(path).size, sha256=digest)
        else:
            raise CheckpointError(f"{path} is {kind.value}; it cannot be part of a checkpoint")
    if unknown := set(origin.digests) - set(found):
        raise CheckpointError(f"a digest is given for {min(unknown)}, which was not written")
    manifest = Manifest(
        step=name.step,
        token=name.token,
        writer=origin.writer,
        parent=origin.parent,
        files=found,
        facts=dict(origin.facts),
        fingerprint=dict(origin.fingerprint) if origin.fingerprint is not None else None,
        weight_digest=origin.weight_digest,
        state={key: value for key, value in state.items() if key != _COLLECTOR},
    )
    write_durably(files, f"{temporary}/{MANIFEST}", encode(manifest))
    for directory in reversed(directories):
        files.sync(directory)
    read_fence(files).require(name.token)
    files.rename(temporary, str(name))
    files.sync("")
    return manifest


def discard(files: Files, temporary: str) -> None:
    """Give back the room that an unfinished checkpoint takes. The next attempt does it otherwise, so failing is no error."""
    with contextlib.suppress(OSError):
        remove_tree(files, temporary)


def prune(files: Files, keep_last: int, token: int | None) -> list[str]:
    """Remove what is not needed any more; see `RunDirectory.prune`."""
    fence = read_fence(files)
    _require(fence, token)
    valid = [name for name in candidates(files) if _valid(files, name)]
    read = [name for name in valid if fence.lineage.admits(name)]
    if fence.entries and not any(name.token == token for name in read):
        return []
    doomed = read[max(1, keep_last) :] + [name for name in valid if not fence.lineage.admits(name)]
    for name in sorted(doomed):
        _remove(files, name, token)
    return [str(name) for name in sorted(doomed)]


def remove_unfinished(files: Files, token: int | None) -> list[str]:
    """Remove what writers of older tokens left; without any tokens, what anybody left."""
    fence = read_fence(files)
    _require(fence, token)
    removed = []
    for text in sorted(entries_or_none(files, "")):
        match = _UNFINISHED.fullmatch(text)
        if match is None or (token is not None and int(match[1] or match[2]) >= token):
            continue
        _require(read_fence(files), token)
        remove_tree(files, text)
        removed.append(text)
    for text in sorted(entries_or_none(files, CLAIMS)):
        if text.startswith(TEMPORARY):  # whoever was about to take a token there tries again
            remove_tree(files, f"{CLAIMS}/{text}")
    return removed


def restore(files: Files, name: str) -> None:
    """Bring back a checkpoint that an overtaken writer was about to delete, if that is so. For the holder of a newer token."""
    if exists(files, name):
        return
    for text in entries_or_none(files, ""):
        if text.startswith(f"{TEMPORARY}gone-t") and text.endswith(f"-{name}") and _UNFINISHED.fullmatch(text):
            files.rename(text, name)
            files.sync("")
            return


def _require(fence: Fence, token: int | None) -> None:
    if token is not None:
        fence.require(token)
    elif fence.entries:
        raise CheckpointError("this directory has tokens; only the holder of the newest one may remove anything")


def _remove(files: Files, name: Name, token: int | None) -> None:
    """Delete one checkpoint, unless a newer token turns up.

    Between looking at the fence and deleting, a new attempt may choose this very checkpoint. So it is first renamed aside,
    which can be undone, and then the fence is read. The new attempt takes its token first and then looks whether its
    checkpoint is still there (`restore`): whichever of the two is later sees the other.
    """
    _require(read_fence(files), token)
    aside = f"{TEMPORARY}gone-t{token or name.token:06d}-{name}"
    files.rename(str(name), aside)
    files.sync("")
    try:
        _require(read_fence(files), token)
    except FencedError:
        if exists(files, aside):
            files.rename(aside, str(name))
            files.sync("")
        raise
    remove_tree(files, aside)


def _valid(files: Files, name: Name) -> bool:
    try:
        verify(files, str(name), "Sizes")
    except InvalidCheckpointError:
        return False
    return True
