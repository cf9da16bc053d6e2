"""`rljob local`: the same driver and actors on a Ray of this machine that lives as long as the run."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from rljob_api.exitcodes import ExitCode
from rljob_api.layout import layout_of
from rljob_api.names import RESOURCE_AMOUNT, RESOURCE_HEAD, RESOURCE_NODE
from rljob_api.spec import RLJobSpec
from rljob_workload.core.checkpoint import write_json
from rljob_workload.runtime import view
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.guardian import Guardian
from rljob_workload.runtime.run import execute
from rljob_workload.runtime.settings import Attempt

log = logging.getLogger("rljob.local")

#: Bytes of Ray's shared memory: only batches travel.
OBJECT_STORE_BYTES = 100 * 2**20
_STATE = "local.json"


def run_local(spec: RLJobSpec, *, name: str, namespace: str, directory: Path, show_progress: bool = True, port: int = 0) -> int:
    """Run one attempt in `directory` and return its exit code. Calling it again resumes. Ctrl-C gives 130."""
    _prepare_environment()
    directory = directory.resolve()
    try:
        attempt = _next_attempt(spec, name, namespace, directory)
    except RunError as err:
        print(f"rljob: {err}", file=sys.stderr)
        return int(err.code)
    show_bar = view.wanted(show_progress)
    temporary = tempfile.mkdtemp(prefix="rljob-")  # short: Ray puts unix sockets below it
    guardian = Guardian(Path(temporary))
    try:
        return execute(
            attempt,
            start_ray=lambda: _start_ray(spec, temporary),
            mirror=directory / "progress.json",
            host="127.0.0.1",
            port=port,
            spread=False,
            show_log=show_progress and not show_bar,
            show_bar=show_bar,
            linger_seconds=0.0,
        )
    finally:
        guardian.release()


def _next_attempt(spec: RLJobSpec, name: str, namespace: str, directory: Path) -> Attempt:
    """The next attempt in that directory, on record before anything starts."""
    path = directory / _STATE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fresh: dict[str, Any] = {"uid": str(uuid.uuid4()), "attempt": 0, "name": name}
        state = json.loads(path.read_text()) if path.exists() else fresh
        uid, number = str(state["uid"]), int(state["attempt"]) + 1
        if state["name"] != name:
            raise RunError(
                ExitCode.ENVIRONMENT_MISSING,
                f"{directory} holds the run {state['name']!r}, not {name!r}; choose another --dir",
            )
        write_json(path, {"uid": uid, "attempt": number, "name": name})
    except OSError as err:
        message = f"cannot use {directory} as the run's directory: {err.strerror or err}; choose another --dir"
        raise RunError(ExitCode.ENVIRONMENT_MISSING, message) from err
    except (ValueError, KeyError, TypeError) as err:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, f"{path} is malformed ({err}); choose another --dir") from err
    return Attempt(name, namespace, uid, number, spec, directory)


def _start_ray(spec: RLJobSpec, temporary: str) -> None:
    """A private Ray: no dashboard, no telemetry, no token, nothing shared with another Ray of this machine."""
    import ray

    layout = layout_of(spec)
    ray.init(
        address="local",
        num_cpus=layout.world,
        resources={RESOURCE_HEAD: RESOURCE_AMOUNT, RESOURCE_NODE: RESOURCE_AMOUNT},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        configure_logging=False,
        _temp_dir=temporary,
    )


def _prepare_environment() -> None:
    """Settings that Ray reads when it is imported or when it starts its daemons."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Reap what a killed actor leaves behind.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every process would compile torch and Megatron again
