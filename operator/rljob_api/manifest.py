"""Reading RLJob manifests and specs, with every problem as a finding instead of a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from .findings import Finding
from .rules import check_name, check_spec
from .spec import RLJobSpec
from .supported import check_supported

MAX_DEPTH = 100
"""Of nested blocks in a spec; a pod template has about twenty."""
MAX_SCHEMA_FINDINGS = 50
MAX_LENGTH = 100_000
"""Bytes of a spec: Linux takes 131,072 for one environment variable (MAX_ARG_STRLEN), and an object 262,144 of annotations."""


@dataclass(frozen=True)
class Verdict:
    """What a spec came to: the parsed form (None when it does not fit the schema) and all findings."""

    spec: RLJobSpec | None
    findings: list[Finding]


def judge(name: str, spec: Any, old: Mapping[str, Any] | None = None) -> Verdict:
    """All findings on a job's name and raw spec: schema first, then rules, then what is not supported yet.

    With the spec from before a change (in wire form), rules are asked only where something that they read was changed.
    """
    findings = check_name(name)
    if too_deep(spec):
        deep = Finding("schema", "SpecUnreadable", "error", "spec", f"is nested more than {MAX_DEPTH} levels deep")
        return Verdict(None, [*findings, deep])
    try:
        parsed = RLJobSpec.model_validate(_without_nulls(spec), by_alias=True, by_name=False)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)[:MAX_SCHEMA_FINDINGS]
        return Verdict(None, findings + [_schema_finding(detail) for detail in details])
    return Verdict(parsed, findings + _check_length(parsed) + check_spec(parsed, old) + check_supported(parsed))


def _check_length(spec: RLJobSpec) -> list[Finding]:
    length = len(json.dumps(spec.to_wire()))
    if length <= MAX_LENGTH:
        return []
    problem = (
        f"has {length} bytes as JSON with all defaults, more than the {MAX_LENGTH} that an environment variable of its pods "
        "can carry; long texts in trainer.template or agent.command would do as files of a ConfigMap volume or of the image"
    )
    return [Finding("schema", "SpecUnreadable", "error", "spec", problem)]


def wire_form(spec: Any) -> dict[str, Any]:
    """A stored spec with this version's defaults; as it is where this version can't read it any more."""
    try:
        return RLJobSpec.model_validate(_without_nulls(spec), by_alias=True, by_name=False).to_wire()
    except ValidationError:
        return dict(spec) if isinstance(spec, dict) else {}


def too_deep(value: Any) -> bool:
    """Whether it is nested beyond MAX_DEPTH. Counted without recursion, and no further than needed."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        blocks = [block for block in level if isinstance(block, dict | list)]
        level = [part for block in blocks for part in (block.values() if isinstance(block, dict) else block)]
    return depth > MAX_DEPTH


def _without_nulls(value: Any) -> Any:
    """The API server drops nulls before it applies defaults; a manifest read from a file is treated alike."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _schema_finding(detail: Any) -> Finding:
    path = "spec"
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    match detail["type"]:
        case "extra_forbidden":
            message = "no such field"
        case "missing":
            message = "is required"
        case _:
            message = f"{message}; found {_short(detail['input'])}"
    return Finding("schema", "SpecUnreadable", "error", path, message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
