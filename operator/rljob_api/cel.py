"""The rule table as `x-kubernetes-validations` of the CRD: the API server checks it with nothing of ours running.

A rule applies on creation, and on a change of something that it reads. Otherwise an object that an older version let in could
never be written again, not even its status: the API server runs all rules on every write of the status as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .names import MAX_NAME_LENGTH
from .rule import Clause, Rule
from .rules import NAME_PATTERN, NAME_RULE, RULES
from .transitions import shape_validations, sizes_validations


def spec_validations(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rules under `.spec` (of that schema): all errors of the table that are arithmetic, and what may never change."""
    table = [_validation(rule, clause, schema) for rule in RULES if rule.in_crd for clause in rule.clauses]
    return table + shape_validations()


def _validation(rule: Rule, clause: Clause, schema: Mapping[str, Any]) -> dict[str, Any]:
    unchanged = " && ".join(same(path.removeprefix("spec."), schema) for path in sorted(clause.reads))
    return {
        "rule": f"(oldSelf.hasValue() && {unchanged}) || {clause.require.cel()}",
        "optionalOldSelf": True,
        "messageExpression": clause.message.cel(),
        "message": rule.meaning,
        "reason": "FieldValueInvalid",
        "fieldPath": f".{clause.path}",
    }


def same(path: str, schema: Mapping[str, Any]) -> str:
    """CEL: a field is as it was. Of an optional block only whether it is there; its fields are read by themselves."""
    node, optional, names = schema, [], path.split(".")
    for depth, name in enumerate(names, 1):
        required = name in node.get("required", ())
        node = node["properties"][name]
        if not required and "default" not in node:
            optional.append(".".join(names[:depth]))
    new, old = "self", "oldSelf.value()"
    if not optional:
        return f"{new}.{path} == {old}.{path}"
    there, was = (" && ".join(f"has({root}.{one})" for one in optional) for root in (new, old))
    presence = f"({there}) == ({was})"
    if node.get("properties"):
        return presence
    return f"{presence} && (!({there}) || {new}.{path} == {old}.{path})"


def root_validations() -> list[dict[str, Any]]:
    """The rules at the root: name and sizes, which pass on every write of the status. The name's is never to be tightened."""
    name = {
        "rule": f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')",
        "messageExpression": (
            "'%s has %d characters; it has to start with a lower-case letter, hold only lower-case letters, "
            f"digits and dashes, and have at most {MAX_NAME_LENGTH} characters'"
            ".format([self.metadata.name, self.metadata.name.size()])"
        ),
        "message": NAME_RULE.meaning,
        "reason": "FieldValueInvalid",
        "fieldPath": ".metadata.name",
    }
    return [name, *sizes_validations()]
