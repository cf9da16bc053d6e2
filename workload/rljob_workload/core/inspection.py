"""Looking at a run's directory without a trainer: what `rljob ledger` and `rljob checkpoints` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rljob_workload.core.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    FenceError,
    Judged,
    Level,
    RunDirectory,
    open_checkpoint,
)
from rljob_workload.core.ledger import LedgerError, State
from rljob_workload.core.ledger_file import ledger_from_json
from rljob_workload.core.store.lineage import Name


class InspectionError(Exception):
    """Nothing to show; says where it looked."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def inspect(directory: Path) -> dict[str, Any]:
    """The ledger of a checkpoint, or of a run directory's newest one, as `rljob ledger -o json` prints it."""
    checkpoint = find(directory)
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


def find(directory: Path, level: Level = "Sizes") -> Checkpoint:
    """The checkpoint in a directory, or the newest of a run directory, without its finished groups. Raises InspectionError."""
    if not directory.is_dir():
        raise InspectionError(f"{directory} is not a directory")
    try:
        if Name.parse(directory.resolve().name) is not None or (directory / MANIFEST).exists():
            return open_checkpoint(directory.resolve(), level, buffer=False)
        run = RunDirectory(directory)
        choice = run.choose(level)
        if choice.name is not None:
            return run.load(choice.name, level, buffer=False)
    except CheckpointError as err:
        raise InspectionError(f"{directory}: {err}", 1) from err
    why = "; ".join(f"{one.name}: {one.why}" for one in choice.passed_over)
    raise InspectionError(
        f"no complete checkpoint in {directory}{f' ({why})' if why else ''}; expected step-NNNNNN-tTTTTTT directories in it"
    )


def checkpoints(directory: Path, level: Level = "Sizes") -> dict[str, Any]:
    """All checkpoints of a run directory, newest first, as `rljob checkpoints -o json` prints them."""
    if not directory.is_dir():
        raise InspectionError(f"{directory} is not a directory")
    run = RunDirectory(directory)
    problem = None
    try:
        try:
            fence = run.fence()
        except FenceError as err:
            # No resume goes on from here until it is repaired; what there is to lose can be looked at.
            fence, problem = None, str(err)
        holder, judged = fence.newest if fence is not None else None, run.judge_all(level, fence)
    except CheckpointError as err:
        raise InspectionError(f"{directory}: {err}", 1) from err
    chosen = next((one.name for one in judged if not one.why), None)
    return {
        "path": str(directory),
        "chosen": str(chosen) if chosen is not None else None,
        "token": holder.token if holder is not None else None,
        "holder": str(holder.owner) if holder is not None else None,
        "resumed_from": holder.resumed_from or holder.source if holder is not None else None,
        "problem": problem,
        "checkpoints": [_row(one) for one in judged],
    }


def _row(one: Judged) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "name": str(one.name),
        "step": one.name.step,
        "token": one.name.token,
        "parent": manifest.parent if manifest is not None else None,
        "bytes": manifest.size if manifest is not None else None,
        "valid": one.valid,
        "verified": one.level if one.valid else None,
        "on_lineage": one.on_lineage,
        "why": one.why,
    }


def to_ranges(ordinals: Sequence[int]) -> list[list[int]]:
    """Sorted ordinals as inclusive ranges: [3, 4, 5, 9] -> [[3, 5], [9, 9]]."""
    ranges: list[list[int]] = []
    for ordinal in ordinals:
        if ranges and ranges[-1][1] == ordinal - 1:
            ranges[-1][1] = ordinal
        else:
            ranges.append([ordinal, ordinal])
    return ranges
