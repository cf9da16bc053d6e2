"""What one attempt of a job is: its name, its spec, its directory."""

from __future__ import annotations

import importlib.metadata
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rljob_api import names
from rljob_api.exitcodes import ExitCode
from rljob_api.findings import Finding
from rljob_api.model_config import ModelFacts
from rljob_api.preflight import PreflightReport
from rljob_api.spec import RLJobSpec
from rljob_workload.preflight.environment import BadEnvironmentError, BadSpecError, read
from rljob_workload.runtime.errors import RunError

#: The release whose private call sites the CPU shim knows (`megatron.shim.patch_points`).
MEGATRON_VERSION = "0.19.2"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One driver life."""

    name: str
    namespace: str
    uid: str
    number: int
    spec: RLJobSpec
    #: The run's directory: checkpoints, logs, metrics.
    directory: Path
    warnings: tuple[Finding, ...] = ()
    #: The root of the mounted claim; None: there is none (`rljob local`).
    volume: Path | None = None
    #: The root of the claim of checkpoint.from, where it is mounted.
    source_volume: Path | None = None
    #: What the operator's preflight decided; None: the driver looks at the volume itself.
    preflight: PreflightReport | None = None
    #: Checkpoints that earlier attempts could not load.
    unloadable: frozenset[str] = frozenset()
    #: What the config.json of model.huggingFace says; the spec's shape is its own then. None: the spec says everything.
    model: ModelFacts | None = None
    #: Seconds of deadlines.activeSeconds that were left at this attempt's beginning; None where nobody has said. And that
    #: beginning, on the monotonic clock.
    active_left: float | None = None
    began: float = field(default_factory=time.monotonic)


def attempt_from_environment(environment: Mapping[str, str] = os.environ) -> Attempt:
    """The attempt that the operator describes in environment variables."""
    try:
        given = read(environment)
    except BadSpecError as err:
        raise RunError(ExitCode.INVALID_SPEC, str(err)) from err
    except BadEnvironmentError as err:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, str(err)) from err
    return Attempt(
        given.name,
        given.namespace,
        given.uid,
        given.attempt,
        given.spec,
        given.directory,
        given.warnings,
        volume=given.volume,
        source_volume=given.source_volume,
        preflight=_preflight(environment.get(names.ENV_PREFLIGHT, "")),
        unloadable=given.unloadable,
        active_left=_seconds_left(environment.get(names.ENV_ACTIVE_SECONDS_LEFT, "")),
    )


def check_versions() -> None:
    """The CPU shim and Ray's protocol each belong to exactly one release."""
    for package, wanted in {"megatron-core": MEGATRON_VERSION, "ray": names.RAY_VERSION}.items():
        installed = importlib.metadata.version(package)
        if installed != wanted:
            raise RunError(
                ExitCode.VERSION_MISMATCH, f"{package} {installed} is installed; this version needs {package}=={wanted}"
            )


def _preflight(text: str) -> PreflightReport | None:
    if not text:
        return None
    try:
        return PreflightReport.model_validate_json(text)
    except ValueError as err:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, f"{names.ENV_PREFLIGHT} is no preflight report: {err}") from err


def _seconds_left(text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise RunError(ExitCode.ENVIRONMENT_MISSING, f"{names.ENV_ACTIVE_SECONDS_LEFT}={text!r} is not a number of seconds")
    return seconds
