"""Reading manifests from files, with `--set spec.path=value` applied."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from rljob_api.manifest import UnreadableManifestError, parse_manifest

from .errors import UserError


def read_manifest(path: str) -> dict[str, Any]:
    """The RLJob in a file, or on standard input for `-`. Raises UserError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    try:
        manifest = parse_manifest(text)
    except UnreadableManifestError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(manifest.get("metadata"), dict) or not isinstance(manifest["metadata"].get("name"), str):
        raise UserError(f"{path}: metadata.name is missing")
    return manifest


def apply_settings(manifest: dict[str, Any], settings: list[str]) -> None:
    """Apply `spec.path=value` settings in place; values are YAML. Raises UserError."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        names = path.split(".")
        if not equals or names[0] != "spec" or len(names) < 2 or not all(names):
            raise UserError(f"--set {setting}: expected spec.path=value, such as spec.algorithm.grpo.steps=20")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"--set {setting}: {text!r} is not YAML") from None
        node: Any = manifest
        for name in names[:-1]:
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
            if not isinstance(node, dict):
                raise UserError(f"--set {setting}: {name} is not an object in the manifest")
        node[names[-1]] = value
