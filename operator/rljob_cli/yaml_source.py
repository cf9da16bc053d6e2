"""YAML with the place of every field, read without ever doing more work than the text is worth.

A parser's events are taken one by one, without recursion: deep nesting, aliases that multiply themselves, huge numbers and
foreign tags end as a SourceError with line and column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

#: More than any manifest that the API server takes.
MAX_BYTES = 4 * 2**20
MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_DIGITS = 40

Path = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_STRINGS = frozenset({f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value", f"{_TAG}binary"})
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class SourceError(ValueError):
    """The text can't be read as manifests; the message begins with line and column where there is one."""


@dataclass(frozen=True)
class Place:
    """Line and column, from 1."""

    line: int
    column: int


@dataclass
class Document:
    """One document: plain values, and where each field stands."""

    value: Any
    places: dict[Path, Place] = field(default_factory=dict)
    repeated: list[Path] = field(default_factory=list)
    """Keys that are given twice; the last one counts, as in kubectl."""

    def place(self, path: Path) -> Place:
        """Where a field is, or the nearest block around it that is written down."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(1, 1))


@dataclass
class _Node:
    """A value in the making, with what it would cost to walk through it."""

    value: Any
    place: Place
    size: int = 1
    height: int = 0
    key: Any = None
    waiting: bool = False
    anchor: str | None = None
    merged: dict[str, Any] = field(default_factory=dict)


def read_documents(text: str) -> Iterator[Document]:
    """All documents of a text. Raises SourceError."""
    if len(text) > MAX_BYTES:
        raise SourceError(f"the text has more than {MAX_BYTES} characters")
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            document = builder.take(event)
            if document is not None:
                yield document
    except yaml.MarkedYAMLError as error:
        where = f"{error.problem_mark.line + 1}:{error.problem_mark.column + 1}: " if error.problem_mark else ""
        raise SourceError(f"{where}not YAML: {' '.join(str(error.problem or error.context).split())}") from None
    except yaml.YAMLError as error:
        raise SourceError(f"not YAML: {' '.join(str(error).split())[:200]}") from None
    except RecursionError:
        raise SourceError(f"nested more than {MAX_DEPTH} levels deep") from None


class _Builder:
    """Puts values together from events."""

    def __init__(self) -> None:
        self._resolve: Any = Resolver().resolve
        self._constructor = SafeConstructor()
        self._start()

    def _start(self) -> None:
        self._open: list[_Node] = []
        self._anchors: dict[str, _Node | None] = {}
        self._document = Document(None)
        self._nodes = 0
        self._root: Path = ()

    def take(self, event: Any) -> Document | None:
        """One event; the document when it is the end of one."""
        match event:
            case yaml.DocumentStartEvent():
                self._start()
            case yaml.DocumentEndEvent():
                return self._document
            case yaml.MappingStartEvent():
                self._push(_Node({}, _place(event), anchor=event.anchor), event)
            case yaml.SequenceStartEvent():
                self._push(_Node([], _place(event), anchor=event.anchor), event)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self._pop()
            case yaml.ScalarEvent():
                node = _Node(self._scalar(event), _place(event), anchor=event.anchor)
                self._anchor(node)
                self._add(node, merge=event.implicit[0] and event.value == "<<")
            case yaml.AliasEvent():
                self._alias(event)
        return None

    def _push(self, node: _Node, event: Any) -> None:
        if event.tag not in {None, "!", f"{_TAG}map", f"{_TAG}seq"}:
            raise _fail(node.place, f"the tag {event.tag} is not plain YAML")
        if self._open and isinstance(self._open[-1].value, dict) and not self._open[-1].waiting:
            raise _fail(node.place, "a key has to be a word or a number")
        if len(self._open) >= MAX_DEPTH:
            raise _fail(node.place, f"nested more than {MAX_DEPTH} levels deep")
        if node.anchor is not None:
            self._anchors[node.anchor] = None  # not finished: an alias to it would never end
        self._open.append(node)

    def _pop(self) -> None:
        node = self._open.pop()
        if node.merged:
            node.value = {**node.merged, **node.value}
        self._anchor(node)
        self._add(node)

    def _anchor(self, node: _Node) -> None:
        if node.anchor is not None:
            self._anchors[node.anchor] = node

    def _alias(self, event: Any) -> None:
        place, target = _place(event), self._anchors.get(event.anchor)
        if event.anchor not in self._anchors:
            raise _fail(place, f"the alias *{event.anchor} has no anchor")
        if target is None:
            raise _fail(place, f"the alias *{event.anchor} stands inside its own anchor")
        if len(self._open) + target.height > MAX_DEPTH:
            raise _fail(place, f"nested more than {MAX_DEPTH} levels deep")
        self._add(_Node(target.value, place, target.size, target.height))

    def _add(self, node: _Node, *, merge: bool = False) -> None:
        """Put a finished value where it belongs: into the open block, or as the document itself."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _fail(node.place, f"more than {MAX_NODES} values")
        if not self._open:
            self._document.value = node.value
            self._document.places[()] = node.place
            return
        parent = self._open[-1]
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)
        if parent.size > MAX_NODES:
            raise _fail(node.place, f"aliases multiply to more than {MAX_NODES} values")
        if isinstance(parent.value, list):
            self._remember(len(parent.value), node.place)
            parent.value.append(node.value)
        elif not parent.waiting:
            parent.key, parent.waiting = ("<<" if merge else _key(node)), True
            if merge:
                parent.key = _MERGE
            elif parent.key in parent.value:
                self._document.repeated.append((*self._path(), parent.key))
            if not merge:
                self._remember(parent.key, node.place)
        else:
            parent.waiting = False
            if parent.key is _MERGE:
                self._merge(parent, node)
            else:
                parent.value[parent.key] = node.value

    def _merge(self, parent: _Node, node: _Node) -> None:
        sources = node.value if isinstance(node.value, list) else [node.value]
        if not all(isinstance(source, dict) for source in sources):
            raise _fail(node.place, "<< takes a block or a list of blocks")
        for source in reversed(sources):
            parent.merged.update(source)

    def _path(self) -> Path:
        return tuple(len(node.value) if isinstance(node.value, list) else str(node.key) for node in self._open[:-1])

    def _remember(self, step: str | int, place: Place) -> None:
        self._document.places[(*self._path(), step)] = place

    def _scalar(self, event: Any) -> Any:
        place, text = _place(event), event.value
        tag = event.tag
        if tag is None or tag == "!":
            tag = str(self._resolve(yaml.ScalarNode, text, event.implicit)) if tag is None else f"{_TAG}str"
        if tag in _STRINGS or (tag == f"{_TAG}int" and ":" in text) or (tag == f"{_TAG}float" and ":" in text):
            return text
        if tag == f"{_TAG}merge":
            return text
        if len(text) > MAX_DIGITS and tag in {f"{_TAG}int", f"{_TAG}float"}:
            raise _fail(place, f"a number of {len(text)} characters")
        constructor = SafeConstructor.yaml_constructors.get(tag)
        if constructor is None or not tag.startswith(_TAG) or tag in {f"{_TAG}map", f"{_TAG}seq"}:
            raise _fail(place, f"the tag {tag} is not plain YAML")
        try:
            return constructor(self._constructor, yaml.ScalarNode(tag, text))
        except (ValueError, KeyError, IndexError, ConstructorError):
            raise _fail(place, f"{text[:40]!r} is no {tag.removeprefix(_TAG)}") from None


_MERGE = object()


def _key(node: _Node) -> str:
    if isinstance(node.value, dict | list):
        raise _fail(node.place, "a key has to be a word or a number")
    if isinstance(node.value, bool):
        return str(node.value).lower()
    return "null" if node.value is None else str(node.value)


def _place(event: Any) -> Place:
    return Place(event.start_mark.line + 1, event.start_mark.column + 1)


def _fail(place: Place, problem: str) -> SourceError:
    return SourceError(f"{place.line}:{place.column}: {problem}")
