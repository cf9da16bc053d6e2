"""docs/validation.md: every rule as the table has it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .model_config import MODEL_RULE
from .rule import Clause, Rule
from .rules import ACCESS_RULE, NAME_RULE, RULES
from .transitions import TRANSITION_RULES

EXTRA_RULES = (NAME_RULE, ACCESS_RULE, MODEL_RULE, *TRANSITION_RULES)
"""Rules that look at more than the spec: the name, the volume claim, the model's files, the spec before a change."""

_BUILT_IN = {
    "schema": "A field does not fit the schema: unknown name, missing value, wrong type, out of bounds (for instance "
    "`algorithm.grpo.maxTrajectoryAgeSteps`, which is at least 1). kubectl and the API server say the same in their own words.",
    "not-supported-yet": "A field is set to a value that the installed version does not honour. Not a rule of the table: the "
    "API server and the webhook let such a job in (the webhook with a warning), and the operator says `Validated=False`, "
    "reason `NotSupportedYet`, until a version that honours it is installed. See docs/spec.md for each field.",
}

_HEAD = """# Validation

Every rule stands in one table (`rljob_api`), and five places read it: the API server (CEL in the CRD, with nothing of ours
running), the admission webhook (all findings in one answer, and warnings), the operator (condition `Validated`),
`rljob validate FILE...` (no cluster needed) and the trainer when it starts. `rljob validate --explain RULE` prints one of them.

Where Megatron has an opinion, Megatron is right: `make oracle SEED= N=` asks megatron-core 0.19.2 and this table about
random layouts (process groups, configuration, model, forward pass, engine context, as the first and the last rank and,
where they differ, as every pipeline stage) and fails on every difference that is not explained below under "Differs from
Megatron".

What such a question stands in for, since it needs a GPU: Transformer Engine's attention (its size check is kept), the
kernels of Mamba layers (built, not run), and the layers of the dual mode (its configuration is asked). The trainer does its
share: it pads the vocabulary, cuts stages between whole layers, and takes the router's softmax first where `topK` is 1.

An error refuses the job; a warning does not. "In the CRD: yes" means that `kubectl apply` is refused even with no webhook;
CEL can't warn, so warnings are never there. Each rule names the fields it reads, what it says at which field, and the
formula that has to hold (CEL; `self` is the spec).

`status.attempt` and `spec.suspend` decide what may change later: sizes and data only before the first attempt or while
suspended, `model.shape` and `model.preset` never, everything else at any time.
"""


def page(note: str) -> str:
    """The whole page."""
    errors = [rule for rule in (*RULES, *EXTRA_RULES) if rule.severity == "error"]
    warnings = [rule for rule in RULES if rule.severity == "warning"]
    parts = [f"<!-- {note} -->\n{_HEAD}"]
    parts += [
        f"\n## {title}\n" + "".join(map(_section, rules)) for title, rules in (("Errors", errors), ("Warnings", warnings))
    ]
    parts.append("\n## Findings beside the table\n" + "".join(f"\n### {name}\n\n{text}\n" for name, text in _BUILT_IN.items()))
    return "".join(parts)


def explain(rule: Rule) -> str:
    """One rule as text, for the command line."""
    return "\n".join(_lines(rule, code=""))


def _section(rule: Rule) -> str:
    meaning, *rest = _lines(rule, code="`")
    return f"\n### {rule.id}\n\n{meaning}\n\n" + "".join(f"- {line}\n" if line[0] != " " else f"{line}\n" for line in rest)


def _lines(rule: Rule, code: str) -> Iterator[str]:
    yield rule.meaning
    yield f"{rule.severity}, reason {code}{rule.reason}{code}; in the CRD: {_where(rule)}"
    yield f"Reads {', '.join(f'{code}{path}{code}' for path in rule.paths)}"
    for clause in rule.clauses:
        yield from _clause(clause, code)
    if rule.deviation:
        yield f"Differs from Megatron: {rule.deviation}"


def _where(rule: Rule) -> str:
    if rule is NAME_RULE or rule in TRANSITION_RULES or rule.in_crd:
        return "yes"
    if rule is MODEL_RULE:
        return "no (a file has to be read)"
    if rule is ACCESS_RULE:
        return "no (the operator looks the claim up)"
    return "no (CEL can't warn)" if rule.severity == "warning" else "no (not arithmetic)"


def _clause(clause: Clause, code: str) -> Iterator[str]:
    template = re.sub(r"(\{given_\w+\})+", " {found}", clause.message.template)
    yield f"{code}spec.{clause.path}{code}: {template}"
    yield f"  must hold: {code}{clause.require.cel()}{code}"
