"""Entry point of `rljob` and `kubectl rljob`."""

from __future__ import annotations

import argparse
import sys

from . import checkpoints, export, ledger, local, simulate, validate, watch
from .errors import UserError


def build_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(
        prog="rljob",
        description="Async RL post-training of language models as one Kubernetes resource, RLJob.",
        epilog="See docs/ for the spec field by field, conditions and exit codes.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (validate, local, watch, simulate, ledger, checkpoints, export):
        command.add_parser(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except UserError as error:
        print(f"rljob: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
