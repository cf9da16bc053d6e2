"""Ray's jobs API and the driver's report, as they answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from rljob_operator.api import ApiUnreachableError, HttpAnswer, RayError
from rljob_operator.bodies import LONGEST_BODY
from rljob_operator.ray import DirectTransport, Ray
from rljob_operator.world import Driver, DriverUnknown, Unreachable

from .builders import job, report, running
from .life import ACCESS

JOB = job(running())


class Canned:
    """A transport with one answer; keeps what was asked."""

    def __init__(self, status: int, body: str) -> None:
        self.answer = HttpAnswer(status, body)
        self.asked: list[tuple[Any, ...]] = []

    async def __call__(
        self,
        method: str,
        namespace: str,
        service: str,
        port: int,
        path: str,
        body: Mapping[str, Any] | None = None,
        token: str = "",
    ) -> HttpAnswer:
        self.asked.append((method, namespace, service, port, path, body, token))
        return self.answer


async def refused(*_: Any, **__: Any) -> HttpAnswer:
    raise ApiUnreachableError("connection refused")


SUBMISSION = {"submission_id": "copy-1"}
STATUS = {
    "kind": "Status",
    "status": "Failure",
    "message": 'services "copy-1-head-svc" not found',
    "reason": "NotFound",
    "details": {"name": "copy-1-head-svc", "kind": "services"},
    "code": 404,
}
DETAILS = {"status": "FAILED", "driver_exit_code": 13, "message": "last lines", "entrypoint": "x", "type": "SUBMISSION"}


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (200, json.dumps(DETAILS), Driver("FAILED", 13, "last lines")),
        (200, json.dumps({"status": "RUNNING", "driver_exit_code": None, "message": None}), Driver("RUNNING")),
        (200, json.dumps({"status": "FAILED", "driver_exit_code": -9, "message": "m"}), Driver("FAILED", 137, "m")),
        (404, "Job copy-1 does not exist", DriverUnknown()),
        (200, json.dumps({"status": "FAILED", "driver_exit_code": -127, "message": "m"}), Driver("FAILED", 255, "m")),
        (
            200,
            json.dumps({"status": "FAILED", "driver_exit_code": -200, "message": "m"}),
            Driver("FAILED", None, "m\nRay reports exit code -200"),
        ),
        (
            200,
            json.dumps({"status": "FAILED", "driver_exit_code": 3221225477, "message": "m"}),
            Driver("FAILED", None, "m\nRay reports exit code 3221225477"),
        ),
    ],
)
async def test_what_ray_knows_of_a_driver(status: int, body: str, answer: Any) -> None:
    transport = Canned(status, body)
    assert await Ray(transport, ACCESS).driver(JOB) == answer
    assert transport.asked == [("GET", "default", "copy-1-head-svc", 8265, "/api/jobs/copy-1", None, ACCESS.token(JOB))]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, json.dumps(STATUS)),
        (404, json.dumps(STATUS | {"message": "Job copy-1 does not exist"})),
        (404, 'services "copy-1-head-svc" does not exist'),
        (404, "Job copy-12 does not exist"),
        (404, "404 page not found"),
        (503, "no endpoints available"),
        (200, "<html>"),
        (200, "[]"),
        (401, "no token"),
    ],
)
async def test_what_is_no_answer_of_ray_never_looks_like_an_unknown_driver(status: int, body: str) -> None:
    assert isinstance(await Ray(Canned(status, body), ACCESS).driver(JOB), Unreachable)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_token_is_told_of_with_what_brings_a_new_one(status: int) -> None:
    """Without onStall: Restart nothing else would, and what the driver writes as its end can't be read."""
    answer = await Ray(Canned(status, "Invalid authentication token"), ACCESS).driver(JOB)
    assert isinstance(answer, Unreachable)
    for words in ("Invalid authentication token", "operator's key", "spec.suspend"):
        assert words in answer.detail


async def test_no_connection_is_unreachable() -> None:
    ray = Ray(refused, ACCESS)
    assert await ray.driver(JOB) == Unreachable("connection refused")
    assert await ray.report(JOB) == Unreachable("connection refused")
    assert await ray.last_report_in_logs(JOB) == Unreachable("connection refused")
    with pytest.raises(RayError, match="connection refused"):
        await ray.submit(JOB, {})


async def test_a_submission_that_exists_is_a_success() -> None:
    traceback = "Traceback (most recent call last):\n ...\nValueError: Job with submission_id copy-1 already exists."
    await Ray(Canned(500, traceback), ACCESS).submit(JOB, SUBMISSION)


async def test_a_refused_submission_names_the_last_line() -> None:
    with pytest.raises(
        RayError, match=r"^Ray answered 500: Exception: No available agent to submit job, please try again later\.$"
    ):
        await Ray(
            Canned(500, "Traceback\n  File x\nException: No available agent to submit job, please try again later.\n"), ACCESS
        ).submit(JOB, SUBMISSION)


@pytest.mark.parametrize("name", ["copy-1", "copy-12"])
async def test_only_rays_word_about_this_submission_makes_a_refused_one_a_success(name: str) -> None:
    of_the_proxy = STATUS | {"message": f"submission_id {name} already exists"}
    for body in (
        json.dumps(of_the_proxy),
        'services "copy-1-head-svc" already exists',
        "Job with submission_id copy-7 already exists",
    ):
        with pytest.raises(RayError):
            await Ray(Canned(500, body), ACCESS).submit(JOB, {"submission_id": name})


async def test_a_report_of_another_version_is_named_not_half_read() -> None:
    wire = report(3).to_wire() | {"reportVersion": 2}
    answer = await Ray(Canned(200, json.dumps(wire)), ACCESS).report(JOB)
    assert isinstance(answer, Unreachable)
    assert "reportVersion" in answer.detail


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step", -1),
        ("step", 2**60),
        ("phase", "Sleeping"),
        ("uid", "u" * 300),
        ("prompts.skippedBy", {f"cause {number}": [1] for number in range(9)}),
        ("prompts.skippedBy", {"c" * 65: [1]}),
        ("prompts.skippedBy", {"BadRow": list(range(101))}),
        ("checkpoint", {"step": 1, "path": "p" * 1025}),
        ("oldest", [{"ordinal": 1, "ageSeconds": 1.0}] * 9),
        ("surprise", 1),
    ],
)
async def test_a_report_beyond_its_bounds_is_no_report_and_names_the_field(path: str, value: Any) -> None:
    wire: dict[str, Any] = report(3).to_wire()
    *parents, last = path.split(".")
    place = wire
    for name in parents:
        place = place[name]
    place[last] = value
    answer = await Ray(Canned(200, json.dumps(wire)), ACCESS).report(JOB)
    assert isinstance(answer, Unreachable)
    assert path in answer.detail


async def test_only_the_end_of_an_endless_answer_is_kept() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(64):
            await response.write(b"x" * 2**18)
        await response.write(b"end")
        return response

    app = web.Application()
    app.router.add_get("/{tail:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    transport = DirectTransport("http://127.0.0.1:" + str(runner.addresses[0][1]) + "/{namespace}/{service}/{port}")
    try:
        answer = await transport("GET", "ns", "copy-1-head-svc", 8265, "/")
    finally:
        await transport.close()
        await runner.cleanup()
    assert len(answer.body) == LONGEST_BODY
    assert answer.body.endswith("xend")


async def test_the_last_report_is_found_in_logs_whose_beginning_is_cut_off() -> None:
    lines = [
        "starting",
        "RLJOB-REPORT " + json.dumps(report(1).to_wire()),
        "RLJOB-REPORT " + json.dumps(report(9).to_wire()),
        "end",
    ]
    transport = Canned(200, json.dumps({"logs": "\n".join(lines)})[30:])
    answer = await Ray(transport, ACCESS).last_report_in_logs(JOB)
    assert answer == report(9)
    assert transport.asked[0][4] == "/api/jobs/copy-1/logs"
    assert isinstance(await Ray(Canned(200, json.dumps({"logs": "nothing"})), ACCESS).last_report_in_logs(JOB), Unreachable)


async def test_the_direct_transport_reaches_a_server_and_names_the_url_when_it_does_not() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path, "body": await request.json()})

    app = web.Application()
    app.router.add_post("/{tail:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    transport = DirectTransport("http://127.0.0.1:" + str(port) + "/{namespace}/{service}/{port}")
    try:
        answer = await transport("POST", "ns", "copy-1-head-svc", 8265, "/api/jobs/", {"a": 1})
        assert json.loads(answer.body) == {"path": "/ns/copy-1-head-svc/8265/api/jobs/", "body": {"a": 1}}
        await runner.cleanup()
        with pytest.raises(ApiUnreachableError, match=f"127.0.0.1:{port}/ns/copy-1-head-svc/8265/api/jobs/"):
            await transport("GET", "ns", "copy-1-head-svc", 8265, "/api/jobs/")
    finally:
        await transport.close()
        await runner.cleanup()
