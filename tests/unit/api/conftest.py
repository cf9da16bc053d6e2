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


@pytest.fixture
def bent() -> Bend:
    """The example's spec with paths set: `bent(**{"trainer.nodes": 2})`."""

    def bend(**changes: Any) -> dict[str, Any]:
        spec = copy.deepcopy(_MANIFEST["spec"])
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
