"""A file system in memory that can lose power between any two operations, and be used by two processes in any order.

What was not synced may or may not have reached the disk, each operation by itself: the entries of a directory until the
directory is synced, a file's bytes until the file is. A rename within a directory is one operation. Without that freedom a test
would pass with every sync left out.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rljob_workload.core.store.filesystem import Files, Kind, Stat, components

#: Up to this many unsynced operations all subsets are tried; above, each alone, all but each, and all beginnings and ends.
ALL_SUBSETS = 9


class StoppedError(BaseException):
    """The machine has lost its power; no `except Exception` may go on."""


@dataclass
class Node:
    """A file, if `data` is not None, or a directory."""

    data: bytes | None = None
    entries: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pending:
    """One operation that has not reached the disk for certain. `target` is the inode whose sync settles it."""

    target: int
    bytes_: bytes | None = None
    removed: str | None = None
    added: str | None = None
    node: int = 0


class VolatileFiles:
    """`Files` in memory."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {0: Node()}
        self.disk: dict[int, Node] = {0: Node()}
        self.pending: list[Pending] = []
        self.operations = 0
        #: Mutating operations before the power goes; None: it stays.
        self.power: int | None = None
        #: Mutating operations before the volume is full; None: it never is.
        self.room: int | None = None

    # ---- reading

    def entries(self, path: str) -> dict[str, Kind]:
        node = self._node(path)
        if node.data is not None:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
        return {name: self._kind(inode) for name, inode in node.entries.items()}

    def stat(self, path: str) -> Stat:
        node = self._node(path)
        return Stat(Kind.DIRECTORY if node.data is None else Kind.FILE, len(node.data or b""))

    def read(self, path: str, limit: int) -> bytes:
        data = self._node(path).data
        if data is None:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
        if len(data) > limit:
            raise OSError(errno.EFBIG, f"more than {limit} bytes", path)
        return data

    def digest(self, path: str) -> str:
        return hashlib.sha256(self.read(path, 2**40)).hexdigest()

    # ---- writing

    def write_new(self, path: str, data: bytes) -> None:
        self._count()
        self._need_room(path)
        above, name = self._parent(path)
        if name in self.nodes[above].entries:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        inode = self._new(Node(data))
        self.nodes[above].entries[name] = inode
        self.pending += [Pending(above, added=name, node=inode), Pending(inode, bytes_=data)]

    def sync(self, path: str) -> None:
        self._count()
        inode = self._inode(path)
        self._settle(self.disk, [one for one in self.pending if one.target == inode])
        self.pending = [one for one in self.pending if one.target != inode]

    def make_directory(self, path: str) -> None:
        self._count()
        self._need_room(path)
        above, name = self._parent(path)
        if name in self.nodes[above].entries:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        inode = self._new(Node())
        self.nodes[above].entries[name] = inode
        self.pending.append(Pending(above, added=name, node=inode))

    def rename(self, old: str, new: str) -> None:
        self._count()
        (above, name), (target, new_name) = self._parent(old), self._parent(new)
        assert above == target, "the store renames within a directory only"
        inode = self._inode(old)
        there = self.nodes[target].entries.get(new_name)
        if there is not None and self.nodes[there].data is None and self.nodes[there].entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", new)
        del self.nodes[above].entries[name]
        self.nodes[target].entries[new_name] = inode
        self.pending.append(Pending(above, removed=name, added=new_name, node=inode))

    def remove_file(self, path: str) -> None:
        self._remove(path)

    def remove_directory(self, path: str) -> None:
        if self._node(path).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        self._remove(path)

    # ---- loss of power

    def clone(self) -> VolatileFiles:
        """The same state, to be changed by itself."""
        other = VolatileFiles()
        other.nodes, other.disk = _copied(self.nodes), _copied(self.disk)
        other.pending = list(self.pending)
        return other

    def settled(self) -> VolatileFiles:
        """Everything on disk, nothing counted: a state to begin from."""
        self._settle(self.disk, self.pending)
        self.pending = []
        self.operations = 0
        return self

    def after_power_loss(self) -> Iterator[VolatileFiles]:
        """Every state that may be found when the power is back."""
        seen = set()
        for kept in _subsets(len(self.pending)):
            found = VolatileFiles()
            found.nodes = _copied(self.disk)
            _forget_bytes(found.nodes, [one for index, one in enumerate(self.pending) if index not in kept])
            self._settle(found.nodes, [one for index, one in enumerate(self.pending) if index in kept])
            picture = found.picture()
            if picture not in seen:
                seen.add(picture)
                found.disk = _copied(found.nodes)
                yield found

    def picture(self, path: str = "") -> tuple[tuple[str, bytes | None], ...]:
        """All paths with their bytes."""
        found: list[tuple[str, bytes | None]] = []
        for name, inode in sorted(self._node(path).entries.items()):
            below = f"{path}/{name}" if path else name
            found.append((below, self.nodes[inode].data))
            if self.nodes[inode].data is None:
                found += self.picture(below)
        return tuple(found)

    # ---- inside

    def _settle(self, nodes: dict[int, Node], operations: list[Pending]) -> None:
        for one in operations:
            for inode in (one.target, one.node):
                if inode not in nodes:
                    data = self.nodes[inode].data if inode in self.nodes else None
                    nodes[inode] = Node(None if data is None else b"")
            if one.bytes_ is not None:
                nodes[one.target].data = one.bytes_
            if one.removed is not None:
                nodes[one.target].entries.pop(one.removed, None)
            if one.added is not None:
                nodes[one.target].entries[one.added] = one.node

    def _count(self) -> None:
        if self.power is not None and self.operations >= self.power:
            raise StoppedError
        self.operations += 1

    def _need_room(self, path: str) -> None:
        if self.room is not None and self.operations > self.room:
            raise OSError(errno.ENOSPC, "No space left on device", path)

    def _new(self, node: Node) -> int:
        inode = max(self.nodes) + 1
        self.nodes[inode] = node
        return inode

    def _remove(self, path: str) -> None:
        self._count()
        above, name = self._parent(path)
        self._inode(path)
        del self.nodes[above].entries[name]
        self.pending.append(Pending(above, removed=name))

    def _inode(self, path: str) -> int:
        inode = 0
        for name in components(path):
            node = self.nodes[inode]
            if node.data is not None:
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
            if name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            inode = node.entries[name]
        return inode

    def _node(self, path: str) -> Node:
        return self.nodes[self._inode(path)]

    def _parent(self, path: str) -> tuple[int, str]:
        above, _, name = path.rpartition("/")
        return self._inode(above), name

    def _kind(self, inode: int) -> Kind:
        return Kind.DIRECTORY if self.nodes[inode].data is None else Kind.FILE


def _copied(nodes: dict[int, Node]) -> dict[int, Node]:
    return {inode: Node(node.data, dict(node.entries)) for inode, node in nodes.items()}


def _forget_bytes(nodes: dict[int, Node], lost: list[Pending]) -> None:
    """Of bytes that were on their way, the first half arrived: a file that is there and is not whole."""
    for one in lost:
        if one.bytes_ is not None:
            nodes[one.target] = Node(one.bytes_[: len(one.bytes_) // 2])


def _subsets(count: int) -> Iterator[frozenset[int]]:
    every = range(count)
    if count <= ALL_SUBSETS:
        for size in range(count + 1):
            yield from map(frozenset, itertools.combinations(every, size))
        return
    for index in every:
        yield from (frozenset([index]), frozenset(every) - {index}, frozenset(range(index)), frozenset(range(index, count)))
    yield frozenset(every)


# ---- two processes --------------------------------------------------------------------------------


class Turns:
    """Two processes of which one runs at a time; each hands over before one of its operations, reads included."""

    def __init__(self, files: VolatileFiles, first_until: int, second_until: int) -> None:
        self.files = files
        self.budgets: list[float] = [first_until, second_until]
        self.turn = threading.Condition()
        self.whose = 0
        self.over = [False, False]
        #: Operations in their order, by name.
        self.trace: list[str] = []

    def run(self, first: Callable[[Files], object], second: Callable[[Files], object]) -> list[object]:
        """`first` up to its budget of operations, `second` up to its own, then `first` to its end, then `second`.

        Returns what each returned or raised.
        """
        results: list[object] = [None, None]

        def life(me: int, work: Callable[[Files], object]) -> None:
            self._wait(me)
            try:
                results[me] = work(_Turned(self, me))
            except Exception as err:  # noqa: BLE001 - the test looks at it
                results[me] = err
            with self.turn:
                self.over[me] = True
                self._hand_over(me)

        threads = [threading.Thread(target=life, args=(me, work), daemon=True) for me, work in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert all(self.over), "the two processes wait for each other"
        return results

    def before_operation(self, me: int) -> None:
        with self.turn:
            if self.budgets[me] == 0 and not self.over[1 - me]:
                self.budgets[me] = float("inf")
                self._hand_over(me)
                self._await(me)
            self.budgets[me] -= 1

    def _wait(self, me: int) -> None:
        with self.turn:
            self._await(me)

    def _await(self, me: int) -> None:
        if not self.turn.wait_for(lambda: self.whose == me, timeout=60):
            raise TimeoutError

    def _hand_over(self, me: int) -> None:
        if not self.over[1 - me]:
            self.whose = 1 - me
            self.turn.notify_all()


class _Turned:
    """One process's view of the shared files."""

    def __init__(self, turns: Turns, me: int) -> None:
        self._turns = turns
        self._me = me

    def __getattr__(self, name: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self._turns.files, name)

        def turned(*arguments: object) -> object:
            self._turns.before_operation(self._me)
            self._turns.trace.append(name)
            return method(*arguments)

        return turned
