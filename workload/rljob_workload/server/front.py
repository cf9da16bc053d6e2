"""The routes: OpenAI's endpoints of every replica, and below `/v1/rollouts` what agents ask for.

::

    GET  /v1/models   POST /v1/completions   POST /v1/chat/completions
    GET  /v1/rollouts/next?max=N&wait=SECONDS        rollouts to play
    POST /rollouts/ID/v1/completions (chat/...)      a turn of one
    POST /v1/rollouts/ID/result                      its reward, or why there is none
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from rljob_workload.algorithm.advantages import LARGEST_REWARD
from rljob_workload.algorithm.batch import Answer
from rljob_workload.core.agents import (
    AgentRollout,
    Purpose,
    RolloutBusyError,
    RolloutOverError,
    RolloutUnknownError,
)
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.server import openai
from rljob_workload.server.desk import Deliver, Desk, DeskClosedError, DeskFullError
from rljob_workload.server.errors import ApiError, ServerError, bad, busy
from rljob_workload.server.wire import LEAST_BODY_LIMIT, Listeners, answer, body_of

#: Rollouts that one look may give out, and seconds that it may wait for the first.
MOST_ROLLOUTS = 256
LONGEST_WAIT = 60.0
#: Bytes of JSON that a token id may take.
_BYTES_PER_TOKEN = 32

#: What the desk delivers.
_Got = list[Answer] | Exception

_TURN = re.compile(r"^/rollouts/([^/]{1,64})/v1/(models|completions|chat/completions)$")
_RESULT = re.compile(r"^/v1/rollouts/([^/]{1,64})/result$")


class Agents(Protocol):
    """What the front asks about rollouts; with the lock held."""

    @property
    def over(self) -> bool:
        """Whether no rollout will come any more."""
        ...

    def hand_out(self, most: int) -> list[AgentRollout]:
        """Rollouts for an agent."""
        ...

    def get(self, name: str) -> AgentRollout:
        """A rollout that is being played. Raises RolloutUnknownError, RolloutOverError."""
        ...

    def report(self, name: str, reward: float, *, correct: bool) -> None:
        """The agent's verdict, or the same again; wakes who waits for it. Raises as `get` does, and RolloutBusyError."""
        ...

    def give_up(self, name: str, why: str) -> None:
        """The agent cannot end it, or says so again. Raises as `get` does."""
        ...


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
        self._agents = agents
        self._token = _read_token(token_file)
        self._answer_seconds = answer_seconds
        self._rollout_seconds = rollout_seconds
        self._created = int(time.time())
        self._body_limit = max(LEAST_BODY_LIMIT, _BYTES_PER_TOKEN * limits.sequence)
        self._listeners = Listeners(self._handle, self._body_limit)
        self._urls: list[str] = []
        self._count = 0

    def start(self, host: str, port: int, replicas: int) -> list[str]:
        """Listen. Returns each replica's base URL. Raises ServerError."""
        self._urls = self._listeners.start(host, port, replicas)
        return self._urls

    def close(self) -> None:
        """Whoever waits is told that the run is over; then nobody listens any more."""
        with self._monitor.changing():
            self._desk.close(DeskClosedError("the run is over"))
        self._listeners.close()

    # ---- routes -----------------------------------------------------------------------------

    async def _handle(self, replica: int, request: web.BaseRequest) -> web.StreamResponse:
        self._authorise(request.headers.get("Authorization", ""))
        try:
            return await self._route(replica, request)
        except DeskFullError as err:
            raise busy(str(err)) from err
        except DeskClosedError as err:
            raise busy(str(err)) from err
        except RolloutUnknownError as err:
            raise ApiError(HTTPStatus.NOT_FOUND, str(err)) from err
        except RolloutOverError as err:
            raise ApiError(HTTPStatus.GONE, str(err)) from err
        except RolloutBusyError as err:
            raise ApiError(HTTPStatus.CONFLICT, str(err)) from err

    async def _route(self, replica: int, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if path in ("/v1/completions", "/v1/chat/completions"):
            _require("POST", request)
            return await self._complete(replica, request, _kind(path))
        if path == "/v1/models":
            _require("GET", request)
            return self._models()
        if path == "/v1/rollouts/next":
            _require("GET", request)
            return await self._next(request)
        if (match := _TURN.match(path)) is not None:
            if match[2] == "models":
                _require("GET", request)
                return self._models()
            _require("POST", request)
            return await self._turn(request, match[1], _kind(path))
        if (match := _RESULT.match(path)) is not None:
            _require("POST", request)
            return await self._result(request, match[1])
        raise ApiError(HTTPStatus.NOT_FOUND, f"no such path: {path[:200]}; docs/agents.md lists them")

    def _authorise(self, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_raw(given.strip()), self._token):
            word = "send the run's token: Authorization: Bearer TOKEN" if not given.strip() else "the token is not this run's"
            raise ApiError(HTTPStatus.UNAUTHORIZED, word, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _models(self) -> web.Response:
        model = {"id": self._limits.model, "object": "model", "created": self._created, "owned_by": "rljob"}
        return answer({"object": "list", "data": [model]})

    # ---- answers ----------------------------------------------------------------------------

    async def _complete(self, replica: int, request: web.BaseRequest, kind: str) -> web.StreamResponse:
        ask = openai.read(kind, await body_of(request, self._body_limit), self._limits)
        return await self._respond(request, ask, await self._answers(replica, ask))

    async def _answers(self, replica: int, ask: openai.Ask, rollout: AgentRollout | None = None) -> list[list[Answer]]:
        """Wait for the engine. Whatever ends the wait early takes the requests back."""
        loop = asyncio.get_running_loop()
        tickets: dict[int, asyncio.Future[_Got]] = {}
        try:
            with self._monitor.reading():
                if not self._desk.waits(replica):
                    self._monitor.notify()  # of a burst the first request wakes the pump, which waits for the others
                for prompt in ask.prompts:
                    future: asyncio.Future[_Got] = loop.create_future()
                    number = self._desk.submit(replica, prompt, ask.n, ask.sampling, _deliver(loop, future))
                    tickets[number] = future
                    if rollout is not None:
                        rollout.turn = number
            async with asyncio.timeout(self._answer_seconds):
                return [_answers_of(await future) for future in tickets.values()]
        except TimeoutError:
            raise ApiError(
                HTTPStatus.GATEWAY_TIMEOUT, f"no answer within {self._answer_seconds:g} s (deadlines.stallSeconds)"
            ) from None
        finally:
            with self._monitor.reading():
                for number in tickets:
                    self._desk.cancel(number)
                if rollout is not None:
                    rollout.turn = None

    async def _respond(
        self, request: web.BaseRequest, ask: openai.Ask, answers: Sequence[Sequence[Answer]]
    ) -> web.StreamResponse:
        self._count += 1
        whole = openai.respond(ask, answers, self._limits, f"{self._created:x}{self._count:08x}", int(time.time()))
        if not ask.stream:
            return answer(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        events = [answer(event).body for event in openai.chunks(ask, whole)]
        await response.write(b"".join(b"data: " + bytes(event) + b"\n\n" for event in [*events, b"[DONE]"]))  # type: ignore[arg-type]
        await response.write_eof()
        return response

    # ---- rollouts ---------------------------------------------------------------------------

    def _playing(self) -> Agents:
        if self._agents is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND, "this run has no agents (spec.environment.agent); its prompts are answered without"
            )
        return self._agents

    async def _next(self, request: web.BaseRequest) -> web.Response:
        agents = self._playing()
        most = int(_query(request, "max", 1, 1, MOST_ROLLOUTS, whole=True))
        wait = _query(request, "wait", 30.0, 0.0, LONGEST_WAIT)
        found = await self._monitor.first(lambda: agents.hand_out(most) or ([] if agents.over else None), wait)
        return answer({"rollouts": [self._described(one) for one in found or ()], "over": agents.over})

    def _described(self, rollout: AgentRollout) -> dict[str, Any]:
        base = self._urls[rollout.replica or 0].removesuffix("/v1")
        begin = self._limits.begin
        tokens = rollout.tokens[len(begin) :] if rollout.tokens[: len(begin)] == begin else rollout.tokens
        return {
            "id": rollout.id,
            "purpose": rollout.purpose,
            "model": self._limits.model,
            "base_url": f"{base}/rollouts/{rollout.id}/v1",
            "prompt": self._limits.tokenizer.decode(tokens),
            "prompt_token_ids": rollout.tokens,
            "expected": rollout.expected,
            "seed": zlib.crc32(rollout.id.encode()),
            "timeout_seconds": self._rollout_seconds,
        }

    async def _turn(self, request: web.BaseRequest, name: str, kind: str) -> web.StreamResponse:
        agents = self._playing()
        body = await body_of(request, self._body_limit)
        with self._monitor.reading():
            rollout = agents.get(name)
            if rollout.turn is not None:
                raise RolloutBusyError(f"rollout {name}: a turn is being generated; a rollout takes one at a time")
            rollout.turn = 0  # taken, until the desk gives it a number
        try:
            ask = openai.read(kind, body, self._limits, rollout.trajectory)
            if rollout.purpose is Purpose.TRAIN:
                openai.require_trained_sampling(ask.sampling, self._limits)
            else:
                ask = replace(ask, sampling=replace(ask.sampling, greedy=True, temperature=1.0, top_p=1.0, seed=None))
        except BaseException:
            rollout.turn = None
            raise
        if (last := rollout.trajectory.last) is not None and rollout.trajectory.repeats(ask.prompts[0]):
            rollout.turn = None  # nothing is generated anew: who could choose among answers would train on a choice
            return await self._respond(request, ask, [[last.answer]])
        ((found,),) = await self._answers(rollout.replica or 0, ask, rollout)
        with self._monitor.reading():
            agents.get(name)  # may have been given up while the answer was on its way
            self._remember(rollout, ask, found)
        return await self._respond(request, ask, [[found]])

    def _remember(self, rollout: AgentRollout, ask: openai.Ask, found: Answer) -> None:
        said = openai.ended(found, ask.sampling, self._limits).text
        rollout.trajectory.end(ask.prompts[0], found, text=ask.text, messages=ask.messages, said=said)

    async def _result(self, request: web.BaseRequest, name: str) -> web.Response:
        agents = self._playing()
        body = await body_of(request, self._body_limit)
        if unknown := next((key for key in body if key not in ("reward", "correct", "error")), None):
            raise bad(f"{unknown[:80]}: unknown; a result has reward and correct, or error", unknown[:80])
        if (error := body.get("error")) is not None:
            said = " ".join(_raw(str(error)).decode(errors="replace").split())[:300]  # a line of a log
            with self._monitor.changing():
                agents.give_up(name, f"the agent said: {said}")
            return answer({"accepted": True})
        reward, correct = body.get("reward"), body.get("correct")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
            raise bad(
                f"reward: {str(reward)[:40]} is no number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}",
                "reward",
            )
        if correct is not None and not isinstance(correct, bool):
            raise bad(f"correct: {str(correct)[:40]} is not true or false", "correct")
        with self._monitor.reading():
            agents.report(name, float(reward), correct=bool(correct))
        return answer({"accepted": True})


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


def _query(request: web.BaseRequest, name: str, default: float, least: float, most: float, *, whole: bool = False) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or (whole and value != int(value)):
        raise bad(f"{name}: {text[:40]!r} is no {'integer' if whole else 'number'} from {least:g} to {most:g}", name)
    return value


def _deliver(loop: asyncio.AbstractEventLoop, future: asyncio.Future[_Got]) -> Deliver:
    """From the pump's thread into the server's."""
    return lambda got: _call(loop, future, got)


def _call(loop: asyncio.AbstractEventLoop, future: asyncio.Future[_Got], got: _Got) -> None:
    loop.call_soon_threadsafe(_settle, future, got)


def _settle(future: asyncio.Future[_Got], got: _Got) -> None:
    if not future.done():  # else nobody waits any more
        future.set_result(got)


def _answers_of(got: _Got) -> list[Answer]:
    if isinstance(got, Exception):
        raise got
    return got
