"""The driver's part in the HTTP server: where it listens, and that it ends in order."""

from __future__ import annotations

import logging
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rljob_api.spec import RLJobSpec
from rljob_workload.runtime.launch import Actors
from rljob_workload.runtime.settings import Attempt
from rljob_workload.server.place import ServerPlace

log = logging.getLogger("rljob.driver")

#: For the collector to end its agent and take its server down.
CLOSE_SECONDS = 6.0


def server_place(attempt: Attempt, token_file: Path | None, *, spread: bool) -> ServerPlace | None:
    """None without a server. On the loopback device where this machine has the whole run, else where all its pods reach it."""
    if not attempt.spec.generation.server.enabled:
        return None
    host = ray.util.get_node_ip_address() if spread else "127.0.0.1"
    return ServerPlace(host, str(token_file or ""), attempt.name)


def close_server(spec: RLJobSpec, actors: Actors) -> None:
    """Let the collector end its agent and its server in order; what it does not manage dies with it."""
    if not spec.generation.server.enabled:
        return
    try:
        ray.get(actors.collector.close.remote(), timeout=CLOSE_SECONDS)
    except (RayActorError, RayTaskError, GetTimeoutError) as err:
        log.warning("the HTTP server was not closed in order: %s", type(err).__name__)
