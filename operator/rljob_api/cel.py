"""The rule table as `x-kubernetes-validations` of the CRD: the API server checks it with nothing of ours running."""

from __future__ import annotations

from typing import Any

from .names import MAX_NAME_LENGTH
from .rules import NAME_PATTERN, NAME_RULE, RULES
from .transitions import shape_validations, sizes_validation


def spec_validations() -> list[dict[str, Any]]:
    """Rules under `.spec`: all errors of the table that are arithmetic, and what may never change.

    Under `.spec`, not at the root, so that the status of an object can be written whatever later versions think of its spec.
    """
    table = [
        {
            "rule": clause.require.cel(),
            "messageExpression": clause.message.cel(),
            "message": rule.meaning,
            "reason": "FieldValueInvalid",
            "fieldPath": f".{clause.path}",
        }
        for rule in RULES
        if rule.in_crd
        for clause in rule.clauses
    ]
    return table + shape_validations()


def root_validations() -> list[dict[str, Any]]:
    """The two rules at the root: both pass on every write of the status. The name's is never to be tightened."""
    name = {
        "rule": f"self.metadata.name.size() <= {MAX_NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')",
        "messageExpression": (
            "'metadata.name %s has %d characters; it has to start with a lower-case letter, hold only lower-case "
            "letters, digits and "
            f"dashes, and have at most {MAX_NAME_LENGTH} characters'.format([self.metadata.name, self.metadata.name.size()])"
        ),
        "message": NAME_RULE.meaning,
        "reason": "FieldValueInvalid",
    }
    return [name, sizes_validation()]
