"""`rljob ledger`: where every prompt of a run stands, read from its newest checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .errors import UserError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "ledger",
        help="show a checkpoint's prompt ledger",
        description="Show the prompt ledger of a checkpoint: how many prompts were handed out, and where each of them stands.",
        epilog="exit status: 0 read, 1 the checkpoint has no ledger or a broken one, 2 no checkpoint there\n"
        "example: rljob ledger build/local/copy -o json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run directory (its newest checkpoint) or one checkpoint")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="text (default) or a JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read and show."""
    try:
        from rljob_workload.core.inspection import InspectionError, inspect
    except ModuleNotFoundError as error:
        raise UserError(f"the trainer is not installed here ({error.name} is missing); install rljob[workload]") from None
    try:
        found = inspect(options.directory)
    except InspectionError as error:
        raise UserError(str(error), exit_code=error.exit_code) from None
    print(json.dumps(found, indent=2) if options.output == "json" else _text(found))
    return 0


def _text(found: dict[str, Any]) -> str:
    states = ("trained", "filtered", "training", "buffered", "in_flight", "pending", "retryable", "skipped")
    lines = [f"{found['path']}: step {found['step']}, token {found['token']}", f"{'handed out':>18} {found['handed_out']:>10}"]
    lines += [f"{state.replace('_', ' '):>18} {found[state]:>10}" for state in states]
    lines.append(f"every prompt below {found['frontier_ordinal']} is done; a resume reads from {found['resume_base_ordinal']}")
    for state, ranges in found["undone"].items():
        lines.append(f"{state.replace('_', ' ')}: " + ", ".join(_range(*pair) for pair in ranges[:12]))
    lines += [f"skipped ({cause}): {', '.join(map(str, names[:12]))}" for cause, names in found["skipped_names"].items()]
    if found["at_risk"]:
        lines.append(f"at risk: up to {found['at_risk']} prompts were lost before a checkpoint without a ledger")
    return "\n".join(lines)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
