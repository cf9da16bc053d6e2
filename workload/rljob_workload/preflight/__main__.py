"""`python -m rljob_workload.preflight`: everything by environment; the report goes to the termination log."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rljob_api import names
from rljob_api.exitcodes import ExitCode
from rljob_api.findings import errors, render
from rljob_api.manifest import judge
from rljob_api.preflight import PreflightReport
from rljob_workload.preflight.judge import Order, preflight
from rljob_workload.preflight.report import encode, fitted


class BadEnvironmentError(Exception):
    """The pod was not made as it must be; names the variable."""


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Exit status 0 whenever there is a report: a refusal is a result too."""
    try:
        report = preflight(order_from(environment))
    except BadEnvironmentError as err:
        report = fitted(PreflightReport(outcome="Unusable"), message=str(err))
    text = encode(report)
    print(text, flush=True)
    path = environment.get(names.ENV_TERMINATION_LOG) or names.TERMINATION_LOG
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as err:
        print(f"cannot write the report to {path}: {err.strerror or err}", file=sys.stderr)
        return int(ExitCode.ENVIRONMENT_MISSING)
    return 0


def order_from(environment: Mapping[str, str]) -> Order:
    """The order that the environment describes. Raises BadEnvironmentError."""
    name, namespace = _required(environment, names.ENV_NAME), _required(environment, names.ENV_NAMESPACE)
    attempt = _required(environment, names.ENV_ATTEMPT)
    if not attempt.isascii() or not attempt.isdecimal() or int(attempt) < 1:
        raise BadEnvironmentError(f"{names.ENV_ATTEMPT}={attempt!r} is not a number from 1")
    try:
        verdict = judge(name, json.loads(_required(environment, names.ENV_SPEC)))
    except ValueError as err:
        raise BadEnvironmentError(f"{names.ENV_SPEC} is not JSON: {err}") from err
    if verdict.spec is None or errors(verdict.findings):
        raise BadEnvironmentError(f"the spec is refused: {render(errors(verdict.findings))}")
    volume = Path(_required(environment, names.ENV_VOLUME))
    source = environment.get(names.ENV_SOURCE)
    for variable, path in {names.ENV_VOLUME: volume, names.ENV_SOURCE: Path(source) if source else volume}.items():
        if not path.is_dir():
            raise BadEnvironmentError(f"{variable}={path} is no directory; mount the claim there")
    return Order(
        spec=verdict.spec,
        name=name,
        namespace=namespace,
        uid=_required(environment, names.ENV_UID),
        attempt=int(attempt),
        directory=volume / verdict.spec.checkpoint.volume.sub_path / names.run_directory(namespace, name),
        volume=volume,
        source_volume=Path(source) if source else None,
        unloadable=frozenset(path.rpartition("/")[2] for path in environment.get(names.ENV_UNLOADABLE, "").split(",") if path),
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _required(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise BadEnvironmentError(f"the environment variable {name} is not set; the operator sets it")
    return value


if __name__ == "__main__":
    sys.exit(main())
