"""What a rule is: a stable id, a reason, and clauses that each say what must hold, where, and what to tell whoever breaks
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .expr import Expr, Message
from .findings import Finding
from .spec import RLJobSpec

Check = Callable[[RLJobSpec], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Clause:
    """One requirement on one field, in a form that the API server can check too."""

    path: str
    require: Expr
    message: Message

    def broken(self, spec: Mapping[str, Any]) -> bool:
        """Whether a spec in wire form breaks it."""
        return not self.require.value(spec)

    def applies(self, spec: Mapping[str, Any], old: Mapping[str, Any] | None) -> bool:
        """Whether it is asked: on creation, and on a change of something that it reads.

        An object that an older version let in must not be locked by rules that came later.
        """
        return old is None or any(_at(spec, path) != _at(old, path) for path in self.require.paths())

    @property
    def reads(self) -> frozenset[str]:
        """Paths that decide it."""
        return frozenset(f"spec.{path}" for path in self.require.paths())


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    `clauses` are arithmetic and, for errors, become CEL in the CRD. `check` is for what CEL can't say; such a rule is judged by
    the webhook, the operator, `rljob validate` and the trainer, not by the API server alone. `reads` names what `check` reads.
    """

    id: str
    reason: str
    severity: Literal["error", "warning"]
    meaning: str
    clauses: tuple[Clause, ...] = ()
    check: Check | None = None
    reads: frozenset[str] = field(default_factory=frozenset)
    deviation: str = ""
    """Where the verdict differs from Megatron's own, and why; empty where it does not."""

    @property
    def paths(self) -> list[str]:
        """Every path of the spec that the rule reads."""
        return sorted(self.reads.union(*(clause.reads for clause in self.clauses)))

    @property
    def in_crd(self) -> bool:
        """Whether the API server checks it by itself."""
        return self.severity == "error" and bool(self.clauses)

    def findings(self, spec: RLJobSpec, wire: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> Iterator[Finding]:
        """What this rule says of a spec (given parsed and in wire form), or of the change from an old wire form."""
        for clause in self.clauses:
            if clause.applies(wire, old) and clause.broken(wire):
                yield Finding(self.id, self.reason, self.severity, f"spec.{clause.path}", clause.message.render(wire))
        asked = old is None or any(_at(wire, path[5:]) != _at(old, path[5:]) for path in self.reads)
        if self.check is not None and asked:
            for path, message in self.check(spec):
                yield Finding(self.id, self.reason, self.severity, path, message)


def clause(path: str, require: Expr, message: str, /, **values: Expr) -> Clause:
    """A clause whose message holds the named values."""
    return Clause(path, require, Message(message, values))


def _at(spec: Mapping[str, Any], path: str) -> Any:
    """A field's value; of a block only whether it is there, since its fields are compared by themselves."""
    node: Any = spec
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return isinstance(node, Mapping) or node
