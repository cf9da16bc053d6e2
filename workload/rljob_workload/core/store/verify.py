"""Whether a directory is the checkpoint that its manifest describes: nothing missing, nothing else in it, the same bytes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from rljob_workload.core.store.errors import InvalidCheckpointError
from rljob_workload.core.store.filesystem import Files, Kind, walk
from rljob_workload.core.store.manifest import MANIFEST, Manifest, read_manifest

#: Sizes of all files and the bytes of small ones, or the bytes of all.
Level = Literal["Sizes", "Full"]
#: Files up to this many bytes are read at level Sizes too: ledgers, random states, the index of the weights.
SMALL_BYTES = 2**20
#: What NFS makes of a file that is removed while somebody has it open.
_OF_THE_VOLUME = ".nfs"


def verify(files: Files, checkpoint: str, level: Level) -> Manifest:
    """The manifest of a checkpoint that is what it says. Raises InvalidCheckpointError naming file and field."""
    manifest = read_manifest(files, checkpoint)
    missing = set(manifest.files) - _present(files, checkpoint, manifest)
    if missing:
        raise InvalidCheckpointError(checkpoint, min(missing), "is missing; the manifest names it")
    for path, told in sorted(manifest.files.items()):
        if told.sha256 is None or (level == "Sizes" and told.size > SMALL_BYTES):
            continue
        try:
            found = files.digest(f"{checkpoint}/{path}" if checkpoint else path)
        except OSError as err:
            raise InvalidCheckpointError(checkpoint, path, err.strerror or str(err)) from err
        if found != told.sha256:
            problem = f"has SHA-256 {found[:12]}..., the manifest says {told.sha256[:12]}..."
            raise InvalidCheckpointError(checkpoint, path, problem, "sha256")
    return manifest


def verified_level(manifest: Manifest, level: Level) -> Level:
    """How a checkpoint was verified: one without digests can only have its sizes compared."""
    return level if all(file.sha256 is not None for file in manifest.files.values()) else "Sizes"


def _present(files: Files, checkpoint: str, manifest: Manifest) -> set[str]:
    """Files that are there with their sizes. Raises for what does not belong there."""
    present: set[str] = set()
    folders = {str(folder) for path in manifest.files for folder in PurePosixPath(path).parents}
    prefix = f"{checkpoint}/" if checkpoint else ""
    try:
        for path, kind in walk(files, checkpoint):
            below = path[len(prefix) :]
            if below == MANIFEST or below.rpartition("/")[2].startswith(_OF_THE_VOLUME):
                continue
            if kind is Kind.DIRECTORY:
                if below not in folders:
                    problem = (
                        "is a directory, expected a file" if below in manifest.files else "the manifest has nothing below it"
                    )
                    raise InvalidCheckpointError(checkpoint, below, problem)
                continue
            if kind is Kind.OTHER:
                raise InvalidCheckpointError(checkpoint, below, f"is {kind.value}")
            told = manifest.files.get(below)
            if told is None:
                raise InvalidCheckpointError(checkpoint, below, "the manifest does not name it")
            size = files.stat(path).size
            if size != told.size:
                raise InvalidCheckpointError(checkpoint, below, f"has {size} bytes, the manifest says {told.size}", "size")
            present.add(below)
    except OSError as err:
        where = (err.filename or checkpoint).removeprefix(prefix)
        raise InvalidCheckpointError(checkpoint, where, err.strerror or str(err)) from err
    return present
