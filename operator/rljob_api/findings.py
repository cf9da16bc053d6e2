"""What validation says: one finding is one broken rule, named by path, with the values and what would do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One result of validation; `severity` error refuses the job, warning does not."""

    rule: str
    reason: str
    severity: Literal["error", "warning"]
    path: str
    message: str

    def to_wire(self) -> dict[str, str]:
        """The object that `rljob validate -o json` lists (without the file)."""
        return {"rule": self.rule, "severity": self.severity, "path": self.path, "message": self.message}


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those that refuse the job."""
    return [finding for finding in findings if finding.severity == "error"]


def render(findings: Iterable[Finding]) -> str:
    """All findings in one line: `path: message; path: message`."""
    return "; ".join(f"{finding.path}: {finding.message}" for finding in findings)
