"""A checkpoint as a directory that `from_pretrained` reads: weights, config.json, generation_config.json and where it is from.

Everything is written beside the wanted directory and read back; then one rename makes it visible. A directory that holds
anything else is never written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rljob_workload.core.checkpoint import Checkpoint
from rljob_workload.core.store.manifest import Manifest
from rljob_workload.core.weight_digest import WEIGHTS
from rljob_workload.data.builtin import BUILTIN_TASKS, load_builtin
from rljob_workload.huggingface import card, tensors
from rljob_workload.huggingface.architecture import Architecture, architecture, config
from rljob_workload.huggingface.errors import ExportError
from rljob_workload.huggingface.mapping import pack, unpack
from rljob_workload.huggingface.names import Entry, table

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Bytes of one weights file, about: so much memory an export takes, twice.
SHARD_BYTES = 2**31
#: What makes a directory one of ours: where it is from, and every file of it with its digest.
RECORD = "rljob-export.json"
_INDEX = "model.safetensors.index.json"

#: Told the bytes done and all bytes.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export came to."""

    directory: Path
    architecture: Architecture
    parameters: int
    #: Whether it was there already, whole.
    already: bool


def export(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: str = "float32",
    max_length: int | None = None,
    progress: Progress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write a (verified) checkpoint's model to a directory that does not exist, is empty, or holds this very export.

    Raises ExportError.
    """
    manifest = checkpoint.manifest
    if manifest is None:
        raise ExportError(f"{checkpoint.path} has no manifest")
    of = architecture(manifest.facts, max_length)
    saved = tensors.SavedWeights(checkpoint.path / WEIGHTS)
    entries = _resolve(table(of), saved.known)
    parameters = sum(_parameters(entry) for entry in entries.values())
    source = card.source_of(checkpoint, manifest, of, dtype)
    if _is_there(directory, source):
        return Exported(directory, of, parameters, already=True)
    try:
        with _beside(directory) as partial:
            files = _write_weights(of, saved, entries, partial, DTYPES[dtype], shard_bytes, progress)
            texts = {
                "config.json": _json(config(of, dtype=dtype, special=_special(manifest))),
                "generation_config.json": _json({**_special(manifest), "do_sample": True}),
                "README.md": card.readme(source, of, parameters),
            }
            for name, text in texts.items():
                _write_text(partial / name, text)
            record = {"source": source, "files": files | dict.fromkeys(texts)}
            _write_text(partial / RECORD, _json(record))
            _publish(partial, directory)
    except OSError as err:
        raise ExportError(f"cannot write {err.filename or directory}: {err.strerror or err}") from err
    return Exported(directory, of, parameters, already=False)


# ---- weights ----------------------------------------------------------------------------------


def _resolve(entries: Sequence[Entry], known: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Entry]:
    """The entries by the name that the checkpoint has for them; every tensor has to have one."""
    found: dict[str, Entry] = {}
    for entry in entries:
        names = [name for name in entry.names if name in known]
        if len(names) != 1:
            raise ExportError(f"the checkpoint has {len(names)} tensors called {' or '.join(entry.names)}; one is needed")
        size, (rows, *columns) = entry.size, known[names[0]][0]
        if tuple(columns) != size[1:] or (rows < size[0] if entry.how.value == "vocabulary" else rows != size[0]):
            raise ExportError(f"{names[0]} has the size {(rows, *columns)}; a model of these sizes has {size}")
        found[names[0]] = entry
    unknown = sorted(known.keys() - found.keys())
    if unknown:
        raise ExportError(f"no place in the architecture for {', '.join(unknown[:3])}" + (" ..." if unknown[3:] else ""))
    return found


def _parameters(entry: Entry) -> int:
    return torch.Size(entry.size).numel()


def _write_weights(
    of: Architecture,
    saved: tensors.SavedWeights,
    entries: Mapping[str, Entry],
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    progress: Progress,
) -> dict[str, str]:
    """The weights files and their index; each is read back and compared. Returns SHA-256 by name."""
    shards = _shards(entries, shard_bytes, dtype.itemsize)
    total = sum(_parameters(entry) for entry in entries.values()) * dtype.itemsize
    done, digests, where = 0, dict[str, str](), dict[str, str]()
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        loaded = {name: tensor.to(dtype) for name, tensor in saved.load(names).items()}
        parts = {key: part for name in names for key, part in unpack(of, entries[name], loaded[name]).items()}
        digests[file] = tensors.write(directory / file, parts)
        _compare(of, {name: (entries[name], loaded[name]) for name in names}, directory / file)
        where |= dict.fromkeys(parts, file)
        done += sum(_parameters(entries[name]) for name in names) * dtype.itemsize
        progress(done, total)
    if len(shards) > 1:
        _write_text(directory / _INDEX, _json({"metadata": {"total_size": total}, "weight_map": where}))
        digests[_INDEX] = tensors.digest(directory / _INDEX)
    return digests


def _shards(entries: Mapping[str, Entry], limit: int, itemsize: int) -> list[list[str]]:
    """The tensors in order, cut into files of at most so many bytes (a larger tensor is a file of its own)."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, entry in entries.items():
        size = _parameters(entry) * itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _compare(of: Architecture, written: Mapping[str, tuple[Entry, Tensor]], file: Path) -> None:
    """What is on the disk, packed as Megatron has it, is the checkpoint bit for bit."""
    found = tensors.read(file)
    for name, (entry, whole) in written.items():
        packed = pack(of, entry, [found[part] for part in entry.parts])
        if not torch.equal(packed, whole[: entry.size[0]]):
            raise ExportError(f"{file} read back is not the checkpoint's {name}; the disk, or this program, is faulty")


# ---- files ------------------------------------------------------------------------------------


def _special(manifest: Manifest) -> dict[str, int | None]:
    """Ids of the task's special tokens; nothing where the data brings no tokenizer of ours."""
    kind, _, name = str(manifest.facts.get("spec.data", "")).partition(" ")
    if kind != "builtin" or name not in BUILTIN_TASKS:
        return {}
    task = load_builtin(name)
    return {"pad_token_id": task.tokenizer.pad, "bos_token_id": task.tokenizer.bos, "eos_token_id": task.eos}


def _is_there(directory: Path, source: Mapping[str, Any]) -> bool:
    """Whether the directory holds this export. Raises ExportError when it holds anything else."""
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ExportError(f"{directory} is no directory; choose another")
    present = {path.name for path in directory.iterdir()}
    if not present:
        return False
    try:
        record = json.loads((directory / RECORD).read_text())
        there, files = record["source"], record["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ExportError(f"{directory} holds files that no export has written; choose an empty or new directory") from None
    if there != source:
        differs = ", ".join(key for key in source if not isinstance(there, dict) or there.get(key) != source[key])
        raise ExportError(f"{directory} holds an export with another {differs}; remove it or choose another directory")
    missing = sorted(set(files) - present)
    if missing:
        raise ExportError(f"{directory} has lost {', '.join(missing)}; remove it and export again")
    for name, digest in files.items():
        if digest is not None and tensors.digest(directory / name) != digest:
            raise ExportError(f"{directory / name} was changed after its export; remove the directory and export again")
    return True


@contextlib.contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """An empty directory on the same file system, for one process; gone afterwards unless it was renamed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.parent / f".{directory.name}.rljob-partial"
    partial.mkdir(exist_ok=True)
    held = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(f"another export into {directory} is going on; wait for its end") from None
        for left in partial.iterdir():  # by one that was killed
            left.unlink()
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(held)


def _publish(partial: Path, directory: Path) -> None:
    _sync(partial)
    try:
        partial.rename(directory)  # over an empty directory at most
    except OSError as err:
        raise ExportError(f"cannot put the export at {directory}: {err.strerror}; choose another directory") from err
    _sync(directory.parent)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
