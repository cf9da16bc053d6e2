"""Regular expressions that can't hang: matched in time proportional to pattern times text, whatever they are.

`failurePolicy.rules` bring patterns of users into the operator, where one that backtracks (`(a+)+$`) would stop every job.
The language is that of other tools without what needs backtracking or counting: characters, `.`, `[a-z]`, `[^a-z]`, `\\d`,
`\\w`, `\\s` and their capitals, `( )`, `|`, `*`, `+`, `?`, and `^` and `$` for the text's beginning and end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MAX_TEXT = 4096
"""Characters of a text that are searched: its end, where the newest log lines are."""

_Test = Callable[[str], bool]
_CLASSES: dict[str, _Test] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r"}


class PatternError(ValueError):
    """The pattern is not one of this language; the message says where, what, and what would do."""


@dataclass
class _State:
    """One state: consumes a character that passes `test`, or passes on freely (at the beginning or end of the text only)."""

    test: _Test | None = None
    at: str = ""
    to: list[int] = field(default_factory=list)


class Pattern:
    """A compiled pattern. Raises PatternError."""

    def __init__(self, text: str) -> None:
        self._states: list[_State] = []
        start, ends = _Parser(text, self._states).parse()
        self._accept = len(self._states)
        self._states.append(_State())
        for end in ends:
            self._states[end].to.append(self._accept)
        self._start = start

    def search(self, text: str) -> bool:
        """Whether any part of the text (of its last MAX_TEXT characters) matches."""
        cut = text[-MAX_TEXT:]
        current = self._closure({self._start}, first=True, last=not cut)
        for index, char in enumerate(cut):
            if self._accept in current:
                return True
            moved = {to for one in current if (test := self._states[one].test) and test(char) for to in self._states[one].to}
            moved.add(self._start)
            current = self._closure(moved, first=False, last=index == len(cut) - 1)
        return self._accept in current

    def _closure(self, states: set[int], *, first: bool, last: bool) -> set[int]:
        """Everything reachable without consuming a character."""
        found, todo = set(states), list(states)
        while todo:
            state = self._states[todo.pop()]
            open_ = state.test is None and (not state.at or (state.at == "^" and first) or (state.at == "$" and last))
            for to in state.to if open_ else ():
                if to not in found:
                    found.add(to)
                    todo.append(to)
        return found


_Fragment = tuple[int, list[int]]
"""First state, and the states whose exits are still open."""


class _Parser:
    """Recursive descent; appends states as it goes."""

    def __init__(self, text: str, states: list[_State]) -> None:
        self._text = text
        self._place = 0
        self._states = states

    def parse(self) -> _Fragment:
        fragment = self._alternatives()
        if self._place < len(self._text):
            raise self._wrong("has no ( before it")
        return fragment

    def _alternatives(self) -> _Fragment:
        branches = [self._sequence()]
        while self._peek() == "|":
            self._place += 1
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        fork = self._add(_State(to=[start for start, _ in branches]))
        return fork, [end for _, ends in branches for end in ends]

    def _sequence(self) -> _Fragment:
        start = self._add(_State())
        ends = [start]
        while (char := self._peek()) and char not in "|)":
            first, last = self._repeated()
            for end in ends:
                self._states[end].to.append(first)
            ends = last
        return start, ends

    def _repeated(self) -> _Fragment:
        start, ends = self._atom()
        while (char := self._peek()) and char in "*+?":
            self._place += 1
            fork = self._add(_State(to=[start]))
            if char in "*+":
                for end in ends:
                    self._states[end].to.append(fork)
            start = start if char == "+" else fork
            ends = [*ends, fork] if char == "?" else [fork]
        return start, ends

    def _atom(self) -> _Fragment:
        char = self._text[self._place]
        match char:
            case "(":
                return self._group()
            case "^" | "$":
                self._place += 1
                state = self._add(_State(at=char))
            case "*" | "+" | "?":
                raise self._wrong(f"has nothing before it to repeat; \\{char} matches the character itself")
            case "{" | "}":
                raise self._wrong(
                    f"is not in this language (nothing counts repetitions); \\{char} matches the character itself"
                )
            case _:
                state = self._add(_State(test=self._single()))
        return state, [state]

    def _group(self) -> _Fragment:
        opened = self._place
        self._place += 1
        if self._text.startswith("?:", self._place):
            self._place += 2
        elif self._peek() == "?":
            raise self._wrong("after ( is not in this language; (?:...) or (...) would do")
        fragment = self._alternatives()
        if self._peek() != ")":
            self._place = opened
            raise self._wrong("has no ) after it")
        self._place += 1
        return fragment

    def _single(self) -> _Test:
        """One character's test."""
        char = self._text[self._place]
        self._place += 1
        if char == ".":
            return lambda one: one != "\n"
        if char == "[":
            return self._set()
        if char == "\\":
            return self._escape()
        return lambda one: one == char

    def _escape(self) -> _Test:
        char = self._peek()
        if not char:
            self._place -= 1
            raise self._wrong("ends the pattern; \\\\ matches a backslash")
        if char.lower() in _CLASSES:
            self._place += 1
            test = _CLASSES[char.lower()]
            return test if char.islower() else lambda one: not test(one)
        if char.isalnum() and char not in _CONTROL:
            raise self._wrong("after \\ is not in this language; \\d, \\w, \\s, \\n, \\t and escaped signs are")
        self._place += 1
        wanted = _CONTROL.get(char, char)
        return lambda one: one == wanted

    def _set(self) -> _Test:
        opened = self._place - 1
        inverted = self._peek() == "^"
        self._place += inverted
        tests: list[_Test] = []
        while self._peek() != "]" or not tests:
            if not self._peek():
                self._place = opened
                raise self._wrong("has no ] after it")
            tests.append(self._range())
        self._place += 1
        return lambda one: any(test(one) for test in tests) != inverted

    def _range(self) -> _Test:
        low = self._text[self._place]
        self._place += 1
        if low == "\\":
            return self._escape()
        if self._peek() != "-" or self._text[self._place + 1 : self._place + 2] in ("]", ""):
            return lambda one: one == low
        high = self._text[self._place + 1]
        if high < low or high == "\\":
            raise self._wrong(f"is no range from {low!r} to {high!r}")
        self._place += 2
        return lambda one: low <= one <= high

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _add(self, state: _State) -> int:
        self._states.append(state)
        return len(self._states) - 1

    def _wrong(self, words: str) -> PatternError:
        return PatternError(f"{self._peek() or 'the end'!r} at position {self._place + 1} of {self._text!r} {words}")
