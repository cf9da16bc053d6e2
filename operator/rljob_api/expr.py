"""Expressions over a spec, written once and read twice: evaluated here, and rendered as CEL for the API server.

A rule that exists in two languages drifts. An `Expr` is built with Python's operators, `value` evaluates it on a spec in its
wire form (defaults filled in, unset fields absent: just what the API server's rules see), and `cel` is the same thing as text.
All integers are non-negative and bounded by the schema, so that `//` and CEL's `/` agree and nothing overflows; other numbers
are strings in the spec, and only compared, as doubles with doubles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

type Value = int | float | bool | str
type Operand = Expr | int | float | str | bool

_OPTIONAL_PARENTS = frozenset({"model.shape", "model.huggingFace", "generation.parallelism", "validation", "checkpoint.from"})


class Expr:
    """One expression; operators build larger ones. `&` and `|` stop at the first operand that decides."""

    def cel(self) -> str:
        """The expression in the API server's language; `self` is the spec."""
        raise NotImplementedError

    def value(self, spec: Mapping[str, Any]) -> Value:
        """Its value on a spec in wire form. Raises KeyError where it reads an unset field."""
        raise NotImplementedError

    def paths(self) -> frozenset[str]:
        """Every path that it may read, without the leading `spec.`."""
        raise NotImplementedError

    def __add__(self, other: Operand) -> Expr:
        return _Binary("+", self, lift(other))

    def __sub__(self, other: Operand) -> Expr:
        return _Binary("-", self, lift(other))

    def __mul__(self, other: Operand) -> Expr:
        return _Binary("*", self, lift(other))

    def __floordiv__(self, other: Operand) -> Expr:
        return _Binary("/", self, lift(other))

    def __mod__(self, other: Operand) -> Expr:
        return _Binary("%", self, lift(other))

    def __lt__(self, other: Operand) -> Expr:
        return _Binary("<", self, lift(other))

    def __le__(self, other: Operand) -> Expr:
        return _Binary("<=", self, lift(other))

    def __gt__(self, other: Operand) -> Expr:
        return _Binary(">", self, lift(other))

    def __ge__(self, other: Operand) -> Expr:
        return _Binary(">=", self, lift(other))

    def __and__(self, other: Operand) -> Expr:
        return _Binary("&&", self, lift(other))

    def __or__(self, other: Operand) -> Expr:
        return _Binary("||", self, lift(other))

    def __invert__(self) -> Expr:
        return _Not(self)

    def eq(self, other: Operand) -> Expr:
        """Equality (`==` stays Python's own)."""
        return _Binary("==", self, lift(other))

    def divides(self, other: Operand) -> Expr:
        """Whether the other one is a multiple of this one."""
        return (lift(other) % self).eq(0)

    def next_multiple(self, factor: Operand) -> Expr:
        """The smallest multiple of the factor that is not below this one."""
        step = lift(factor)
        return (self + step - 1) // step * step

    def contains(self, text: str) -> Expr:
        """Whether this string has that one in it."""
        return _Contains(self, text)

    def matches(self, pattern: str) -> Expr:
        """Whether a regular expression is found in this string (syntax that Python and RE2 share)."""
        return _Matches(self, pattern)

    def decimal(self) -> Expr:
        """This string, which holds a decimal number, as that number."""
        return _Decimal(self)

    def size(self) -> Expr:
        """Length of this string."""
        return _Size(self)


@dataclass(frozen=True, eq=False)
class _Literal(Expr):
    given: Value

    def cel(self) -> str:
        return quoted(self.given) if isinstance(self.given, str) else str(self.given).lower()

    def value(self, spec: Mapping[str, Any]) -> Value:
        return self.given

    def paths(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True, eq=False)
class _Field(Expr):
    path: str

    def cel(self) -> str:
        return f"self.{self.path}"

    def value(self, spec: Mapping[str, Any]) -> Value:
        node: Any = spec
        for name in self.path.split("."):
            node = node[name]
        found: Value = node
        return found

    def paths(self) -> frozenset[str]:
        return frozenset({self.path})


@dataclass(frozen=True, eq=False)
class _Has(Expr):
    path: str

    def _chain(self) -> list[str]:
        names = self.path.split(".")
        parents = [".".join(names[:length]) for length in range(1, len(names))]
        return [*(parent for parent in parents if parent in _OPTIONAL_PARENTS), self.path]

    def cel(self) -> str:
        tests = [f"has(self.{path})" for path in self._chain()]
        return tests[0] if len(tests) == 1 else f"({' && '.join(tests)})"

    def value(self, spec: Mapping[str, Any]) -> Value:
        node: Any = spec
        for name in self.path.split("."):
            if name not in node:
                return False
            node = node[name]
        return True

    def paths(self) -> frozenset[str]:
        return frozenset({self.path})


_OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
}


@dataclass(frozen=True, eq=False)
class _Binary(Expr):
    operator: str
    left: Expr
    right: Expr

    def cel(self) -> str:
        return f"({self.left.cel()} {self.operator} {self.right.cel()})"

    def value(self, spec: Mapping[str, Any]) -> Value:
        left = self.left.value(spec)
        if self.operator == "&&":
            return bool(left) and bool(self.right.value(spec))
        if self.operator == "||":
            return bool(left) or bool(self.right.value(spec))
        result: Value = _OPERATIONS[self.operator](left, self.right.value(spec))
        return result

    def paths(self) -> frozenset[str]:
        return self.left.paths() | self.right.paths()


@dataclass(frozen=True, eq=False)
class _Not(Expr):
    inner: Expr

    def cel(self) -> str:
        return f"!{self.inner.cel()}"

    def value(self, spec: Mapping[str, Any]) -> Value:
        return not self.inner.value(spec)

    def paths(self) -> frozenset[str]:
        return self.inner.paths()


@dataclass(frozen=True, eq=False)
class _When(Expr):
    condition: Expr
    then: Expr
    otherwise: Expr

    def cel(self) -> str:
        return f"({self.condition.cel()} ? {self.then.cel()} : {self.otherwise.cel()})"

    def value(self, spec: Mapping[str, Any]) -> Value:
        return (self.then if self.condition.value(spec) else self.otherwise).value(spec)

    def paths(self) -> frozenset[str]:
        return self.condition.paths() | self.then.paths() | self.otherwise.paths()


@dataclass(frozen=True, eq=False)
class _Contains(Expr):
    inner: Expr
    text: str

    def cel(self) -> str:
        return f"{self.inner.cel()}.contains({quoted(self.text)})"

    def value(self, spec: Mapping[str, Any]) -> Value:
        return self.text in str(self.inner.value(spec))

    def paths(self) -> frozenset[str]:
        return self.inner.paths()


@dataclass(frozen=True, eq=False)
class _Matches(Expr):
    inner: Expr
    pattern: str

    def cel(self) -> str:
        return f"{self.inner.cel()}.matches({quoted(self.pattern)})"

    def value(self, spec: Mapping[str, Any]) -> Value:
        return re.search(self.pattern, str(self.inner.value(spec))) is not None

    def paths(self) -> frozenset[str]:
        return self.inner.paths()


@dataclass(frozen=True, eq=False)
class _Decimal(Expr):
    inner: Expr

    def cel(self) -> str:
        return f"double({self.inner.cel()})"

    def value(self, spec: Mapping[str, Any]) -> Value:
        return float(self.inner.value(spec))

    def paths(self) -> frozenset[str]:
        return self.inner.paths()


@dataclass(frozen=True, eq=False)
class _Size(Expr):
    inner: Expr

    def cel(self) -> str:
        return f"{self.inner.cel()}.size()"

    def value(self, spec: Mapping[str, Any]) -> Value:
        return len(str(self.inner.value(spec)))

    def paths(self) -> frozenset[str]:
        return self.inner.paths()


def lift(operand: Operand) -> Expr:
    """A literal as an expression; an expression as it is."""
    return operand if isinstance(operand, Expr) else _Literal(operand)


def quoted(text: str) -> str:
    """A string literal of CEL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def field(path: str) -> Expr:
    """The value at a path below the spec, such as `trainer.nodes`."""
    return _Field(path)


def has(path: str) -> Expr:
    """Whether the field is set (and every optional block around it)."""
    return _Has(path)


def when(condition: Expr, then: Operand, otherwise: Operand) -> Expr:
    """One of two, of the same type."""
    return _When(condition, lift(then), lift(otherwise))


def or_else(path: str, otherwise: Operand) -> Expr:
    """The field, or something else where it is unset."""
    return when(has(path), field(path), otherwise)


def count(parent: str, names: Iterable[str]) -> Expr:
    """How many of the named fields of a block are set."""
    total: Expr | None = None
    for name in names:
        one = when(has(f"{parent}.{name}"), 1, 0)
        total = one if total is None else total + one
    return total if total is not None else lift(0)


def given(parent: str, names: tuple[str, ...]) -> dict[str, Expr]:
    """Parts of a message, in order, that together say which of those fields are set: ` a and b`, or ` none`.

    Parts, because the cost estimate of the API server takes joined strings as unbounded.
    """
    parts: dict[str, Expr] = {}
    earlier: Expr = lift(False)
    for name in names:
        here = has(f"{parent}.{name}")
        parts[f"given_{name}"] = when(here, when(earlier, f" and {name}", f" {name}"), "")
        earlier = earlier | here
    parts["given_none"] = when(earlier, "", " none")
    return parts


@dataclass(frozen=True)
class Message:
    """A sentence with `{names}` of expressions in it: formatted here, or by CEL's `format`."""

    template: str
    values: Mapping[str, Expr]

    def render(self, spec: Mapping[str, Any]) -> str:
        """The sentence with this spec's values."""
        found = {name: spell(expr.value(spec)) for name, expr in self.values.items() if f"{{{name}}}" in self.template}
        return self.template.format(**found)

    def cel(self) -> str:
        """The sentence as a messageExpression.

        By `format`, not by adding strings: the API server's cost estimate takes the length of `string(int)` as unbounded.
        """
        parts = re.split(r"\{(\w+)\}", self.template)
        names = parts[1::2]
        text = "%s".join(part.replace("%", "%%") for part in parts[::2])
        return f"{quoted(text)}.format([{', '.join(self.values[name].cel() for name in names)}])" if names else quoted(text)


def spell(value: Value) -> str:
    """A value as messages and YAML write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
