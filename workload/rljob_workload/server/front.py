"""The routes: OpenAI's endpoints of every replica, and below `/v1/rollouts` what agents ask for.

::

    GET  /v1/models   POST /v1/completions   POST /v1/chat/completions
    GET  /v1/rollouts/next?max=N&wait=SECONDS        rollouts to play
    GET  /v1/rollouts/ID                             whether one still counts, and how long
    POST /rollouts/ID/v1/completions (chat/...)      a turn of one
    POST /v1/rollouts/ID/result                      its reward, or why there is none
    POST /v1/rollouts/results                        the same of several, and the next rollouts in the answer
"""

from __future__ import annotations

import hmac
import re
import time
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from rljob_workload.core.agents import RolloutError
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.server import openai
from rljob_workload.server.answering import Answering
from rljob_workload.server.desk import Desk, DeskClosedError, DeskFullError
from rljob_workload.server.errors import ApiError, ServerError, busy
from rljob_workload.server.playing import Agents, Playing, refused
from rljob_workload.server.wire import LEAST_BODY_LIMIT, Listeners, answer, body_of

#: Bytes of JSON that a token id may take.
_BYTES_PER_TOKEN = 32

_TURN = re.compile(r"^/rollouts/([^/]{1,64})/v1/(models|completions|chat/completions)$")
_ROLLOUT = re.compile(r"^/v1/rollouts/([^/]{1,64})$")
_RESULT = re.compile(r"^/v1/rollouts/([^/]{1,64})/result$")


class Front:
    """The server of a run. `agents`: None where nobody plays rollouts."""

    def __init__(
        self,
        monitor: Monitor,
        desk: Desk,
        limits: openai.Limits,
        agents: Agents | None,
        *,
        token_file: str,
        answer_seconds: float,
        rollout_seconds: float,
    ) -> None:
        """`answer_seconds`: how long a request may wait; `rollout_seconds`: what agents are told of a rollout's time."""
        self._monitor = monitor
        self._desk = desk
        self._limits = limits
        self._token = _read_token(token_file)
        self._created = int(time.time())
        self._body_limit = limit = max(LEAST_BODY_LIMIT, _BYTES_PER_TOKEN * limits.sequence)
        self._answering = one = Answering(monitor, desk, limits, answer_seconds)
        self._players = (
            None if agents is None else Playing(agents, monitor, limits, one, body_limit=limit, rollout_seconds=rollout_seconds)
        )
        self._listeners = Listeners(self._handle, limit)

    def start(self, host: str, port: int, replicas: int) -> list[str]:
        """Listen. Returns each replica's base URL. Raises ServerError."""
        urls = self._listeners.start(host, port, replicas)
        if self._players is not None:
            self._players.urls = urls
        return urls

    def close(self) -> None:
        """Whoever waits is told that the run is over; then nobody listens any more."""
        with self._monitor.changing():
            self._desk.close(DeskClosedError("the run is over"))
        self._listeners.close()

    async def _handle(self, replica: int, request: web.BaseRequest) -> web.StreamResponse:
        self._authorise(request.headers.get("Authorization", ""))
        try:
            return await self._route(replica, request)
        except (DeskFullError, DeskClosedError) as err:
            raise busy(str(err)) from err
        except RolloutError as err:
            raise refused(err) from err

    async def _route(self, replica: int, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if (match := _TURN.match(path)) is not None:
            if match[2] == "models":
                _require("GET", request)
                return self._models()
            _require("POST", request)
            return await self._playing().turn(request, match[1], _kind(path))
        if path in ("/v1/completions", "/v1/chat/completions"):
            _require("POST", request)
            return await self._complete(replica, request, _kind(path))
        if path == "/v1/models":
            _require("GET", request)
            return self._models()
        if path == "/v1/rollouts/next":
            _require("GET", request)
            return await self._playing().next(request)
        if path == "/v1/rollouts/results":
            _require("POST", request)
            return await self._playing().results(request)
        if (match := _RESULT.match(path)) is not None:
            _require("POST", request)
            return await self._playing().result(request, match[1])
        if (match := _ROLLOUT.match(path)) is not None:
            _require("GET", request)
            return self._playing().state(match[1])
        raise ApiError(HTTPStatus.NOT_FOUND, f"no such path: {path[:200]}; docs/agents.md lists them")

    def _authorise(self, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_raw(given.strip()), self._token):
            word = "send the run's token: Authorization: Bearer TOKEN" if not given.strip() else "the token is not this run's"
            raise ApiError(HTTPStatus.UNAUTHORIZED, word, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _models(self) -> web.Response:
        model = {"id": self._limits.model, "object": "model", "created": self._created, "owned_by": "rljob"}
        return answer({"object": "list", "data": [model]})

    async def _complete(self, replica: int, request: web.BaseRequest, kind: str) -> web.StreamResponse:
        ask = openai.read(kind, await body_of(request, self._body_limit), self._limits)
        return await self._answering.respond(request, ask, await self._answering.answers(replica, ask))

    def _playing(self) -> Playing:
        if self._players is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND, "this run has no agents (spec.environment.agent); its prompts are answered without"
            )
        return self._players


def _raw(text: str) -> bytes:
    """The bytes of a text that may hold what is no character."""
    return text.encode(errors="surrogatepass")


def _read_token(path: str) -> bytes:
    try:
        token = Path(path).read_bytes().strip()
    except OSError as err:
        raise ServerError(f"the server's token cannot be read from {path or 'an unnamed file'}: {err.strerror or err}") from err
    if not token:
        raise ServerError(f"the server's token file {path} is empty")
    return token


def _kind(path: str) -> str:
    return "chat.completions" if path.endswith("/chat/completions") else "completions"


def _require(method: str, request: web.BaseRequest) -> None:
    if request.method != method:
        raise ApiError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path[:200]} is asked with {method}", headers={"Allow": method})
