"""An API server that has a bad day: the same life comes to the same end, and the operator is never restarted by it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from .conftest import Space, eventually, write_kubeconfig
from .crash import CrashProxy, Life
from .gate import Gate

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

FIRST_CUT = 40
"""The request at which an outage begins: the operator has started by then, and the job has only just come."""

OUTAGE_SECONDS = 15.0


class Storm(CrashProxy):
    """Answers some requests itself, in the way that `kind` says."""

    def __init__(self, space: Space, kind: str) -> None:
        super().__init__(space, None)
        self.kind = kind
        self.hits = 0
        self._space = space
        self._seen = 0
        self._outage = 0.0

    async def prepare(self) -> str:
        """Begin to forward."""
        self._connection = await self._space.kube.connection()
        return await self.start()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        self._seen += 1
        watch = "watch" in request.query
        match self.kind:
            case "slow" if not watch:
                self.hits += 1
                await asyncio.sleep(1.0)
            case "429" | "500" if not request.path.startswith("/ray/") and self._seen % 3 == 0:
                self.hits += 1
                return refused(int(self.kind), "TooManyRequests" if self.kind == "429" else "InternalError")
            case "conflict" if request.method == "PATCH" and self._seen % 2:
                self.hits += 1
                touch = {"metadata": {"annotations": {"example.test/touched": str(self._seen)}}}
                path = self._space.path("rljobs", "copy")
                await self._space.kube.request("PATCH", path, touch, "application/merge-patch+json")
            case "410" if watch and self._seen % 2:
                self.hits += 1
                status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
                return web.Response(
                    text=json.dumps({"type": "ERROR", "object": status}) + "\n", content_type="application/json"
                )
            case "cut watches" if watch:
                self.hits += 1
                try:
                    async with asyncio.timeout(1.5):
                        return await super()._forward(request)
                except TimeoutError:
                    raise ConnectionResetError("the storm cuts it") from None
            case "silent watches" if watch:
                self.hits += 1
                return await silence(request)
            case "no connection" if self._seen >= FIRST_CUT and self._out():
                self.hits += 1
                assert request.transport is not None
                request.transport.abort()
                return web.Response(status=502)
        return await super()._forward(request)

    def _out(self) -> bool:
        """Whether the outage, which begins when first asked for, still lasts."""
        now = time.monotonic()
        self._outage = self._outage or now
        return now - self._outage < OUTAGE_SECONDS


def refused(status: int, reason: str) -> web.Response:
    words = {"kind": "Status", "status": "Failure", "reason": reason, "message": "a storm", "code": status}
    return web.json_response(words, status=status, headers={"Retry-After": "1"} if status == 429 else {})


async def silence(request: web.Request) -> web.StreamResponse:
    """A watch that is open and says nothing."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await asyncio.sleep(120)
    return response


@pytest.mark.parametrize("kind", ["slow", "429", "500", "conflict", "410", "cut watches", "silent watches", "no connection"])
async def test_a_job_comes_to_its_end_through(space: Space, spec: dict[str, Any], kind: str) -> None:
    storm = Storm(space, kind)
    space.environment["RLJOB_RESYNC_SECONDS"] = "3"
    life = Life(space, {**spec, "failurePolicy": {"backoffSeconds": 1, "maxRestarts": 3}}, storm, await storm.prepare())
    try:
        await life.live()
        assert storm.hits > 0
        assert life.starts == 1
        (operator,) = space.operators
        assert operator.poll() is None, space.logs()
    finally:
        for process in space.operators:
            process.kill()
        await storm.stop()


class Before(Gate):
    """An API server that does not know RLJobs until told."""

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if not self.open and request.path.startswith("/apis/rljob.dev"):
            return web.json_response({"kind": "Status", "reason": "NotFound", "code": 404}, status=404)
        return await super()._forward(request)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def test_an_operator_that_is_older_than_its_api_waits_says_so_and_begins_by_itself(
    space: Space, spec: dict[str, Any], tmp_path: Path
) -> None:
    gate, port = Before(await space.kube.connection()), free_port()
    kubeconfig = write_kubeconfig(tmp_path / "gate", {"server": await gate.start()}, {})
    operator = space.start_operator(KUBECONFIG=kubeconfig, RLJOB_HEALTH_PORT=str(port), RLJOB_LOG_FORMAT="Json")
    said: dict[str, tuple[int, str]] = {}

    async def look() -> None:
        async with aiohttp.ClientSession() as session:
            for path in ("healthz", "readyz", "metrics"):
                try:
                    async with session.get(f"http://127.0.0.1:{port}/{path}") as answer:
                        said[path] = answer.status, await answer.text()
                except aiohttp.ClientError as error:
                    said[path] = 0, str(error)

    async def waits() -> bool:
        await look()
        return said["readyz"][0] == 503

    async def ready() -> bool:
        await look()
        return said["readyz"][0] == 200

    try:
        await eventually(waits, lambda: f"it says what it waits for: {said}{space.logs()}")
        assert "install the chart rljob-crds" in said["readyz"][1]
        assert said["healthz"][0] == 200
        gate.open = True
        await space.claim()
        await space.apply(spec)
        await eventually(ready, lambda: f"it begins: {said}{space.logs()}")
        await space.pods_get_ready()
        await space.condition("DriverRunning", "Running")
        await look()
        series = f'rljob_attempt{{namespace="{space.name}",name="copy"}} 1'
        assert series in said["metrics"][1]
        records = [json.loads(line) for line in (tmp_path / "operator-0.log").read_text().splitlines()]
        about = [one for one in records if one.get("job") == "copy"]
        assert {one["namespace"] for one in about} == {space.name}
        assert 1 in {one["attempt"] for one in about}

        await space.kube.request("DELETE", space.path("rljobs", "copy"))

        async def dropped() -> bool:
            await look()
            return 'name="copy"' not in said["metrics"][1]

        await eventually(dropped, lambda: f"its series go with the job: {said['metrics']}")
    finally:
        operator.kill()
        await gate.stop()
