"""`rljob local`: the same spec on this machine's own Ray, without Kubernetes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from rljob_api.findings import errors, render
from rljob_api.manifest import judge

from .errors import UserError
from .files import apply_settings, read_manifest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "local",
        help="run an RLJob on this machine, without Kubernetes",
        description="Run the job on this machine. Checkpoints, metrics.jsonl, progress.json and logs go to DIR; "
        "running it again with the same DIR resumes from the newest checkpoint.",
        epilog="exit status: the driver's, see docs/exit-codes.md\n"
        "example: rljob local examples/copy.yaml --dir /tmp/copy --set spec.algorithm.grpo.steps=100",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="JOB.yaml", help="YAML file with one RLJob; - reads standard input")
    parser.add_argument("--dir", metavar="DIR", type=Path, help="run directory (default: build/local/NAME)")
    parser.add_argument("--set", metavar="spec.path=value", action="append", default=[], help="change one field; repeatable")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Validate, then hand over to the trainer; returns the driver's exit code."""
    manifest = read_manifest(options.file)
    apply_settings(manifest, options.set)
    name = manifest["metadata"]["name"]
    namespace = _namespace(options.file, manifest["metadata"].get("namespace"))
    verdict = judge(name, manifest.get("spec"))
    if verdict.spec is None or errors(verdict.findings):
        raise UserError(f"{options.file}: {render(errors(verdict.findings))}", exit_code=1)
    try:
        from rljob_workload.runtime.local import run_local
    except ModuleNotFoundError as error:
        raise UserError(f"the trainer is not installed here ({error.name} is missing); install rljob[workload]") from None
    directory = options.dir or Path("build/local") / name
    return run_local(
        verdict.spec,
        name=name,
        namespace=namespace,
        directory=directory.resolve(),
        show_progress=not options.quiet,
    )


def _namespace(file: str, value: Any) -> str:
    """The manifest's namespace; it becomes part of paths and reports, so it is held to Kubernetes' rule."""
    if value is None:
        return "default"
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value):
        raise UserError(
            f"{file}: metadata.namespace: {value!r} is not a namespace: at most 63 lower-case letters, digits and dashes",
            exit_code=1,
        )
    return value
