"""`python -m rljob_workload.preflight`: everything by environment; the report goes to the termination log."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rljob_api import names
from rljob_api.exitcodes import ExitCode
from rljob_api.preflight import PreflightReport
from rljob_workload.preflight.environment import BadEnvironmentError, read
from rljob_workload.preflight.judge import Order, preflight
from rljob_workload.preflight.report import encode, fitted


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
    given = read(environment)
    return Order(
        spec=given.spec,
        name=given.name,
        namespace=given.namespace,
        uid=given.uid,
        attempt=given.attempt,
        directory=given.directory,
        volume=given.volume,
        source_volume=given.source_volume,
        unloadable=given.unloadable,
        now=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


if __name__ == "__main__":
    sys.exit(main())
