"""`rljob export`: a checkpoint as a Hugging Face model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import UserError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model",
        description="Verify a checkpoint, whatever layout wrote it, and write its model for from_pretrained: weights as "
        "safetensors, config.json, generation_config.json, README.md. DIR has to be new or empty; with this very export in it, "
        "nothing is done.",
        epilog="exit status: 0 DIR holds the model, 1 it cannot be exported, 2 no such checkpoint\n"
        "example: rljob export build/local/copy build/copy-hf",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint, or a run directory (its newest one)")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="as trained: float32 (default)")
    parser.add_argument("--max-length", metavar="TOKENS", type=_tokens, help="longest sequence (default: the job's)")
    parser.set_defaults(run=run)


def _tokens(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Verify, write, say what it is."""
    try:
        from rljob_workload.core.inspection import InspectionError, find
        from rljob_workload.huggingface.errors import ExportError
        from rljob_workload.huggingface.export import export
    except ModuleNotFoundError as error:
        raise UserError(f"the trainer is not installed here ({error.name} is missing); install rljob[workload]") from None
    try:
        checkpoint = find(options.checkpoint, "Full")
        with _bar(checkpoint.name) as progress:
            done = export(
                checkpoint,
                options.directory.resolve(),
                dtype=options.dtype,
                max_length=options.max_length,
                progress=progress,
            )
    except InspectionError as error:
        raise UserError(str(error), exit_code=error.exit_code) from None
    except ExportError as error:
        raise UserError(f"{options.checkpoint}: {error}", exit_code=1) from None
    what = "already holds" if done.already else "holds"
    print(f"{options.directory} {what} {checkpoint.name}: {done.architecture.family}, {done.parameters:,} parameters")
    return 0


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Shows bytes done on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task(name, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
