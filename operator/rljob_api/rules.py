"""The rule table: what makes a spec impossible, judged by arithmetic before any pod exists.

One table, five readers: CEL in the CRD, the admission webhook, the operator's `Validated`, `rljob validate`, and the trainer at
start-up. Truth is Megatron: `make oracle` asks it the same questions. docs/validation.md is generated from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .findings import Finding
from .names import MAX_NAME_LENGTH
from .rule import Rule
from .rules_layout import LAYOUT_RULES
from .rules_model import MODEL_RULES
from .rules_numbers import NUMBER_RULE
from .rules_run import CHOICE_RULES, RUN_RULES
from .spec import RLJobSpec

_ALL = (*CHOICE_RULES, *LAYOUT_RULES, *MODEL_RULES, NUMBER_RULE, *RUN_RULES)

RULES: tuple[Rule, ...] = (
    *(rule for rule in _ALL if rule.severity == "error"),
    *(rule for rule in _ALL if rule.severity == "warning"),
)

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"

NAME_RULE = Rule(
    "name",
    "NameInvalid",
    "error",
    "The name becomes part of names of Kubernetes' and Ray's: DNS-1035, at most "
    f"{MAX_NAME_LENGTH} characters. It can never change.",
    reads=frozenset({"metadata.name"}),
    deviation="Not Megatron's subject.",
)

ACCESS_RULE = Rule(
    "access-mode",
    "AccessModeInvalid",
    "error",
    "The head and every worker mount the claim: ReadWriteOncePod allows one pod, ReadWriteOnce one node. The operator "
    "looks it up.",
    reads=frozenset({"spec.checkpoint.volume.claimName", "spec.trainer.nodes"}),
    deviation="Not Megatron's subject.",
)


def check_spec(spec: RLJobSpec, old: Mapping[str, Any] | None = None) -> list[Finding]:
    """All findings of the table, errors first; with an old wire form those on what was changed."""
    wire = spec.to_wire()
    return [finding for rule in RULES for finding in rule.findings(spec, wire, old)]


def check_name(name: str) -> list[Finding]:
    """The job's name becomes part of Ray's and Kubernetes' names: DNS-1035, at most 40 characters."""
    problem = None
    if len(name) > MAX_NAME_LENGTH:
        problem = f"{name!r} has {len(name)} characters; names derived from it leave room for {MAX_NAME_LENGTH}"
    elif not re.fullmatch(NAME_PATTERN, name):
        problem = f"{name!r} must start with a lower-case letter and hold only lower-case letters, digits and dashes"
    return [Finding(NAME_RULE.id, NAME_RULE.reason, NAME_RULE.severity, "metadata.name", problem)] if problem else []


def check_access(spec: RLJobSpec, modes: Iterable[str]) -> list[Finding]:
    """Whether the checkpoint claim, with these access modes, can be mounted by all of the job's pods."""
    claim, nodes, allowed = spec.checkpoint.volume.claim_name, spec.trainer.nodes, set(modes)
    problem = None
    if not allowed or "ReadWriteMany" in allowed:
        return []
    if "ReadWriteOnce" not in allowed:
        would_do = "ReadWriteMany would do" if nodes > 1 else "ReadWriteOnce or ReadWriteMany would do"
        problem = f"{claim} allows {' and '.join(sorted(allowed))}, and head and workers write to it; {would_do}"
    elif nodes > 1:
        problem = (
            f"{claim} is ReadWriteOnce, and trainer.nodes {nodes} pods on as many nodes write to it; ReadWriteMany would do"
        )
    if problem:
        problem += ". A claim's modes can't be edited: name another claim here, or delete this one and create it anew"
    path = "spec.checkpoint.volume.claimName"
    return [Finding(ACCESS_RULE.id, ACCESS_RULE.reason, ACCESS_RULE.severity, path, problem)] if problem else []
