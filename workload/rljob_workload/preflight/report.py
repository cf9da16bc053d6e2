"""Making a report fit a container's termination message: what a person needs last is shortened first."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rljob_api.preflight import MAX_BYTES, PassedOver, PreflightReport

#: Longest texts, tried in this order; and how many checkpoints that were passed over are named.
_LENGTHS = (512, 256, 160, 96, 48)
_NAMED = (8, 4, 1)
_MOST_DIFFERS = 16


def encode(report: PreflightReport) -> str:
    """As it is written: compact JSON."""
    return json.dumps(report.to_wire(), separators=(",", ":"), ensure_ascii=False)


def fitted(
    report: PreflightReport, *, message: str = "", passed_over: Sequence[PassedOver] = (), differs: Sequence[str] = ()
) -> PreflightReport:
    """The report with these texts, in at most `MAX_BYTES` bytes of JSON."""
    message = message or report.message
    for named in _NAMED:
        for length in _LENGTHS:
            short = report.model_copy(
                update={
                    "message": _short(_and_more(message, len(passed_over) - named), 2 * length),
                    "passed_over": [
                        PassedOver(name=_short(one.name, 128), why=_short(one.why, length)) for one in passed_over[:named]
                    ],
                    "differs": [_short(line, length) for line in differs[:_MOST_DIFFERS]],
                }
            )
            if len(encode(short).encode()) <= MAX_BYTES:
                return short
    why = "the checkpoint's path is too long to be reported; use a shorter spec.checkpoint.volume.subPath"
    return PreflightReport(outcome="Unusable", message=why)


def _and_more(message: str, more: int) -> str:
    return f"{message} ({more} more checkpoints were passed over)" if more > 0 else message


def _short(text: str, length: int) -> str:
    """The beginning, which names the file and the field; surrogates that no JSON reader takes are replaced."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= length else text[: length - 3] + "..."
