"""The webhook's verdict: an AdmissionReview in, its answer out. Pure.

The API server has applied schema and CEL before it asks. What is left: all findings in one message, rules that are no
arithmetic, and warnings, which CEL can't give. What this version does not honour yet is a warning here: the job is stored,
and the operator says `Validated=False` until a version that honours it is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api import names, reasons
from rljob_api.findings import Finding, errors
from rljob_api.manifest import judge, too_deep, wire_form
from rljob_api.transitions import check_update

REVIEW_VERSION = "admission.k8s.io/v1"
MAX_FINDINGS = 50
MAX_LENGTH = 1000
#: kubectl shows a warning of at most 256 characters; the API server drops what exceeds 4096 in all.
MAX_WARNING = 250
MAX_WARNINGS = 12
_NOT_SUPPORTED = "NotSupportedYet"
_STILL_COUNTS = "ttlSecondsAfterFinished"
"""The one field of a job that has ended that is read again."""


class ReviewError(ValueError):
    """The request is no AdmissionReview about an RLJob; the message says what is wrong with it."""


def review(body: Any) -> dict[str, Any]:
    """The AdmissionReview that answers this one. Raises ReviewError."""
    request = _block(body, "request")
    uid = request.get("uid")
    if body.get("apiVersion") != REVIEW_VERSION or not isinstance(uid, str):
        raise ReviewError(f"not an AdmissionReview of {REVIEW_VERSION} with a request.uid")
    kind = _block(request, "kind")
    if (kind.get("group"), kind.get("kind")) != (names.GROUP, names.KIND):
        raise ReviewError(
            f"asked about {_short(kind.get('kind'))} of {_short(kind.get('group'))}; this answers for {names.KIND}"
        )
    refused, warned = _findings(request)
    answer: dict[str, Any] = {"uid": uid, "allowed": not refused}
    if refused:
        answer["status"] = {"code": 422, "reason": "Invalid", "message": _listed(refused)}
    if warned:
        answer["warnings"] = _warnings(warned)
    return {"apiVersion": REVIEW_VERSION, "kind": "AdmissionReview", "response": answer}


def _findings(request: Mapping[str, Any]) -> tuple[list[Finding], list[Finding]]:
    """What refuses the request, and what it is worth a warning for."""
    if request.get("operation") not in {"CREATE", "UPDATE"} or request.get("subResource"):
        return [], []
    job = _block(request, "object")
    metadata = _block(job, "metadata")
    if too_deep(job):
        return judge(_name(metadata), job).findings, []
    old_job = request.get("oldObject")
    old, changed = None, []
    if isinstance(old_job, dict) and not too_deep(old_job):
        if metadata.get("deletionTimestamp") or job.get("spec") == old_job.get("spec"):
            return [], []
        old = wire_form(old_job.get("spec"))
        changed = check_update(old, wire_form(job.get("spec")), _attempt(old_job))
        changed += _after_end(old_job, old, wire_form(job.get("spec")))
    found = changed + judge(_name(metadata), job.get("spec"), old).findings
    refused = [one for one in errors(found) if one.reason != _NOT_SUPPORTED]
    return refused, [one for one in found if one not in refused]


def _after_end(old_job: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Finding]:
    """A warning where a job that has ended is edited in what no longer counts."""
    status = old_job.get("status")
    if not isinstance(status, dict) or not status.get("finishTime"):
        return []
    if {**old, _STILL_COUNTS: None} == {**new, _STILL_COUNTS: None}:
        return []
    return [Finding("ended", "FieldImmutable", "warning", "spec", reasons.EDITED_AFTER_END)]


def _attempt(job: Mapping[str, Any]) -> int:
    status = job.get("status")
    attempt = status.get("attempt") if isinstance(status, dict) else None
    return attempt if isinstance(attempt, int) else 0


def _name(metadata: Mapping[str, Any]) -> str:
    """The name; with generateName one such as the API server will make."""
    name, prefix = metadata.get("name"), metadata.get("generateName")
    if isinstance(name, str) and name:
        return name
    return f"{prefix}abcde" if isinstance(prefix, str) else ""


def _listed(findings: Sequence[Finding]) -> str:
    lines = [_cut(f"{one.path}: {one.message}", MAX_LENGTH) for one in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        lines.append(f"and {len(findings) - MAX_FINDINGS} more")
    return lines[0] if len(lines) == 1 else "".join(f"\n* {line}" for line in lines)


def _warnings(findings: Sequence[Finding]) -> list[str]:
    texts = [_cut(f"{one.path}: {one.message}", MAX_WARNING) for one in findings[:MAX_WARNINGS]]
    if len(findings) > MAX_WARNINGS:
        texts.append(f"and {len(findings) - MAX_WARNINGS} more; `rljob validate` lists them")
    return texts


def _cut(text: str, length: int) -> str:
    plain = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return plain if len(plain) <= length else plain[: length - 3] + "..."


def _block(parent: Any, name: str) -> Mapping[str, Any]:
    block = parent.get(name) if isinstance(parent, dict) else None
    if not isinstance(block, dict):
        raise ReviewError(f"{name} is no object")
    return block


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
