"""A run with one checkpoint, for tests of what begins with one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rljob_workload.core.checkpoint import Checkpoint, Origin, Owner, RunDirectory


def published(root: Path, facts: Mapping[str, Any], write: Callable[[Path], object], step: int = 1) -> Checkpoint:
    """A checkpoint with the weights that `write` puts into its directory, and these facts about its model."""
    run = RunDirectory(root)
    run.create()
    token = run.take_token(Owner(namespace="default", name="copy", uid="u", attempt=1), None).token
    tmp = run.begin(step, token)
    write(tmp)
    return run.publish(tmp, step, token, {}, Origin(facts=dict(facts)))


def copies_of(saved: Path) -> Callable[[Path], object]:
    """The `write` of weights that were saved elsewhere."""
    return lambda directory: shutil.copytree(saved, directory, dirs_exist_ok=True)
