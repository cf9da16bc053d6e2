"""Whose attempt it is, read from the environment variables that the operator sets: for the preflight and the driver."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api import names
from rljob_api.findings import Finding, errors, render
from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec


class BadEnvironmentError(Exception):
    """A variable is missing, or names what is not there."""


class BadSpecError(BadEnvironmentError):
    """The spec is no JSON, or breaks a rule; the message has every error."""


@dataclass(frozen=True, slots=True)
class Given:
    """One attempt of a job."""

    name: str
    namespace: str
    uid: str
    attempt: int
    spec: RLJobSpec
    warnings: tuple[Finding, ...]
    #: The root of the mounted claim, and that of the claim of checkpoint.from where it is mounted.
    volume: Path
    source_volume: Path | None
    #: Checkpoints that earlier attempts could not load.
    unloadable: frozenset[str]

    @property
    def directory(self) -> Path:
        """The run's directory on the volume."""
        return self.volume / self.spec.checkpoint.volume.sub_path / names.run_directory(self.namespace, self.name)


def read(environment: Mapping[str, str]) -> Given:
    """The attempt that the operator describes. Raises BadEnvironmentError."""
    name, namespace = required(environment, names.ENV_NAME), required(environment, names.ENV_NAMESPACE)
    attempt = required(environment, names.ENV_ATTEMPT)
    if not attempt.isascii() or not attempt.isdecimal() or int(attempt) < 1:
        raise BadEnvironmentError(f"{names.ENV_ATTEMPT}={attempt!r} is not a number from 1")
    try:
        raw = json.loads(required(environment, names.ENV_SPEC))
    except ValueError as err:
        raise BadSpecError(f"{names.ENV_SPEC} is not JSON: {err}") from err
    spec, warnings = checked_spec(name, raw)
    uid, volume = required(environment, names.ENV_UID), Path(required(environment, names.ENV_VOLUME))
    source = environment.get(names.ENV_SOURCE)
    origin = spec.checkpoint.from_
    claims = {names.ENV_VOLUME: (volume, spec.checkpoint.volume.claim_name)}
    if source:
        claims[names.ENV_SOURCE] = Path(source), origin.claim_name if origin is not None else "of checkpoint.from"
    for variable, (path, claim) in claims.items():
        if not path.is_dir():
            raise BadEnvironmentError(f"{variable}={path} is no directory; mount the claim {claim!r} there")
    return Given(
        name=name,
        namespace=namespace,
        uid=uid,
        attempt=int(attempt),
        spec=spec,
        warnings=warnings,
        volume=volume,
        source_volume=Path(source) if source else None,
        unloadable=frozenset(path.rpartition("/")[2] for path in environment.get(names.ENV_UNLOADABLE, "").split(",") if path),
    )


def checked_spec(name: str, raw: object) -> tuple[RLJobSpec, tuple[Finding, ...]]:
    """The spec and its warnings, judged by the same rules as at admission. Raises BadSpecError with every error."""
    verdict = judge(name, raw)
    wrong = errors(verdict.findings)
    if wrong or verdict.spec is None:
        raise BadSpecError(f"the spec is refused: {render(wrong)}")
    return verdict.spec, tuple(finding for finding in verdict.findings if finding.severity == "warning")


def required(environment: Mapping[str, str], name: str) -> str:
    """A variable's value. Raises BadEnvironmentError where it is missing or empty."""
    value = environment.get(name, "")
    if not value:
        raise BadEnvironmentError(f"the environment variable {name} is not set; the operator sets it, `rljob local` needs none")
    return value
