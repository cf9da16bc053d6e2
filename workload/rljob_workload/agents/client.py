"""A client for many small requests: JSON out, JSON in, over HTTP/1.1 connections that stay open.

An agent may use any client. This one is for those that make hundreds of requests a second on few CPUs: it knows plain HTTP
and answers that tell their length, as this server's do (streams excepted), and takes a third of a general client's time.
"""

from __future__ import annotations

import asyncio
import json
import re
from types import TracebackType
from typing import Any, NamedTuple, Self

#: Bytes that an answer's head may have.
MOST_HEAD_BYTES = 65_536
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)


class ClientError(Exception):
    """No answer, or none that can be read; the message says which request and why."""


class Reply(NamedTuple):
    """An answer of any status."""

    status: int
    body: Any


class Client:
    """Requests to any number of servers, each on a connection of its own while it is under way. To be used as a context."""

    def __init__(self, token: str) -> None:
        self._token = token
        #: By host and port, without those that are in use.
        self._idle: dict[str, list[_Connection]] = {}
        self._all: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> None:
        for connection in list(self._all):
            connection.abort()

    async def get(self, url: str) -> Reply:
        """Raises ClientError."""
        return await self._request("GET", url, b"")

    async def post(self, url: str, body: Any) -> Reply:
        """Send JSON. Raises ClientError."""
        return await self._request("POST", url, json.dumps(body).encode())

    async def _request(self, method: str, url: str, body: bytes) -> Reply:
        scheme, _, rest = url.partition("://")
        place, _, path = rest.partition("/")
        if scheme != "http":
            raise ClientError(f"{method} {url}: only http:// is known here")
        idle = self._idle.setdefault(place, [])
        connection = idle.pop() if idle else await self._connect(place, idle)
        head = (
            f"{method} /{path} HTTP/1.1\r\nHost: {place}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            status, said = await connection.ask(head.encode() + body)
            return Reply(status, json.loads(said))
        except ValueError as err:
            raise ClientError(f"{method} {url}: the answer is not JSON: {err}") from err
        except ClientError as err:
            raise ClientError(f"{method} {url}: {err}") from err
        except asyncio.CancelledError:
            connection.abort()  # its answer is nobody's
            raise

    async def _connect(self, place: str, idle: list[_Connection]) -> _Connection:
        host, _, port = place.rpartition(":")
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(idle, self._all), host.strip("[]"), int(port)
            )
        except (OSError, ValueError) as err:
            raise ClientError(f"no connection to {place}: {err}") from err
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time; between two it waits in `idle`."""

    def __init__(self, idle: list[_Connection], known: set[_Connection]) -> None:
        self._idle = idle
        self._known = known
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Status and body. Raises ClientError."""
        self._answer = answer = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            self._fail("the connection was closed")
        else:
            self._transport.write(request)
        return answer

    def abort(self) -> None:
        """Close at once; nobody waits any more."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._known.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._known.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        self._fail(f"the connection was closed before the answer was there{f' ({exc})' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        data = self._data = self._data + data if self._data else data
        end = data.find(b"\r\n\r\n") + 4
        if self._answer is None or (end < 4 and len(data) > MOST_HEAD_BYTES):
            self._refuse("it says what nobody asked for" if self._answer is None else "the answer's head has no end")
        elif end >= 4:
            length = _LENGTH.search(data, 0, end)
            if length is None or not data.startswith(b"HTTP/1.1 "):
                self._refuse(f"the answer is none that this client reads: {data[:end][:200]!r}")
            elif len(data) >= (stop := end + int(length[1])):
                self._give(int(data[9:12]), data[end:stop], stays=len(data) == stop and not _CLOSES.search(data, 0, end))

    def _give(self, status: int, body: bytes, *, stays: bool) -> None:
        answer, self._answer, self._data = self._answer, None, b""
        if stays:
            self._idle.append(self)
        elif self._transport is not None:
            self._transport.close()
        if answer is not None and not answer.done():
            answer.set_result((status, body))

    def _refuse(self, why: str) -> None:
        self._fail(why)
        self.abort()

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ClientError(why))
        self._answer = None
