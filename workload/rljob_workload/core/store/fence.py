"""Tokens: who may write in a run's directory, and from which checkpoint each writer went on.

A token is taken by renaming a directory that already holds its entry to `fence/tNNNNNN`. Renaming never replaces a directory
with something in it, so two takers cannot get the same number; it needs neither locks nor links, which many network volumes
lack. `fence.json` lists the entries for people and other tools. Both are read and joined: a crash between them, or two takers
who write the list at the same time, lose nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from rljob_workload.core.store.errors import CheckpointError, FencedError, FenceError
from rljob_workload.core.store.filesystem import Files, entries_or_none, exists, remove_tree, write_durably
from rljob_workload.core.store.lineage import Lineage, Name, lineage_of

FENCE = "fence.json"
CLAIMS = "fence"
FENCE_VERSION = 1
TEMPORARY = ".tmp-"
_CLAIM = re.compile(r"t(\d{6,12})")
_MAX_BYTES = 2**24
#: How often somebody else may take the number that was about to be taken.
_TRIES = 100


class Strict(BaseModel):
    """What all files of the store share: camelCase, nothing unknown, no strings for numbers."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=True)


Text = Annotated[str, Field(max_length=1024)]
Whole = Annotated[int, Field(ge=0, le=2**53)]


class Owner(Strict):
    """One attempt of one job."""

    namespace: Text = ""
    name: Text = ""
    uid: Text = ""
    attempt: Whole = 0

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.namespace}/{self.name} (uid {self.uid})"


class Entry(Owner):
    """One token."""

    token: Annotated[int, Field(ge=1, le=2**53)]
    resumed_from: Text | None = None
    """The checkpoint of this directory that its holder goes on from; None: from scratch, or from `source`."""
    source: Text | None = None
    """Another job's checkpoint that its holder begins with."""
    time: Annotated[str, Field(max_length=64)] = ""
    """When it was taken; for people."""

    @property
    def owner(self) -> Owner:
        """Who holds it."""
        return Owner(namespace=self.namespace, name=self.name, uid=self.uid, attempt=self.attempt)


class _File(Strict):
    version: int
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Fence:
    """All tokens that were ever taken in the directory, oldest first."""

    entries: tuple[Entry, ...] = ()

    @property
    def newest(self) -> Entry | None:
        """Whoever may write."""
        return self.entries[-1] if self.entries else None

    @property
    def lineage(self) -> Lineage:
        """Which checkpoints may be read."""
        return lineage_of(self.entries)

    def require(self, token: int) -> None:
        """Raises FencedError when a newer token has been taken."""
        newest = self.newest
        if newest is not None and newest.token > token:
            raise FencedError(f"token {token} is overtaken: {newest.owner} holds token {newest.token} of this directory")


def read_fence(files: Files) -> Fence:
    """All entries. Raises FenceError for a file that cannot be read: without it nothing can be told apart."""
    found: dict[int, Entry] = {}
    for where, entry in [*_listed(files), *_claimed(files)]:
        if found.setdefault(entry.token, entry) != entry:
            raise FenceError(f"{where}: token {entry.token} stands in {FENCE} with other values; remove the wrong one")
    return Fence(tuple(found[token] for token in sorted(found)))


def take_token(files: Files, owner: Owner, resumed_from: str | None, source: str | None = None, time: str = "") -> Entry:
    """Take the next token for an attempt that goes on from `resumed_from`; the same attempt is given the same one again.

    With another `resumed_from` than before it gets a new one, since the first one's lineage is fixed. Raises FencedError when
    the attempt has been overtaken, CheckpointError when the directory cannot be written.
    """
    try:
        for _ in range(_TRIES):
            fence = read_fence(files)
            mine = _mine(fence, owner)
            if mine is not None and (mine.resumed_from, mine.source) == (resumed_from, source):
                _list(files)
                return mine
            entry = Entry(
                token=_next_token(files, fence), resumed_from=resumed_from, source=source, time=time, **owner.model_dump()
            )
            if _claim(files, entry):
                _list(files)
                return entry
    except OSError as err:
        raise CheckpointError(f"cannot take a token: {err.filename or CLAIMS}: {err.strerror or err}") from err
    raise CheckpointError(f"cannot take a token: others took {_TRIES} numbers first")


def _mine(fence: Fence, owner: Owner) -> Entry | None:
    """The token that this attempt holds. Raises FencedError when it has lost it, or a later attempt has one."""
    newest = fence.newest
    ours = [entry for entry in fence.entries if owner.uid and entry.uid == owner.uid and entry.attempt >= owner.attempt]
    if not ours or newest is None:
        return None
    if newest.owner != owner:
        raise FencedError(f"{owner} is overtaken: {newest.owner} holds token {newest.token} of this directory")
    return newest


def _next_token(files: Files, fence: Fence) -> int:
    """Above all that were taken, and above what checkpoints from before there was a fence carry."""
    names = [name for text in entries_or_none(files, "") if (name := Name.parse(text))]
    return 1 + max([0, *(entry.token for entry in fence.entries), *(name.token for name in names)])


def _claim(files: Files, entry: Entry) -> bool:
    """Whether the number was still free."""
    if not exists(files, CLAIMS):
        with contextlib.suppress(FileExistsError):  # another taker was faster
            files.make_directory(CLAIMS)
    temporary = f"{CLAIMS}/{TEMPORARY}{secrets.token_hex(8)}"
    files.make_directory(temporary)
    try:
        write_durably(files, f"{temporary}/entry.json", _encode(entry.model_dump(by_alias=True)))
        files.sync(temporary)
        files.rename(temporary, f"{CLAIMS}/t{entry.token:06d}")
    except OSError as err:
        if err.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):  # ENOENT: the holder of a token cleaned up
            raise
        if exists(files, temporary):
            remove_tree(files, temporary)
        return False
    files.sync(CLAIMS)
    return True


def _list(files: Files) -> None:
    """Write fence.json anew, if it lacks an entry."""
    fence = read_fence(files)
    if [entry for _, entry in _listed(files)] == list(fence.entries):
        return
    temporary = f"{TEMPORARY}fence-{secrets.token_hex(8)}"
    data = {"version": FENCE_VERSION, "entries": [entry.model_dump(by_alias=True) for entry in fence.entries]}
    write_durably(files, temporary, _encode(data))
    files.rename(temporary, FENCE)
    files.sync("")


def _encode(data: object) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


def _listed(files: Files) -> list[tuple[str, Entry]]:
    try:
        text = files.read(FENCE, _MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as err:
        raise FenceError(f"{FENCE}: {err.strerror or err}") from err
    hint = f"; it can be removed when every token stands in {CLAIMS}/" if exists(files, CLAIMS) else ""
    try:
        parsed = _File.model_validate_json(text)
    except ValidationError as err:
        raise FenceError(f"{FENCE} is malformed: {first_problem(err)}{hint}") from None
    if parsed.version != FENCE_VERSION:
        raise FenceError(f"{FENCE}: field 'version': {parsed.version} is not {FENCE_VERSION}, which this build reads")
    return [(FENCE, entry) for entry in parsed.entries]


def _claimed(files: Files) -> Iterable[tuple[str, Entry]]:
    try:
        names = sorted(name for name in entries_or_none(files, CLAIMS) if _CLAIM.fullmatch(name))
    except OSError as err:
        raise FenceError(f"{CLAIMS}: {err.strerror or err}") from err
    for name in names:
        path, repair = f"{CLAIMS}/{name}/entry.json", f"; {CLAIMS}/{name} can be removed when its token stands in {FENCE}"
        try:
            entry = Entry.model_validate_json(files.read(path, _MAX_BYTES))
        except OSError as err:
            raise FenceError(f"{path}: {err.strerror or err}{repair}") from err
        except ValidationError as err:
            raise FenceError(f"{path} is malformed: {first_problem(err)}{repair}") from None
        if name != f"t{entry.token:06d}":
            raise FenceError(f"{path}: field 'token': {entry.token} is not the number of its directory")
        yield path, entry


def first_problem(error: ValidationError) -> str:
    """The first thing that a file's model does not take, with its field."""
    detail = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, detail["loc"]))
    return f"field {where!r}: {detail['msg']}" if where else detail["msg"]
