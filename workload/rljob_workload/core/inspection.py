"""Reading a checkpoint's books without a trainer: what `rljob ledger` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rljob_workload.core.checkpoint import Checkpoint, RunDirectory, read_checkpoint
from rljob_workload.core.ledger import LedgerError, State
from rljob_workload.core.ledger_file import ledger_from_json


class InspectionError(Exception):
    """Nothing to show; says where it looked."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def inspect(directory: Path) -> dict[str, Any]:
    """The ledger of a checkpoint, or of a run directory's newest one, as `rljob ledger -o json` prints it."""
    checkpoint = _find(directory)
    collector = checkpoint.state.get("collector")
    if not isinstance(collector, Mapping) or "ledger" not in collector:
        raise InspectionError(f"{checkpoint.path} has no prompt ledger; it was written by something that keeps none", 1)
    try:
        ledger = ledger_from_json(collector["ledger"])
    except LedgerError as err:
        raise InspectionError(f"{checkpoint.path}: {err}", 1) from err
    source = collector.get("source")
    base = source.get("base_ordinal") if isinstance(source, Mapping) else None
    undone = {state.value: to_ranges(ledger.in_state(state)) for state in State}
    return {
        **asdict(ledger.counts()),
        "skipped_names": ledger.skipped_names(),
        "frontier_ordinal": ledger.frontier,
        "resume_base_ordinal": base,
        "step": checkpoint.step,
        "token": checkpoint.token,
        "undone": {state: ranges for state, ranges in undone.items() if ranges},
        "path": str(checkpoint.path),
    }


def _find(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        raise InspectionError(f"{directory} is not a directory")
    if (directory / "MANIFEST.json").exists():
        found = read_checkpoint(directory)
        if isinstance(found, str):
            raise InspectionError(f"{directory.parent}: {found}", 1)
        return found
    newest, passed_over = RunDirectory(directory).newest()
    if newest is None:
        why = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise InspectionError(f"no complete checkpoint in {directory}{why}; expected step-NNNNNN-tTTTTTT directories in it")
    return newest


def to_ranges(ordinals: Sequence[int]) -> list[list[int]]:
    """Sorted ordinals as inclusive ranges: [3, 4, 5, 9] -> [[3, 5], [9, 9]]."""
    ranges: list[list[int]] = []
    for ordinal in ordinals:
        if ranges and ranges[-1][1] == ordinal - 1:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return ranges
