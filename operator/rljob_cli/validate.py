"""`rljob validate`: the verdict of the rule table on files, without a cluster."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api import names
from rljob_api.findings import Finding, errors
from rljob_api.manifest import judge
from rljob_api.model_config import MAX_BYTES, ModelFacts, check_model, read_config
from rljob_api.model_details import ModelConfigError
from rljob_api.reasons import REASONS
from rljob_api.rules import RULES
from rljob_api.validation_page import EXTRA_RULES, explain

from .errors import UserError
from .yaml_source import MAX_BYTES as MAX_TEXT
from .yaml_source import Document, Place, SourceError, read_documents

_NOT_SUPPORTED = "NotSupportedYet"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "validate",
        help="check manifests against the rules, without a cluster",
        description="Check RLJob manifests: schema, parallel layout, batch arithmetic, and what this version supports. A file "
        "may hold several documents; those of other kinds are passed over, and so is a file that holds nothing else.",
        epilog="exit status: 0 valid (warnings allowed), 1 invalid, 2 unreadable, or no RLJob in any file\n"
        "example: rljob validate examples/*.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="YAML or JSON file with RLJobs; - reads standard input")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="text (default) or a JSON list")
    parser.add_argument("--model", metavar="DIR", type=Path, help="compare with DIR/config.json of a Hugging Face model")
    parser.add_argument(
        "--explain", metavar="NAME", help="say what a rule, or the rules behind a condition's reason, ask for, and why, and end"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Job:
    """One RLJob of a file."""

    name: str
    label: str
    findings: list[tuple[Finding, Place]]

    @property
    def broken(self) -> list[Finding]:
        """Errors."""
        return errors(finding for finding, _ in self.findings)


def run(options: argparse.Namespace) -> int:
    """Judge each file; 0, 1 or 2 as the help says."""
    if options.explain:
        return _explain(options.explain)
    if not options.files:
        raise UserError("validate needs a FILE (- reads standard input), or --explain NAME")
    facts = _read_model(options.model) if options.model else None
    rows: list[dict[str, Any]] = []
    without: list[str] = []
    status = judged = 0
    for file in options.files:
        try:
            jobs = list(_jobs(file, facts))
        except UserError as error:
            print(_clean(f"rljob: {error}"), file=sys.stderr)
            status = 2
            continue
        judged += len(jobs)
        without += [] if jobs else [file]
        for job in jobs:
            status = max(status, 1 if job.broken else 0)
            rows += [{"file": file, **finding.to_wire(), "line": at.line, "column": at.column} for finding, at in job.findings]
            if options.output == "text":
                _print(job, file)
    if options.output == "json":
        print(json.dumps(rows, indent=2))
    for file in without:
        note = f"skipped, it holds no {names.KIND}" if judged else f"no object of kind {names.KIND} in it"
        print(_clean(f"rljob: {file}: {note}"), file=sys.stderr)
    return status if judged else 2


def _print(job: Job, file: str) -> None:
    for finding, at in job.findings:
        print(_clean(f"{file}:{at.line}:{at.column}: {finding.severity}: {finding.path}: {finding.message} [{finding.rule}]"))
    broken = job.broken
    if not broken:
        print(_clean(f"{job.label}: valid"))
    elif all(finding.reason == _NOT_SUPPORTED for finding in broken):
        print(_clean(f"{job.label}: accepted by every rule, but this version does not honour {len(broken)} of its fields yet"))
    else:
        print(_clean(f"{job.label}: invalid, {len(broken)} error{'s' if len(broken) > 1 else ''}"))


def _jobs(file: str, facts: ModelFacts | None) -> Iterator[Job]:
    """Every RLJob of a file, judged; none where all its objects are of other kinds. Raises UserError for what can't be read."""
    try:
        documents = [document for document in read_documents(_text(file)) if _is_job(file, document)]
    except SourceError as error:
        raise UserError(f"{file}:{error}" if error.args[0][:1].isdigit() else f"{file}: {error}") from None
    for document in documents:
        version = document.value.get("apiVersion")
        if version != names.API_VERSION:
            raise UserError(f"{file}: apiVersion is {_short(version)}; this version reads {names.API_VERSION}")
    for document in documents:
        yield _judged(file, document, facts, alone=len(documents) == 1)


def _is_job(file: str, document: Document) -> bool:
    """Whether it is for us to judge. Raises UserError for what was meant to be: a typo must not pass for another kind."""
    value = document.value
    if value is None:
        return False
    if not isinstance(value, dict):
        raise UserError(f"{file}:{document.place(()).line}: not an object: {_short(value)}")
    kind, version = value.get("kind"), value.get("apiVersion")
    if kind == names.KIND:
        return True
    at = f"{file}:{document.place(('kind',)).line}"
    if not isinstance(kind, str) or not kind:
        raise UserError(f"{at}: kind is missing" if "kind" not in value else f"{at}: kind is {_short(kind)}, not a name")
    if str(version).startswith(f"{names.GROUP}/") or kind.lower() == names.KIND.lower():
        raise UserError(f"{at}: kind is {_short(kind)}; this version reads {names.KIND}")
    if kind == "List":
        raise UserError(f"{at}: kind is 'List'; write its items as documents of their own, with --- between them")
    return False


def _text(file: str) -> str:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_TEXT + 1)
        else:
            with Path(file).open("rb") as stream:
                data = stream.read(MAX_TEXT + 1)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file}: {'not UTF-8 text' if isinstance(error, UnicodeDecodeError) else error}") from None


def _judged(file: str, document: Document, facts: ModelFacts | None, *, alone: bool) -> Job:
    name = _name(file, document)
    verdict = judge(name, document.value.get("spec"))
    found = [
        Finding("schema", "SpecUnreadable", "error", _dotted(path), "is given twice; the last one would count")
        for path in document.repeated
    ]
    found += verdict.findings
    if facts is not None and verdict.spec is not None:
        found += check_model(verdict.spec, facts)
    placed = [(finding, document.place(_steps(finding.path))) for finding in found]
    return Job(name, file if alone else f"{file}: {name}", placed)


def _name(file: str, document: Document) -> str:
    """metadata.name, or a name such as generateName would give. Raises UserError where there is neither."""
    metadata = document.value.get("metadata")
    if isinstance(metadata, dict):
        if isinstance(metadata.get("name"), str) and metadata["name"]:
            return str(metadata["name"])
        if isinstance(metadata.get("generateName"), str) and metadata["generateName"]:
            return f"{metadata['generateName']}abcde"
    raise UserError(f"{file}:{document.place(('metadata', 'name')).line}: metadata.name is missing")


def _dotted(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _steps(path: str) -> tuple[str | int, ...]:
    """`spec.rules[0].name` as steps."""
    return tuple(int(index) if index else word for index, word in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path))


def _explain(wanted: str) -> int:
    """A rule by its id, or a condition's reason: the rules that give it, or what it means."""
    every = (*RULES, *EXTRA_RULES)
    texts = [f"{rule.id}\n\n{explain(rule)}" for rule in every if wanted in (rule.id, rule.reason)]
    if not texts:
        meanings = (one for (_, name), one in REASONS.items() if name == wanted)
        texts = [f"{one.condition}={one.status}, reason {one.name}: {one.meaning}" for one in meanings]
    if not texts:
        ids = ", ".join(sorted(rule.id for rule in every))
        raise UserError(f"--explain {_short(wanted)}: no such rule, and no condition's reason; the rules are {ids}")
    print("\n\n".join(texts))
    return 0


def _read_model(directory: Path) -> ModelFacts:
    path = directory / "config.json"
    try:
        with path.open("rb") as stream:
            return read_config(stream.read(MAX_BYTES).decode())
    except OSError as error:
        raise UserError(f"--model: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--model: {path}: not UTF-8 text") from None
    except ModelConfigError as error:
        raise UserError(f"--model: {path}: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _clean(text: str) -> str:
    """Without what a terminal would act on or can't show."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
