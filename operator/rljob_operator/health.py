"""`/healthz`: fails when the operator has stopped doing its work though its process lives."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

from .workqueue import WorkQueue

_QUEUE_SECONDS = 180.0
_RESYNCS_MISSED = 3


class Health:
    """Judges the resync and the queue."""

    def __init__(self, queue: WorkQueue, resync_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._resync_seconds = resync_seconds
        self._clock = clock
        self._resynced = clock()

    def resynced(self) -> None:
        """A complete listing has succeeded."""
        self._resynced = self._clock()

    def problems(self) -> list[str]:
        """What is stuck, in words; empty when nothing is."""
        found = []
        age = self._clock() - self._resynced
        if age > _RESYNCS_MISSED * self._resync_seconds + 60:
            found.append(f"no complete listing has succeeded for {age:.0f} s")
        if (late := self._queue.overdue()) > _QUEUE_SECONDS:
            found.append(f"a job has been waiting in the queue for {late:.0f} s")
        return found


async def serve(health: Health, port: int) -> web.AppRunner:
    """Serve /healthz; call `cleanup` on the answer to stop. Raises OSError when the port is taken."""

    async def healthz(_: web.Request) -> web.Response:
        problems = health.problems()
        return web.Response(status=503 if problems else 200, text="; ".join(problems) or "ok")

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()  # noqa: S104  the kubelet asks from outside the pod
    except OSError:
        await runner.cleanup()
        raise
    return runner
