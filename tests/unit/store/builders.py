"""Checkpoints as a trainer writes them, only small."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import yaml

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_workload.core.checkpoint import Checkpoint, Origin, Owner, RunDirectory
from rljob_workload.core.store.facts import facts_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "copy.yaml"

#: 12 prompts handed out, 4 of them trained.
LEDGER: dict[str, Any] = {
    "version": 2,
    "next_ordinal": 12,
    "frontier_ordinal": 4,
    "trained": 4,
    "filtered": 0,
    "skipped": {"BadRow": 1},
    "skipped_names": {"BadRow": [6]},
    "at_risk": 3,
    "window": "b,i,d,b,2i,b,r:1",
    "last_commit": {"step": 1, "count": 4, "digest": "x"},
}
COLLECTOR: dict[str, Any] = {
    "version": 1,
    "ledger": LEDGER,
    "source": {"kind": "seekable", "base_ordinal": 8},
    "buffer": [
        {
            "ordinal": ordinal,
            "attempt": 0,
            "answers": [
                {
                    "tokens": [5, 6, ordinal],
                    "logprobs": [-0.5, -0.25, -0.1],
                    "versions": [[0, 0]],
                    "reward": 0.5,
                    "correct": False,
                },
                {"tokens": [], "logprobs": [], "versions": [[0, 1]], "reward": 1.0, "correct": True},
            ],
        }
        for ordinal in (4, 7, 10)
    ],
}


@functools.cache
def _example() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())["spec"]
    return spec


@functools.cache
def _facts() -> dict[str, Any]:
    return facts_of(spec_with())


def raw_spec(**changes: Any) -> dict[str, Any]:
    """The example's spec; `checkpoint__verify="Full"` sets one field."""
    raw = copy.deepcopy(_example())
    for path, value in changes.items():
        node = raw
        *above, last = path.split("__")
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value
    return raw


def spec_with(**changes: Any) -> RLJobSpec:
    """The parsed spec, whether or not this version honours all of it."""
    spec = judge("copy", raw_spec(**changes)).spec
    assert spec is not None
    return spec


def owner(attempt: int = 1, uid: str = "u1", name: str = "copy") -> Owner:
    return Owner(namespace="default", name=name, uid=uid, attempt=attempt)


def save(run: RunDirectory, step: int, token: int = 1, **more: Any) -> Checkpoint:
    """A published checkpoint with a shard, a nested file and the collector's snapshot."""
    tmp = run.begin(step, token).name
    run.files.make_directory(f"{tmp}/weights")
    run.files.write_new(f"{tmp}/weights/shard", b"x" * (100 + step))
    run.files.write_new(f"{tmp}/random.json", b"{}")
    origin = Origin(
        writer=more.pop("writer", owner(token)),
        parent=more.pop("parent", None),
        facts=_facts(),
    )
    state = {"collector": COLLECTOR, "totals": {"trained_prompts": 4}, **more}
    return run.publish(run.root / tmp, step, token, state, origin)
