"""The HTTP side without routes: one listener per replica, limits on connections and time, bodies, refusals.

All listeners of a run share one thread with an event loop of its own, beside the collector's. What comes in is bounded before
it is looked at: connections, the time until a request's head is there, the time and the size of its body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import select
import threading
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpProcessingError, HttpVersion11

from rljob_workload.server.errors import ApiError, ServerError, bad

log = logging.getLogger("rljob.server")

#: Open connections of one replica.
MOST_CONNECTIONS = 1000
#: Seconds until the head of a request must be there, of a new connection or from its first byte on, and until its body must.
HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
#: Seconds that a connection may idle between two requests. Only those with the token get a second one.
IDLE_SECONDS = 600.0
#: A body that small is always read.
LEAST_BODY_LIMIT = 2**20
#: Seconds that answers under way are given at the end.
DRAIN_SECONDS = 2.0

#: What ends a head, and a body in pieces.
_HEAD_END = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

#: Serves one request to a replica. Raises ApiError.
Handler = Callable[[int, web.BaseRequest], Awaitable[web.StreamResponse]]

_FULL = json.dumps(
    {"error": {"message": f"{MOST_CONNECTIONS} connections are open; come again", "type": "overloaded_error",
               "param": None, "code": None}}
).encode()  # fmt: skip
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(_FULL)).encode() + b"\r\n\r\n" + _FULL
)


class Listeners:
    """One port per replica, served in a thread of their own until `close`."""

    def __init__(self, handler: Handler, body_limit: int) -> None:
        self._handler = handler
        self._body_limit = body_limit
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai", daemon=True)
        self._sockets: list[asyncio.Server] = []
        self._servers: list[_Server] = []

    def start(self, host: str, port: int, replicas: int) -> list[str]:
        """Listen; `port` 0 takes free ones, others count up from it. Returns each replica's URL. Raises ServerError."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(host, port, replicas), self._loop).result(30.0)

    async def _start(self, host: str, port: int, replicas: int) -> list[str]:
        urls = []
        for replica in range(replicas):
            server = _Server(self._serving(replica), self._body_limit)
            wanted = port + replica if port else 0
            try:
                listener = await self._loop.create_server(server.connection, host, wanted, backlog=1024)
            except OSError as err:
                raise ServerError(
                    f"replica {replica} cannot serve on {host}:{wanted} (generation.server.port {port}): {err.strerror or err};"
                    " 0 takes a free port"
                ) from err
            self._servers.append(server)
            self._sockets.append(listener)
            urls.append(f"http://{host}:{listener.sockets[0].getsockname()[1]}/v1")
        return urls

    def _serving(self, replica: int) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
        async def serve(request: web.BaseRequest) -> web.StreamResponse:
            self._servers[replica].begun(request)
            try:
                return await self._handler(replica, request)
            except ApiError as err:
                refusal = answer(err.body, err.status, err.headers)
                if err.status == HTTPStatus.UNAUTHORIZED:
                    refusal.force_close()  # strangers hold no connections
                return refusal
            except (ConnectionError, asyncio.CancelledError):
                raise  # the client is gone
            except Exception:
                log.exception("%s %s failed", request.method, request.path[:200])
                sorry = ApiError(
                    HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed on this request; the collector's log says why"
                )
                return answer(sorry.body, sorry.status)

        return serve

    def close(self) -> None:
        """Take no connection, give answers under way a moment, close what is left. May be called again."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(DRAIN_SECONDS + 5.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
            self._loop.close()

    async def _close(self) -> None:
        for listener in self._sockets:
            listener.close()
        for server in self._servers:
            await server.shutdown(DRAIN_SECONDS)


class _Server(web.Server):
    """aiohttp's server, with a bound on connections and on how long one may say nothing."""

    def __init__(self, serve: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], body_limit: int) -> None:
        def made(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=body_limit)

        super().__init__(
            serve,
            request_factory=made,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # a few compressed bytes may become any number
            keepalive_timeout=IDLE_SECONDS,
        )
        self._open: set[asyncio.BaseProtocol] = set()
        #: Connections that owe the rest of a request's head.
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    def connection(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        if len(self._open) >= MOST_CONNECTIONS and not self._hangs_up_on_a_silent_one():
            return _Full()
        protocol = _Connection(self, loop=self._loop, **self._kwargs)
        self._open.add(protocol)
        self.owes_head(protocol)
        return protocol

    def _hangs_up_on_a_silent_one(self) -> bool:
        """Make room: who has been silent longest goes first, or strangers could lock the agent out. False: all have spoken."""
        oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        self._forget(oldest)
        self._open.discard(oldest)
        self._expire(oldest)
        return True

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """It counts no longer."""
        super().connection_lost(handler, exc)
        self._forget(handler)
        self._open.discard(handler)

    def owes_head(self, protocol: asyncio.BaseProtocol) -> None:
        """The rest of a request's head must come in time, in however many pieces."""
        if protocol not in self._silent:
            self._silent[protocol] = self._loop.call_later(HEAD_SECONDS, self._expire, protocol)

    def begun(self, request: web.BaseRequest) -> None:
        """A request's head is there."""
        self._forget(request.protocol)

    def _forget(self, protocol: asyncio.BaseProtocol) -> None:
        if (timer := self._silent.pop(protocol, None)) is not None:
            timer.cancel()

    def _expire(self, protocol: Any) -> None:
        self._silent.pop(protocol, None)
        if protocol.transport is None:
            self._open.discard(protocol)  # it never came about
        protocol.force_close()


class _Connection(web.RequestHandler):
    """A connection whose every head has a deadline, and whose client cannot fill the log."""

    __slots__ = ("_beyond",)

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        #: Bytes came that may be the beginning of a head, behind all requests that are answered or wait.
        self._beyond = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._force_close:
            transport.close()  # it was hung up on in the moment between being accepted and this one

    def data_received(self, data: bytes) -> None:
        before = self._newest()
        missing = before.missing if before else 0
        super().data_received(data)
        if not data:
            return
        newest = self._newest()
        if newest is None and self._waiter is not None and not self._waiter.done():
            self._owe_head()  # between two requests, and this was not a whole head
        elif newest is None:
            self._beyond = True
        elif before is not None and newest.body is before.body:
            self._beyond = not newest.ends_with(data, missing)
        else:
            self._beyond = not newest.ends_with(data, data.find(_HEAD_END) + len(_HEAD_END) + newest.length)

    async def finish_response(self, *args: Any) -> tuple[web.StreamResponse, bool]:
        """An answer; with the last one due, who has begun another head has to go on with it."""
        finished = await super().finish_response(*args)
        if self._beyond and not self._messages:
            self._beyond = False
            self._owe_head()
        return finished

    def _newest(self) -> _Incoming | None:
        """The last request whose head is there and whose answer is not."""
        if self._messages:
            message, body = self._messages[-1]
            return _Incoming(getattr(message, "headers", {}), body)
        if (request := self._current_request) is not None:
            return _Incoming(request.headers, request.content)
        return None

    def _owe_head(self) -> None:
        if isinstance(self._manager, _Server):
            self._manager.owes_head(self)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What is not HTTP is the client's mistake, and no news."""
        clients = isinstance(kw.get("exc_info"), HttpProcessingError | web.RequestPayloadError)
        log.log(logging.DEBUG if clients else logging.ERROR, *args, **kw)


class _Incoming:
    """A request that is coming in: how much of its body is there."""

    __slots__ = ("_headers", "body")

    def __init__(self, headers: Mapping[str, str], body: Any) -> None:
        self._headers = headers
        self.body = body

    @property
    def length(self) -> int:
        """Bytes of the body, as the client says; 0 for one in pieces."""
        text = self._headers.get("Content-Length", "0")
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def missing(self) -> int:
        """Bytes of the body that are not there."""
        return 0 if self.body.is_eof() else self.length - int(self.body.total_bytes)

    def ends_with(self, data: bytes, count: int) -> bool:
        """Whether nothing came behind it; `count`: the bytes of this data that were its own, unless it is in pieces."""
        if not self.body.is_eof():
            return True
        return data.endswith(_HEAD_END) if "Transfer-Encoding" in self._headers else len(data) == count


class _Full(asyncio.Protocol):
    """A connection too many: it is told so and closed."""

    def connection_made(self, transport: Any) -> None:
        transport.write(_REFUSAL)
        transport.close()


def hung_up(request: web.BaseRequest) -> bool:
    """Whether the client has closed its side of the connection by now: the kernel is asked, which knows it before the event
    loop has read it."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), select.POLLRDHUP)
    return bool(poll.poll(0))


async def body_of(request: web.BaseRequest, limit: int) -> dict[str, Any]:
    """The request's JSON object. Raises ApiError."""
    if (coding := request.headers.get("Content-Encoding", "identity")).lower() != "identity":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding: {coding[:40]!r} is not read; send the body uncompressed"
        )
    if (request.content_length or 0) > limit:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {request.content_length} bytes; at most {limit} are read"
        )
    raw = await _raw_body(request, limit)
    try:
        data = _DECODER.decode(raw.decode())
    except (ValueError, RecursionError) as err:
        raise bad(f"the body is not JSON: {str(err)[:200]}") from None
    if not isinstance(data, dict):
        raise bad(f"the body must be a JSON object; it is a {type(data).__name__}")
    return data


async def _raw_body(request: web.BaseRequest, limit: int) -> bytes:
    try:
        if request.content.is_eof():  # it came with the head, as nearly every body does: no clock is needed
            if len(raw := request.content.read_nowait()) > limit:
                raise web.HTTPRequestEntityTooLarge(limit)
            return raw
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(_CONTINUE)  # curl waits a second for it before it sends a larger body
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body was not there within {BODY_SECONDS:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than the {limit} bytes that are read") from None
    except web.RequestPayloadError as err:
        raise bad(f"the body cannot be read: {str(err)[:200]}") from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON's")


_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_no_number)


class _WholeResponse(web.Response):
    """An answer of one piece on a connection that stays: head and body in one write.

    What aiohttp does for any answer (a table of headers, cookies, compression, chunks) costs more than parsing the request.
    """

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        transport = request.transport
        stays = request.version == HttpVersion11 and request.keep_alive and self._keep_alive is not False
        if not stays or self.status != HTTPStatus.OK or request.method == "HEAD" or transport is None or transport.is_closing():
            return await super().prepare(request)
        if transport.get_write_buffer_size():  # earlier answers are not read yet: this one waits until they are
            if (writer := await super().prepare(request)) is not None:
                await writer.drain()
            return writer
        assert isinstance(self.body, bytes)
        transport.write(b"".join((_OK, _LENGTH % (rfc822_formatted_time().encode(), len(self.body)), self.body)))
        self._keep_alive = self._eof_sent = True
        return None


_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_LENGTH = b"Date: %b\r\nContent-Length: %d\r\n\r\n"


def answer(
    data: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A JSON answer."""
    body = _ENCODER.encode(data).encode()
    return _WholeResponse(body=body, status=status, content_type="application/json", headers=headers)
