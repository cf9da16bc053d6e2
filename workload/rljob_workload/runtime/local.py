"""`rljob local`: the same driver and actors on a Ray of this machine that lives as long as the run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rljob_api.exitcodes import ExitCode
from rljob_api.layout import layout_of
from rljob_api.names import (
    CONTROL_SAVE_PATH,
    CONTROL_STOP_PATH,
    PROGRESS_PATH,
    RESOURCE_AMOUNT,
    RESOURCE_HEAD,
    RESOURCE_NODE,
)
from rljob_api.spec import RLJobSpec
from rljob_workload.core.checkpoint import CheckpointError, RunDirectory, write_json
from rljob_workload.runtime import view
from rljob_workload.runtime.agent import agent_log
from rljob_workload.runtime.control import Access
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.guardian import Guardian
from rljob_workload.runtime.run import execute
from rljob_workload.runtime.settings import Attempt

log = logging.getLogger("rljob.local")

#: Bytes of Ray's shared memory: only batches travel.
OBJECT_STORE_BYTES = 100 * 2**20
#: In the run's directory while it runs: where its endpoints are, and their token.
CONTROL_FILE = "control.json"
TOKEN_FILE = "control-token"  # noqa: S105 - a file's name
_STATE = "local.json"
_LOCK = "local.lock"
#: The longest path of a unix socket, and what Ray puts below its directory (time and process id are part of it).
_SOCKET_PATH_BYTES = 107
_RAY_SOCKET = "/session_YYYY-mm-dd_HH-MM-SS_uuuuuu_{pid}/sockets/plasma_store"


def run_local(spec: RLJobSpec, *, name: str, namespace: str, directory: Path, show_progress: bool = True, port: int = 0) -> int:
    """Run one attempt in `directory` and return its exit code. Calling it again resumes. Ctrl-C gives 130."""
    _prepare_environment()
    directory = directory.resolve()
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_alone_in(directory))
            temporary = _temporary_directory()
            # The guardian has removed it by then, where there was one.
            held.callback(shutil.rmtree, temporary, ignore_errors=True)
            attempt = _next_attempt(spec, name, namespace, directory)
        except RunError as err:
            print(f"rljob: {err}", file=sys.stderr)
            return int(err.code)
        code = _run(attempt, temporary, show_progress=show_progress, port=port)
        _remember(attempt, code)
        return code


def _run(attempt: Attempt, temporary: str, *, show_progress: bool, port: int) -> int:
    show_bar = view.wanted(show_progress)
    token = attempt.directory / TOKEN_FILE
    guardian = Guardian(Path(temporary))
    try:
        return execute(
            attempt,
            start_ray=lambda: _start_ray(attempt.spec, temporary),
            mirror=attempt.directory / "progress.json",
            host="127.0.0.1",
            port=port,
            spread=False,
            show_log=show_progress and not show_bar,
            show_bar=show_bar,
            linger_seconds=0.0,
            access=Access(token),
            served=lambda port: _served(attempt, token, port, show_bar=show_bar),
        )
    finally:
        guardian.release()


def _served(attempt: Attempt, token: Path, port: int, *, show_bar: bool) -> contextlib.AbstractContextManager[None]:
    """The run is about to start: say where its agent's output goes, also where a bar takes the log's place."""
    if attempt.spec.environment.agent is not None:
        text = f"the agent's output is in {agent_log(attempt.directory, attempt.number)}"
        log.info("%s", text)
        if show_bar:
            print(f"rljob: {text}", file=sys.stderr)
    return _control_file(attempt.directory, token, port)


@contextlib.contextmanager
def _control_file(directory: Path, token: Path, port: int) -> Iterator[None]:
    """As long as the run lasts: its control endpoints, and the token for them in a file that only its owner can read."""
    base = f"http://127.0.0.1:{port}"
    addresses = {
        "progress": base + PROGRESS_PATH,
        "save": base + CONTROL_SAVE_PATH,
        "stop": base + CONTROL_STOP_PATH,
        "tokenFile": str(token),
    }
    path = directory / CONTROL_FILE
    try:
        token.unlink(missing_ok=True)  # one that somebody else may read would stay so
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        write_json(path, addresses)
        log.info("control endpoints are in %s, their token in %s", path, token)
    except OSError as err:
        # A full volume: the run says so by itself, at its first write that matters.
        log.warning("no control endpoints: cannot write %s: %s", err.filename or path, err.strerror or err)
    try:
        yield
    finally:
        for file_path in (path, token):
            with contextlib.suppress(IsADirectoryError):  # never ours, and named above
                file_path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory for this process: two runs in it would remove each other's checkpoints."""
    path = directory / _LOCK
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as err:
        raise _unusable(directory, err) from err
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise RunError(
                ExitCode.ENVIRONMENT_MISSING, f"{directory} is in use by {holder}; wait for its end or choose another --dir"
            ) from err
        except OSError as err:
            raise _unusable(directory, err) from err
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()}\n")
            file.flush()
        except OSError as err:
            raise _unusable(directory, err) from err
        yield


def _unusable(directory: Path, err: OSError) -> RunError:
    what = f"{err.strerror or err}" if err.filename in (None, str(directory)) else f"{err.filename}: {err.strerror or err}"
    message = f"cannot use {directory} as the run's directory: {what}; choose another --dir"
    return RunError(ExitCode.ENVIRONMENT_MISSING, message)


def _temporary_directory() -> str:
    """A directory of our own, short enough for the unix sockets that Ray puts below it."""
    parent = tempfile.gettempdir()
    room = _SOCKET_PATH_BYTES - len(_RAY_SOCKET.format(pid=os.getpid())) - len("/rljob-xxxxxxxx")
    if len(os.fsencode(parent)) > room:
        raise RunError(
            ExitCode.ENVIRONMENT_MISSING,
            f"the directory for temporary files, {parent}, is too long for Ray's sockets; set TMPDIR to one of at most "
            f"{room} bytes, such as /tmp",
        )
    try:
        return tempfile.mkdtemp(prefix="rljob-")
    except OSError as err:
        raise RunError(
            ExitCode.ENVIRONMENT_MISSING, f"cannot make a temporary directory in {parent}: {err.strerror or err}; set TMPDIR"
        ) from err


def _next_attempt(spec: RLJobSpec, name: str, namespace: str, directory: Path) -> Attempt:
    """The next attempt in that directory, on record before anything starts."""
    path = directory / _STATE
    try:
        fresh: dict[str, Any] = {"uid": str(uuid.uuid4()), "attempt": 0, "name": name}
        state = json.loads(path.read_text()) if path.exists() else fresh
        # With `Refuse` each command is a new job, as each `kubectl create` is: it does not go on from what is there.
        new = spec.checkpoint.on_existing == "Refuse"
        uid, number = str(fresh["uid"] if new else state["uid"]), int(state["attempt"]) + 1
        if state["name"] != name:
            raise RunError(
                ExitCode.ENVIRONMENT_MISSING,
                f"{directory} holds the run {state['name']!r}, not {name!r}; choose another --dir",
            )
        unloadable = frozenset(map(str, state.get("unloadable", [])))
        write_json(path, _state(uid, number, name, unloadable))
    except OSError as err:
        raise _unusable(directory, err) from err
    except (ValueError, KeyError, TypeError) as err:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, f"{path} is malformed ({err}); choose another --dir") from err
    return Attempt(name, namespace, uid, number, spec, directory, unloadable=unloadable)


def _state(uid: str, number: int, name: str, unloadable: Collection[str]) -> dict[str, Any]:
    state: dict[str, Any] = {"uid": uid, "attempt": number, "name": name}
    return state | ({"unloadable": sorted(unloadable)} if unloadable else {})


def _remember(attempt: Attempt, code: int) -> None:
    """What could not be loaded is passed over by the next attempt, which would fail in the same way for ever.

    Any other end forgets it: the run has gone on from another checkpoint, or somebody may have repaired this one.
    """
    unloadable: frozenset[str] = frozenset()
    try:
        if code == ExitCode.CHECKPOINT_UNLOADABLE:
            unloadable = attempt.unloadable
            entries = RunDirectory(attempt.directory).fence().entries
            # Without a token of its own the attempt has tried to load nothing; another run's checkpoint is not ours to judge.
            if entries and (last := entries[-1]).attempt == attempt.number and last.resumed_from and last.source is None:
                unloadable |= {last.resumed_from}
        if unloadable != attempt.unloadable:
            write_json(attempt.directory / _STATE, _state(attempt.uid, attempt.number, attempt.name, unloadable))
    except (OSError, CheckpointError) as err:
        log.warning("cannot note in %s what could not be loaded: %s", attempt.directory / _STATE, err)


def _start_ray(spec: RLJobSpec, temporary: str) -> dict[str, int]:
    """A private Ray: no dashboard, no telemetry, no token, nothing shared with another Ray of this machine.

    Returns the daemons without which the run hangs.
    """
    import ray
    from ray._private import worker

    layout = layout_of(spec)
    with _daemons_in_their_own_session():
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
    processes = worker._global_node.all_processes
    return {kind: processes[kind][0].process.pid for kind in ("gcs_server", "raylet")}


@contextlib.contextmanager
def _daemons_in_their_own_session() -> Iterator[None]:
    """Signals to the driver's process group (`timeout`, a service manager, Ctrl-C) must not reach Ray's daemons.

    They would end at once, and the driver with them, in the middle of the save that SIGTERM asks for. Ray has no setting
    for it, so the class that it starts daemons with is replaced meanwhile; Ray's release is pinned.
    """
    from ray._private import services

    original = services.ConsolePopen

    class OwnSession(original):  # type: ignore[misc,valid-type,unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "start_new_session": True})

    services.ConsolePopen = OwnSession
    try:
        yield
    finally:
        services.ConsolePopen = original


def _prepare_environment() -> None:
    """Settings that Ray reads when it is imported or when it starts its daemons."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Reap what a killed actor leaves behind.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's workers are the work here; it would give them the rest that other processes leave (a niceness of 15).
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every process would compile torch and Megatron again
