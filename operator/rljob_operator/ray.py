"""Ray's jobs REST API and the driver's report, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from pydantic import BaseModel, ValidationError

from rljob_api import names
from rljob_api.progress import CheckpointInfo, ProgressReport

from .access import Access
from .api import ApiUnreachableError, HttpAnswer, RayError, Transport
from .bodies import read_end
from .world import Driver, DriverAnswer, DriverUnknown, Job, SaveAnswer, Unreachable

_TIMEOUT_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
"""Shorter: where a node is lost nothing answers at all, and the jobs on it must not hold up the others'."""
_TOKEN_REFUSED = (401, 403)
_ANOTHER_KEY = "was the operator's key changed? A new attempt gets a new token: spec.suspend true, then false, begins one"


class DirectTransport:
    """Straight to a Service; `base` is a pattern with {service}, {namespace} and {port}."""

    def __init__(self, base: str = "http://{service}.{namespace}.svc:{port}") -> None:
        self._base = base
        self._session: aiohttp.ClientSession | None = None

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
        """One request."""
        url = self._base.format(service=service, namespace=namespace, port=port) + path
        if self._session is None:
            # No keep-alive: each attempt's pod has a new address, and an idle connection would outlive it.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS, sock_connect=_CONNECT_SECONDS),
            )
        try:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with self._session.request(method, url, json=body, headers=headers) as answer:
                return HttpAnswer(answer.status, await read_end(answer.content))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnreachableError(f"{url}: {str(error) or type(error).__name__}") from error

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()


class Ray:
    """The real RayApi."""

    def __init__(self, transport: Transport, access: Access) -> None:
        self._transport = transport
        self._access = access

    async def driver(self, job: Job) -> DriverAnswer:
        """`GET /api/jobs/<id>`."""
        submission = job.submission_id
        try:
            answer = await self._ask("GET", job, f"/api/jobs/{submission}")
        except ApiUnreachableError as error:
            return Unreachable(str(error))
        if answer.status == 404:
            # Only Ray's own words count: the API server's proxy names the Service, and so the submission, in its 404s.
            unknown = f"Job {submission} does not exist" in answer.body and not _is_status(answer.body)
            return DriverUnknown() if unknown else Unreachable(f"404: {answer.body[:200]}")
        if answer.status in _TOKEN_REFUSED:
            return Unreachable(f"{answer.status}: Ray refuses the attempt's token ({answer.body[:200]}); {_ANOTHER_KEY}")
        if answer.status != 200:
            return Unreachable(f"{answer.status}: {answer.body[:200]}")
        return read_driver(answer.body)

    async def submit(self, job: Job, body: Mapping[str, Any]) -> None:
        """`POST /api/jobs/`."""
        try:
            answer = await self._ask("POST", job, "/api/jobs/", body)
        except ApiUnreachableError as error:
            # The request may have been taken all the same; the next pass asks for the id first.
            raise RayError(str(error)) from error
        known = f"submission_id {body['submission_id']} already exists" in answer.body and not _is_status(answer.body)
        if answer.status == 200 or known:
            return
        raise RayError(f"Ray answered {answer.status}: {last_line(answer.body)}")

    async def report(self, job: Job) -> ProgressReport | Unreachable:
        """`GET /progress` of the driver."""
        try:
            answer = await self._ask("GET", job, names.PROGRESS_PATH, port=names.PROGRESS_PORT)
        except ApiUnreachableError as error:
            return Unreachable(str(error))
        if answer.status != 200:
            return Unreachable(f"{answer.status}: {answer.body[:200]}")
        return read_report(answer.body)

    async def save(self, job: Job, wait_seconds: float) -> SaveAnswer | Unreachable:
        """`POST /control/save?wait=` of the driver."""
        path = f"{names.CONTROL_SAVE_PATH}?wait={wait_seconds:g}"
        try:
            answer = await self._ask("POST", job, path, port=names.PROGRESS_PORT)
        except ApiUnreachableError as error:
            return Unreachable(str(error))
        return read_save(answer)

    async def last_report_in_logs(self, job: Job) -> ProgressReport | Unreachable:
        """`GET /api/jobs/<id>/logs`, and the last line that is a report."""
        try:
            answer = await self._ask("GET", job, f"/api/jobs/{job.submission_id}/logs")
        except ApiUnreachableError as error:
            return Unreachable(str(error))
        if answer.status != 200:
            return Unreachable(f"{answer.status}: {answer.body[:200]}")
        _, found, rest = answer.body.rpartition(names.REPORT_LINE_PREFIX)
        if not found:
            return Unreachable("no report in the driver's log")
        # The log is one JSON string of the answer, whose beginning may be cut off: read the string from here to its end.
        try:
            lines, _ = json.JSONDecoder().raw_decode(f'"{rest}')
        except ValueError:
            return Unreachable("the logs are not what Ray's jobs API answers")
        return read_report(str(lines).partition("\n")[0])

    async def _ask(
        self, method: str, job: Job, path: str, body: Mapping[str, Any] | None = None, port: int = names.DASHBOARD_PORT
    ) -> HttpAnswer:
        service = names.head_service(job.cluster_name)
        return await self._transport(method, job.namespace, service, port, path, body, self._access.token(job))


def _is_status(body: str) -> bool:
    """Whether it is the API server's answer instead of the one behind its proxy."""
    try:
        value = json.loads(body)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("kind") == "Status"


class _Details(BaseModel):
    """The part of Ray's JobDetails that is used."""

    status: str
    driver_exit_code: int | None = None
    message: str | None = None


def read_driver(body: str) -> Driver | Unreachable:
    """Ray's JobDetails."""
    try:
        details = _Details.model_validate_json(body)
    except ValidationError:
        return Unreachable(f"not what Ray's jobs API answers: {body[:200]}")
    code, message = details.driver_exit_code, details.message or ""
    if code is not None and -128 < code < 0:  # Python's way to say "killed by this signal"; the shell's fits one byte
        code = 128 - code
    if code is not None and not 0 <= code <= 255:  # none that a process can have
        code, message = None, f"{message}\nRay reports exit code {code}"
    return Driver(details.status, code, message)


class _Save(BaseModel):
    """The part of the driver's answer to a save request that is used."""

    accepted: bool
    step: int | None = None
    checkpoint: CheckpointInfo | None = None


def read_save(answer: HttpAnswer) -> SaveAnswer | Unreachable:
    """The driver's answer to a save request: 200 saved, 202 not yet, and anything else that it will not."""
    try:
        word = _Save.model_validate_json(answer.body)
    except ValidationError:
        return Unreachable(f"{answer.status}: not what the driver answers: {answer.body[:200]}")
    accepted, saved = word.accepted and answer.status in (200, 202), answer.status == 200
    return SaveAnswer(accepted, saved, word.step, word.checkpoint if saved else None)


def read_report(text: str) -> ProgressReport | Unreachable:
    """A report; one of another version is named, not half read."""
    try:
        return ProgressReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return Unreachable(f"the driver's report is unreadable at {where}: {first['msg']}")


def last_line(text: str) -> str:
    """The last line of a traceback or of any answer: the one that says what happened."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(empty answer)"
