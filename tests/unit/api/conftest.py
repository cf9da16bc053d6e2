"""A valid spec to bend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/copy.yaml"
_MANIFEST = yaml.safe_load(EXAMPLE.read_text())

Bend = Callable[..., dict[str, Any]]


def bender(base: dict[str, Any]) -> Bend:
    """Makes copies of a spec with paths set: `bend(**{"trainer.nodes": 2})`."""

    def bend(**changes: Any) -> dict[str, Any]:
        spec = copy.deepcopy(base)
        for path, value in changes.items():
            node = spec
            *parents, last = path.split(".")
            for parent in parents:
                if node.get(parent) is None:
                    node[parent] = {}
                node = node[parent]
            node[last] = value
        return dict(spec)

    return bend


@pytest.fixture
def bent() -> Bend:
    """The example's spec with paths set."""
    return bender(_MANIFEST["spec"])
