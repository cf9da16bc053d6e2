"""`rljob checkpoints`: what is in a run's directory, and which of it a resume goes on from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .errors import UserError

_HEADS = ("", "CHECKPOINT", "STEP", "TOKEN", "PARENT", "SIZE", "VERIFIED", "STATE")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "checkpoints",
        help="list a run's checkpoints",
        description="List the checkpoints of a run directory, newest first: which of them are whole, which are on the lineage "
        "of the newest token, and which one a resume goes on from.",
        epilog="exit status: 0 a resume goes on from the marked one, 1 none can be gone on from, 2 no such directory\n"
        "example: rljob checkpoints build/local/copy --full",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run directory")
    parser.add_argument("--full", action="store_true", help="read every byte (default: sizes, and the bytes of small files)")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="text (default) or a JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read and show."""
    try:
        from rljob_workload.core.inspection import InspectionError, checkpoints
    except ModuleNotFoundError as error:
        raise UserError(f"the trainer is not installed here ({error.name} is missing); install rljob[workload]") from None
    try:
        found = checkpoints(options.directory, "Full" if options.full else "Sizes")
    except InspectionError as error:
        raise UserError(str(error), exit_code=error.exit_code) from None
    print(json.dumps(found, indent=2) if options.output == "json" else _text(found))
    return 0 if found["chosen"] is not None else 1


def _text(found: dict[str, Any]) -> str:
    rows = [_HEADS, *(_row(one, chosen=one["name"] == found["chosen"]) for one in found["checkpoints"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows
    ]
    if not found["checkpoints"]:
        lines = [f"no checkpoint in {found['path']}"]
    if found["problem"] is not None:
        lines.append(f"no resume goes on from here: {found['problem']}")
    if found["token"] is not None:
        origin = found["resumed_from"] or "the beginning"
        lines.append(f"token {found['token']}: {found['holder']}, from {origin}")
    return "\n".join(lines)


def _row(one: dict[str, Any], *, chosen: bool) -> tuple[str, ...]:
    size = _size(one["bytes"]) if one["bytes"] is not None else "-"
    cells = (one["name"], str(one["step"]), str(one["token"]), one["parent"] or "-", size, one["verified"] or "-")
    return ("*" if chosen else "", *cells, one["why"] or "valid")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
