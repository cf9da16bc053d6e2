"""kopf delivers objects; that is all it does here (the only importer of kopf).

Only `on.event` handlers, which write nothing to the user's object: no finalizer, no annotation, no retry, no diff. They hand
each object to a callback and are done; a job is judged later, as a whole, from the newest of everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import kopf

from rljob_api import names

from .kube import Connection

log = logging.getLogger("rljob.shell")

Deliver = Callable[[str, dict[str, Any], bool], None]
"""Called with the kind (`rljobs`, ...), the object, and whether it was deleted."""

_KINDS = {
    "rljobs": (names.GROUP, names.VERSION),
    "rayclusters": ("ray.io", "v1"),
    "pods": ("", "v1"),
}


class WatchError(Exception):
    """kopf gave up, whatever the reason: its errors are private classes. A new process starts from a clean list."""


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf copies each object of each event, twice, for diffs that none of our handlers asks for: more than all the rest."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """What of the object a diff would be made of: nothing."""
        return cast(kopf.BodyEssence, {})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """The state before: unknown."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is written to the user's object."""


class _NoProgress(kopf.ProgressStorage):
    """The same for the progress of handlers that kopf would retry: ours are done at once."""

    def fetch(self, *, key: Any, body: kopf.Body) -> None:
        """No handler has any."""

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Nothing is written to the user's object."""

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """There is nothing to take back."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: Any) -> None:
        """Nothing is written to the user's object."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Without what was stored."""
        return essence


def _registry(deliver: Deliver, login: Callable[[], Awaitable[Connection]], with_kuberay: bool) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.ConnectionInfo:
        connection = await login()
        return kopf.ConnectionInfo(
            server=connection.server,
            ca_path=connection.ca_path,
            insecure=connection.insecure,
            scheme="Bearer" if connection.token else None,
            token=connection.token,
            certificate_path=connection.certificate_path,
            private_key_path=connection.key_path,
        )

    for kind, (group, version) in _KINDS.items():
        if kind != "rayclusters" or with_kuberay:
            handler = _handler(kind, deliver)
            kopf.on.event(group, version, kind, registry=registry, id=kind)(handler)
    return registry


def _handler(kind: str, deliver: Deliver) -> Callable[..., Awaitable[None]]:
    async def handle(event: Any, **_: Any) -> None:
        deliver(kind, event["object"], event["type"] == "DELETED")

    return handle


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = _NoProgress()
    settings.watching.chunk_size = 500
    # Server-side: an operator that holds every pod of the cluster grows with the cluster.
    settings.watching.label_selectors["", "v1", "pods"] = names.LABEL_JOB
    settings.watching.label_selectors["ray.io", "v1", "rayclusters"] = names.LABEL_JOB
    return settings


async def watch(
    *,
    deliver: Deliver,
    login: Callable[[], Awaitable[Connection]],
    namespaces: tuple[str, ...],
    with_kuberay: bool,
    stop: asyncio.Event,
) -> None:
    """Deliver until stopped by `stop`, SIGTERM or SIGINT. Raises WatchError when a watch dies for good."""
    for name in ("kopf.objects", "kopf._core.reactor.running", "kopf._core.engines.activities", "kopf.activities"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        await kopf.operator(
            registry=_registry(deliver, login, with_kuberay),
            settings=_settings(),
            identity=cast(Any, names.MANAGED_BY),  # kopf would ask for the user's name, which a container may not have
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )
    except Exception as error:
        log.debug("kopf ended", exc_info=True)
        raise WatchError(f"the watches of the API server ended: {type(error).__name__}: {error}") from error
