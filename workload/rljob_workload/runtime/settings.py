"""What one attempt of a job is: its name, its spec, its directory."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_api import names
from rljob_api.exitcodes import ExitCode
from rljob_api.findings import Finding, errors, render
from rljob_api.manifest import judge
from rljob_api.model_config import ModelFacts
from rljob_api.preflight import PreflightReport
from rljob_api.spec import RLJobSpec
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
    name = _required(environment, names.ENV_NAME)
    namespace = _required(environment, names.ENV_NAMESPACE)
    text = _required(environment, names.ENV_SPEC)
    number = _attempt_number(_required(environment, names.ENV_ATTEMPT))
    volume = Path(_required(environment, names.ENV_VOLUME))
    try:
        raw = json.loads(text)
    except ValueError as err:
        raise RunError(ExitCode.INVALID_SPEC, f"{names.ENV_SPEC} is not JSON: {err}") from err
    spec, warnings = checked_spec(name, raw)
    if not volume.is_dir():
        raise RunError(
            ExitCode.ENVIRONMENT_MISSING,
            f"{names.ENV_VOLUME}={volume} is no directory; mount the claim {spec.checkpoint.volume.claim_name!r} there",
        )
    directory = volume / spec.checkpoint.volume.sub_path / names.run_directory(namespace, name)
    source = environment.get(names.ENV_SOURCE)
    return Attempt(
        name,
        namespace,
        environment.get(names.ENV_UID, ""),
        number,
        spec,
        directory,
        warnings,
        volume=volume,
        source_volume=Path(source) if source else None,
        preflight=_preflight(environment.get(names.ENV_PREFLIGHT, "")),
        unloadable=frozenset(path.rpartition("/")[2] for path in environment.get(names.ENV_UNLOADABLE, "").split(",") if path),
        active_left=_seconds_left(environment.get(names.ENV_ACTIVE_SECONDS_LEFT, "")),
    )


def checked_spec(name: str, raw: Any) -> tuple[RLJobSpec, tuple[Finding, ...]]:
    """The spec, judged by the same rules as at admission; raises with every error in one message."""
    verdict = judge(name, raw)
    wrong = errors(verdict.findings)
    if wrong or verdict.spec is None:
        raise RunError(ExitCode.INVALID_SPEC, f"the spec is refused: {render(wrong)}")
    return verdict.spec, tuple(finding for finding in verdict.findings if finding.severity == "warning")


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


def _required(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise RunError(
            ExitCode.ENVIRONMENT_MISSING,
            f"the environment variable {name} is not set; the operator sets it, `rljob local` needs none",
        )
    return value


def _attempt_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, f"{names.ENV_ATTEMPT}={text!r} is not a number from 1")
    return int(text)


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
