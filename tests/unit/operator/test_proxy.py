"""Ray and the driver through the API server's service proxy: the path, the token's header, and only so much of an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client

from rljob_operator.api import ApiUnreachableError
from rljob_operator.bodies import LONGEST_BODY
from rljob_operator.kube import Kube


class _ApiServer:
    """Answers every request with `body`, and remembers them."""

    def __init__(self) -> None:
        self.body = "{}"
        self.seen: list[tuple[str, str, str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path_qs, request.headers.get("x-ray-authorization", "")))
        return web.Response(text=self.body)


@pytest.fixture
async def server() -> AsyncIterator[tuple[_ApiServer, Kube]]:
    api = _ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = client.Configuration()
    settings.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    kube = Kube(settings)
    yield api, kube
    await kube.close()
    await runner.cleanup()


async def test_a_request_goes_through_the_proxy_with_its_query_and_token(server: tuple[_ApiServer, Kube]) -> None:
    api, kube = server
    api.body = '{"accepted": true}'
    answer = await kube.carry("POST", "ns", "copy-1-head-svc", 8090, "/control/save?wait=2", None, "secret")
    assert (answer.status, answer.body) == (200, api.body)
    path = "/api/v1/namespaces/ns/services/http:copy-1-head-svc:8090/proxy/control/save?wait=2"
    assert api.seen == [("POST", path, "Bearer secret")]


async def test_of_a_long_answer_the_end_is_kept(server: tuple[_ApiServer, Kube]) -> None:
    api, kube = server
    api.body = "x" * (3 * LONGEST_BODY) + "end"
    answer = await kube.carry("GET", "ns", "copy-1-head-svc", 8265, "/api/jobs/copy-1/logs")
    assert len(answer.body) == LONGEST_BODY
    assert answer.body.endswith("xend")


async def test_no_answer_is_told_as_such() -> None:
    settings = client.Configuration()
    settings.host = "http://127.0.0.1:1"
    kube = Kube(settings)
    with pytest.raises(ApiUnreachableError, match="does not answer"):
        await kube.carry("GET", "ns", "copy-1-head-svc", 8265, "/api/jobs/copy-1")
    await kube.close()
