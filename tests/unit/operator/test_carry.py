"""Requests to Ray and the driver through the API server's proxy, for an operator outside the cluster."""

from __future__ import annotations

from aiohttp import web
from kubernetes.aio import client

from rljob_operator.bodies import LONGEST_BODY
from rljob_operator.kube import Kube


async def test_a_carried_request_keeps_its_query_gives_the_token_to_ray_and_never_reads_more_than_the_end() -> None:
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.Response(status=202, text="x" * (3 * LONGEST_BODY) + "end")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kube = Kube(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    try:
        got = await kube.carry("POST", "ns", "copy-1-head-svc", 8090, "/control/save?wait=5", {"a": 1}, "token")
    finally:
        await kube.close()
        await runner.cleanup()
    assert (got.status, len(got.body), got.body[-3:]) == (202, LONGEST_BODY, "end")
    (request,) = asked
    assert str(request.rel_url) == "/api/v1/namespaces/ns/services/http:copy-1-head-svc:8090/proxy/control/save?wait=5"
    assert request.headers["x-ray-authorization"] == "Bearer token"
    assert kube.requests == {("POST", "202"): 1}
