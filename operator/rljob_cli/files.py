"""Reading manifests from files, with `--set spec.path=value` applied."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import yaml

from rljob_api import names

from .errors import UserError
from .yaml_source import SourceError, read_documents


def read_manifest(path: str) -> dict[str, Any]:
    """The RLJob in a file, or on standard input for `-`. Raises UserError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    try:
        jobs = [document.value for document in read_documents(text) if _is_job(document.value)]
    except SourceError as error:
        raise UserError(f"{path}: {error}") from None
    if len(jobs) != 1:
        found = f"{len(jobs)} objects" if jobs else "no object"
        raise UserError(f"{path}: {found} of kind {names.KIND} in it; exactly one can be run")
    manifest: dict[str, Any] = jobs[0]
    if manifest.get("apiVersion") != names.API_VERSION:
        raise UserError(f"{path}: apiVersion is {manifest.get('apiVersion')!r}; this version reads {names.API_VERSION}")
    if not isinstance(manifest.get("metadata"), dict) or not isinstance(manifest["metadata"].get("name"), str):
        raise UserError(f"{path}: metadata.name is missing")
    return manifest


def _is_job(value: Any) -> bool:
    return isinstance(value, dict) and value.get("kind") == names.KIND


def apply_settings(manifest: dict[str, Any], settings: list[str]) -> None:
    """Apply `spec.path=value` settings in place; values are YAML. Raises UserError."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        parts = path.split(".")
        if not equals or parts[0] != "spec" or len(parts) < 2 or not all(parts):
            raise UserError(f"--set {setting}: expected spec.path=value, such as spec.algorithm.grpo.steps=20")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that is none, a number without end
            raise UserError(f"--set {setting}: {text!r} is not YAML") from None
        if isinstance(value, float | datetime.date):
            # The spec holds neither floats nor dates: numbers that are no integers are strings there.
            value = text.strip()
        node: Any = manifest
        for name in parts[:-1]:
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
            if not isinstance(node, dict):
                raise UserError(f"--set {setting}: {name} is not an object in the manifest")
        node[parts[-1]] = value
