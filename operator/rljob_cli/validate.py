"""`rljob validate`: the verdict of the rule table on files, without a cluster."""

from __future__ import annotations

import argparse
import json
import sys

from rljob_api.findings import errors
from rljob_api.manifest import judge

from .errors import UserError
from .files import read_manifest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "validate",
        help="check manifests against the rules, without a cluster",
        description="Check RLJob manifests: schema, parallel layout, batch arithmetic, and what this version supports.",
        epilog="exit status: 0 valid (warnings allowed), 1 invalid, 2 unreadable\nexample: rljob validate examples/copy.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML file with one RLJob; - reads standard input")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="text (default) or a JSON list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Judge each file; 0, 1 or 2 as the help says."""
    rows: list[dict[str, str]] = []
    status = 0
    for path in options.files:
        try:
            manifest = read_manifest(path)
        except UserError as error:
            print(f"rljob: {error}", file=sys.stderr)
            status = 2
            continue
        findings = judge(manifest["metadata"]["name"], manifest.get("spec")).findings
        rows += [{"file": path, **finding.to_wire()} for finding in findings]
        if errors(findings):
            status = max(status, 1)
        if options.output == "text":
            for finding in findings:
                print(f"{path}: {finding.severity}: {finding.path}: {finding.message} [{finding.rule}]")
            if not errors(findings):
                print(f"{path}: valid")
    if options.output == "json":
        print(json.dumps(rows, indent=2))
    return status
