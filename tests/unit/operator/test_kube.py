"""The API server's answers, and Ray and the driver through its service proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client

from rljob_operator import kube as kube_module
from rljob_operator.api import AlreadyExistsError, ApiError, ApiUnreachableError, ConflictError
from rljob_operator.bodies import LONGEST_BODY
from rljob_operator.kube import Kube


class _ApiServer:
    """Answers every request with `body`, the first ones with the statuses of `before` instead, and remembers them."""

    def __init__(self) -> None:
        self.body = "{}"
        self.status = 200
        self.before: list[int] = []
        self.seen: list[tuple[str, str, str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path_qs, request.headers.get("x-ray-authorization", "")))
        if self.before:
            return web.Response(status=self.before.pop(0), text="busy")
        return web.Response(status=self.status, text=self.body)

    def says(self, status: int, **body: object) -> None:
        """Answer with a Status from now on."""
        self.status, self.body = status, json.dumps({"kind": "Status", **body})


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
    assert kube.requests == {("POST", "200"): 1}


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


# ---- The API server's own answers ----


@pytest.mark.parametrize("body", ["", "<html>maintenance</html>", "[]", '{"items": []}', '"ok"', '{"kind": "PodList", "items'])
async def test_what_is_no_object_is_no_answer_and_never_an_empty_list(server: tuple[_ApiServer, Kube], body: str) -> None:
    """An attempt begins where a list shows no pod of the last one."""
    api, kube = server
    api.body = body
    with pytest.raises(ApiUnreachableError, match="is no API server"):
        await kube.list_pods("ns", "rljob.dev/job=copy")
    api.body = '{"kind": "PodList", "items": []}'
    assert await kube.list_pods("ns", "rljob.dev/job=copy") == []


@pytest.mark.parametrize(
    ("reason", "error"), [("AlreadyExists", AlreadyExistsError), ("Conflict", ConflictError)], ids=["exists", "conflict"]
)
async def test_the_two_conflicts_are_told_apart(server: tuple[_ApiServer, Kube], reason: str, error: type[ApiError]) -> None:
    api, kube = server
    api.says(409, reason=reason, message="no")
    with pytest.raises(error, match=r"409 .*: no"):
        await kube.create_cluster({"metadata": {"namespace": "ns"}})


async def test_what_is_not_there_is_none_and_deleting_it_a_success(server: tuple[_ApiServer, Kube]) -> None:
    api, kube = server
    api.says(404, reason="NotFound", message="no such job")
    assert await kube.get_job("ns", "copy") is None
    await kube.delete_cluster("ns", "copy-1", "uid")
    await kube.delete_secret("ns", "copy-1")


async def test_a_server_that_is_busy_is_asked_again_a_few_times(
    server: tuple[_ApiServer, Kube], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_module, "_RETRY_SECONDS", (0, 0, 0))
    api, kube = server
    api.body, api.before = '{"kind": "RLJob"}', [429, 503, 500]
    assert await kube.get_job("ns", "copy") == {"kind": "RLJob"}
    api.before = [500] * 9
    with pytest.raises(ApiError, match="500 : busy"):
        await kube.get_job("ns", "copy")
    assert len(api.before) == 5
