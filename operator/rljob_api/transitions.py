"""What may change after a job was created. The API server holds it by transition rules, the webhook by the same table.

Thresholds, retry limits, deadlines, TTL and suspend may change at any time. Sizes change what a running attempt is made of:
only before the first attempt or while the job is suspended. The model's shape is what checkpoints are made of: never.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .expr import quoted
from .findings import Finding
from .rule import Rule

FROZEN_WHILE_RUNNING = (
    "trainer.nodes",
    "trainer.gpusPerNode",
    "trainer.ranksPerNode",
    "parallelism",
    "generation.parallelism",
    "data",
    "algorithm.grpo.promptsPerStep",
    "algorithm.grpo.generationsPerPrompt",
    "algorithm.grpo.microBatchSize",
)
"""Sizes and data: equal to before, unless no attempt was started or the job was suspended before the change."""

FROZEN_FOR_EVER = ("model.preset", "model.shape")
"""What every checkpoint of the job was made with."""

SIZES_RULE = Rule(
    "sizes-while-running",
    "FieldImmutable",
    "error",
    "Sizes and data change only before the first attempt or while the job is suspended; the next attempt then reshards "
    "or refuses.",
    reads=frozenset(f"spec.{path}" for path in FROZEN_WHILE_RUNNING) | {"spec.suspend", "status.attempt"},
    deviation="Not Megatron's subject.",
)

SHAPE_RULE = Rule(
    "model-shape-fixed",
    "FieldImmutable",
    "error",
    "A job's model keeps its shape: its checkpoints hold weights of just that shape.",
    reads=frozenset(f"spec.{path}" for path in FROZEN_FOR_EVER),
    deviation="Not Megatron's subject.",
)

TRANSITION_RULES = (SIZES_RULE, SHAPE_RULE)

_SIZES_ADVICE = (
    "can't change while attempts run (status.attempt {attempt}): set spec.suspend to true first, or create a new RLJob"
)
_SHAPE_ADVICE = "can never change: create a new RLJob for another model"
_SHAPE_WAY = (
    "{fields} can never be edited: delete this RLJob and create it again with the right value, which goes on from its volume, "
    "or with another spec.checkpoint.volume.subPath, which begins anew"
)
_SIZES_WAY = "{fields} can be edited while spec.suspend is true: set that first"


def how_to_edit(paths: Iterable[str]) -> list[str]:
    """What it takes to change fields (`spec.model.shape.layers`) of a job that has attempts; nothing for those free to edit."""
    wanted = [path.removeprefix("spec.") for path in paths]
    fixed, sizes = (
        [f"spec.{field}" for field in fields if any(f"{path}.".startswith(f"{field}.") for path in wanted)]
        for fields in (FROZEN_FOR_EVER, FROZEN_WHILE_RUNNING)
    )
    advice = [_SHAPE_WAY.format(fields=" and ".join(fixed))] if fixed else []
    return [*advice, _SIZES_WAY.format(fields=" and ".join(sizes))] if sizes else advice


def _at(spec: Mapping[str, Any], path: str) -> Any:
    node: Any = spec
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def check_update(old: Mapping[str, Any], new: Mapping[str, Any], attempt: int) -> list[Finding]:
    """Findings on a change of the spec from one wire form (with defaults) to another, after that many attempts."""
    findings = [_finding(SHAPE_RULE, path, _SHAPE_ADVICE) for path in FROZEN_FOR_EVER if _at(old, path) != _at(new, path)]
    if attempt and not old.get("suspend", False):
        advice = _SIZES_ADVICE.format(attempt=attempt)
        changed = (path for path in FROZEN_WHILE_RUNNING if _at(old, path) != _at(new, path))
        findings += [_finding(SIZES_RULE, path, advice) for path in changed]
    return findings


def _finding(rule: Rule, path: str, message: str) -> Finding:
    return Finding(rule.id, rule.reason, rule.severity, f"spec.{path}", message)


def _same(path: str, parent: str = "") -> str:
    """CEL: the field is as before; a field that is set or unset has changed."""
    new, old = f"self{parent}.{path}", f"oldSelf{parent}.{path}"
    equal = f"{new} == {old}"
    if path in {"generation.parallelism", *FROZEN_FOR_EVER}:
        return f"(has({new}) == has({old}) && (!has({new}) || {equal}))"
    return f"({equal})"


def shape_validations() -> list[dict[str, Any]]:
    """The rules under `.spec`, one for each field."""
    return [
        {
            "rule": _same(path),
            "message": _SHAPE_ADVICE,
            "reason": "FieldValueForbidden",
            "fieldPath": f".{path}",
        }
        for path in FROZEN_FOR_EVER
    ]


def sizes_validations() -> list[dict[str, Any]]:
    """The rules at the root of the object, where spec and status can be seen together, one for each field.

    They pass on every write of the status, and on every object that an older version let in: there the spec is as before.
    """
    text = quoted(_SIZES_ADVICE.format(attempt="%d"))
    return [
        {
            "rule": f"!has(oldSelf.status) || oldSelf.status.attempt == 0 || oldSelf.spec.suspend || {_same(path, '.spec')}",
            "messageExpression": f"{text}.format([oldSelf.status.attempt])",
            "message": SIZES_RULE.meaning,
            "reason": "FieldValueForbidden",
            "fieldPath": f".spec.{path}",
        }
        for path in FROZEN_WHILE_RUNNING
    ]
