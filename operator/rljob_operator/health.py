"""What the operator says about itself over HTTP: `/healthz` (live), `/readyz` (ready) and `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

from .workqueue import WorkQueue

_QUEUE_SECONDS = 180.0
_PASS_SECONDS = 600.0
_RESYNCS_MISSED = 3


class Health:
    """Judges the resync and the queue."""

    def __init__(self, queue: WorkQueue, resync_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._resync_seconds = resync_seconds
        self._clock = clock
        self._resynced = clock()
        self.waiting = ""
        """What the operator waits for before it can begin; empty when it works."""
        self.note = ""
        """What people should know though nothing is wrong with this process."""

    def resynced(self) -> None:
        """A complete listing has succeeded."""
        self._resynced = self._clock()

    @property
    def resync_age(self) -> float:
        """Seconds since the last complete listing (or since the start)."""
        return self._clock() - self._resynced

    def problems(self) -> list[str]:
        """What is stuck, in words; empty when nothing is. Waiting for the cluster is no reason to be restarted."""
        if self.waiting:
            return []
        found = []
        if self.resync_age > _RESYNCS_MISSED * self._resync_seconds + 60:
            found.append(f"no complete listing has succeeded for {self.resync_age:.0f} s")
        if (late := self._queue.overdue()) > _QUEUE_SECONDS:
            found.append(f"a job has been waiting in the queue for {late:.0f} s")
        if (busy := self._queue.longest_pass()) > _PASS_SECONDS:
            found.append(f"a pass over a job has been going on for {busy:.0f} s")
        return found

    def unready(self) -> list[str]:
        """Why jobs are not served now."""
        return [self.waiting] if self.waiting else self.problems()


async def serve(health: Health, port: int, metrics: Callable[[], str] = str) -> web.AppRunner:
    """Serve; call `cleanup` on the answer to stop. Raises OSError when the port is taken."""

    def answer(problems: list[str]) -> web.Response:
        return web.Response(status=503 if problems else 200, text="; ".join(problems) or health.note or "ok")

    async def healthz(_: web.Request) -> web.Response:
        return answer(health.problems())

    async def readyz(_: web.Request) -> web.Response:
        return answer(health.unready())

    async def numbers(_: web.Request) -> web.Response:
        return web.Response(text=metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", numbers)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()  # noqa: S104  the kubelet asks from outside the pod
    except OSError:
        await runner.cleanup()
        raise
    return runner
