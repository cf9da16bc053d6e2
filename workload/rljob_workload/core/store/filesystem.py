"""The few file operations that the store needs, below one directory that nothing leads out of.

Each method is one operation that either happened or did not when the machine stops; whatever needs two of them is built
above, where the tests can stop between them. Paths are relative, with `/`; no component may be `..` or a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

_CHUNK = 2**20


class Kind(Enum):
    """What an entry of a directory is."""

    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "neither a file nor a directory"  # a symbolic link, a pipe, a device


@dataclass(frozen=True, slots=True)
class Stat:
    """Kind and, of a file, size in bytes."""

    kind: Kind
    size: int


class Files(Protocol):
    """Operations below one directory; "" is that directory. All raise OSError with the path in `filename`."""

    def entries(self, path: str) -> dict[str, Kind]:
        """What is in a directory."""

    def stat(self, path: str) -> Stat:
        """What is at a path; a symbolic link is itself, not what it points to."""

    def read(self, path: str, limit: int) -> bytes:
        """A file's bytes; EFBIG when there are more than `limit`."""

    def digest(self, path: str) -> str:
        """SHA-256 of a file, in hexadecimal."""

    def write_new(self, path: str, data: bytes) -> None:
        """Write a file that must not exist; not durable before `sync`."""

    def sync(self, path: str) -> None:
        """Make a file's bytes, or a directory's entries, survive a loss of power."""

    def make_directory(self, path: str) -> None:
        """Make a directory that must not exist."""

    def rename(self, old: str, new: str) -> None:
        """Replaces a file; never replaces a directory that has something in it."""

    def remove_file(self, path: str) -> None:
        """Remove whatever is no directory."""

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""


def components(path: str) -> list[str]:
    """The names in a relative path. Raises OSError (EINVAL) for one that could lead out of the directory."""
    if not path:
        return []
    names = path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise OSError(errno.EINVAL, "not a path below the run's directory", path)
    return names


class OsFiles:
    """The real thing, through directory descriptors: a symbolic link on the way is an error, not a way out."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entries(self, path: str) -> dict[str, Kind]:
        """What is in a directory."""
        with self._directory(path) as handle, os.scandir(handle) as found:
            return {entry.name: _kind_of_entry(entry) for entry in found}

    def stat(self, path: str) -> Stat:
        """What is at a path."""
        with self._parent(path) as (parent, name):
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        return Stat(_kind(found.st_mode), found.st_size)

    def read(self, path: str, limit: int) -> bytes:
        """A file's bytes."""
        with self._file(path) as handle:
            data = bytearray()
            while chunk := os.read(handle, min(_CHUNK, limit + 1 - len(data))):
                data += chunk
                if len(data) > limit:
                    raise OSError(errno.EFBIG, f"more than {limit} bytes")
            return bytes(data)

    def digest(self, path: str) -> str:
        """SHA-256 of a file."""
        with self._file(path) as handle:
            digest = hashlib.sha256()
            while chunk := os.read(handle, _CHUNK):
                digest.update(chunk)
            return digest.hexdigest()

    def write_new(self, path: str, data: bytes) -> None:
        """Write a file that must not exist."""
        with self._parent(path) as (parent, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(name, flags, 0o644, dir_fd=parent)
            with os.fdopen(handle, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]

    def sync(self, path: str) -> None:
        """Flush a file or a directory."""
        if path and self.stat(path).kind is Kind.FILE:
            with self._file(path) as handle:
                os.fsync(handle)
        else:
            with self._directory(path) as handle:
                os.fsync(handle)

    def make_directory(self, path: str) -> None:
        """Make a directory."""
        with self._parent(path) as (parent, name):
            os.mkdir(name, dir_fd=parent)

    def rename(self, old: str, new: str) -> None:
        """Give an entry another name."""
        with self._parent(old) as (old_parent, old_name), self._parent(new) as (new_parent, new_name):
            os.rename(old_name, new_name, src_dir_fd=old_parent, dst_dir_fd=new_parent)

    def remove_file(self, path: str) -> None:
        """Remove whatever is no directory."""
        with self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        with self._parent(path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    @contextlib.contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        with _naming(path or str(self.root)):
            handle = self._open_directory(components(path))
            try:
                yield handle
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        *above, name = components(path) or [""]
        with _naming(path):
            if not name:
                raise OSError(errno.EINVAL, "the run's directory itself")
            handle = self._open_directory(above)
            try:
                yield handle, name
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _file(self, path: str) -> Iterator[int]:
        with self._parent(path) as (parent, name):
            # O_NONBLOCK: a pipe would otherwise wait for a writer that never comes.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(name, flags, dir_fd=parent)
            try:
                kind = _kind(os.fstat(handle).st_mode)
                if kind is not Kind.FILE:
                    number, what = (errno.EISDIR, "a ") if kind is Kind.DIRECTORY else (errno.EINVAL, "")
                    raise OSError(number, f"{what}{kind.value}, expected a file")
                yield handle
            finally:
                os.close(handle)

    def _open_directory(self, names: list[str]) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        # The run's directory itself may be reached over links: where the volume is mounted is not ours to judge.
        handle = os.open(self.root, flags)
        for name in names:
            try:
                below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=handle)
            except NotADirectoryError as err:
                # Also of a link to a directory, for which the system's words alone would be a riddle.
                raise OSError(errno.ENOTDIR, f"{err.strerror}: {name} is a file or a symbolic link") from err
            finally:
                os.close(handle)
            handle = below
        return handle


def make_durable_directory(path: Path) -> None:
    """A directory with all above it, whose entries survive a loss of power."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        handle = os.open(each.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors name the path below the run's directory, not the component that a descriptor knows."""
    try:
        yield
    except OSError as err:
        err.filename, err.filename2 = path, None
        raise


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return Kind.FILE
    return Kind.DIRECTORY if stat.S_ISDIR(mode) else Kind.OTHER


def _kind_of_entry(entry: os.DirEntry[str]) -> Kind:
    if entry.is_file(follow_symlinks=False):
        return Kind.FILE
    return Kind.DIRECTORY if entry.is_dir(follow_symlinks=False) else Kind.OTHER


# ---- built from the operations -------------------------------------------------------------------


def exists(files: Files, path: str) -> bool:
    """Whether anything is at the path."""
    try:
        files.stat(path)
    except FileNotFoundError:
        return False
    return True


def entries_or_none(files: Files, path: str) -> dict[str, Kind]:
    """What is in a directory; nothing when it is missing."""
    try:
        return files.entries(path)
    except FileNotFoundError:
        return {}


def walk(files: Files, path: str) -> Iterator[tuple[str, Kind]]:
    """Everything below a directory with its path from the root, parents first, in the order of names."""
    for name, kind in sorted(files.entries(path).items()):
        below = f"{path}/{name}" if path else name
        yield below, kind
        if kind is Kind.DIRECTORY:
            yield from walk(files, below)


def remove_tree(files: Files, path: str) -> None:
    """A directory with all that is in it; links are removed, not followed."""
    for below, kind in sorted(files.entries(path).items()):
        if kind is Kind.DIRECTORY:
            remove_tree(files, f"{path}/{below}")
        else:
            files.remove_file(f"{path}/{below}")
    files.remove_directory(path)


def write_durably(files: Files, path: str, data: bytes) -> None:
    """A new file whose bytes survive; its name does when its directory is synced."""
    files.write_new(path, data)
    files.sync(path)
