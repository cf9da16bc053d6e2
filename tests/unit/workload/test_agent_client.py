"""The client that agents in Python may use, against servers that say what a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rljob_workload.agents.client import Client, ClientError, Reply

#: Of every wait here.
SOON = 30.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Says its answers in turn, each in the pieces given; remembers requests and counts connections. `None`: hangs up."""

    def __init__(self, *answers: list[bytes] | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.go_on.wait()
                if (answer := self.answers.pop(0)) is None:
                    return
                for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)  # so that each comes by itself
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def saying(*answers: list[bytes] | None) -> AsyncIterator[tuple[Server, Client]]:
    server = Server(*answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with Client("secret") as client, asyncio.timeout(SOON):
        yield server, client
    listening.close()


async def test_a_request_has_token_and_body_and_the_connection_is_used_again() -> None:
    async with saying([OK], [b"HTTP/1.1 410 Gone\r\ncontent-length:  10\r\n\r\n", b'{"a":"', b'\xc3\xa4"}']) as (
        server,
        client,
    ):
        assert await client.post(f"{server.url}/v1/x?y=1", {"prompt": "1="}) == Reply(200, {})
        assert await client.get(f"{server.url}/v1/z") == Reply(410, {"a": "ä"})
        assert server.connections == 1
        post, get = server.requests
        assert post.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nAuthorization: Bearer secret\r\n" in post
        assert post.endswith(b'\r\n\r\n{"prompt": "1="}')
        assert get.startswith(b"GET /v1/z HTTP/1.1\r\n")


async def test_requests_at_once_have_a_connection_each() -> None:
    async with saying([OK], [OK], [OK]) as (server, client):
        assert await asyncio.gather(*(client.get(server.url) for _ in range(3))) == [Reply(200, {})] * 3
        assert server.connections == 3


async def test_a_connection_that_is_to_be_closed_is_not_used_again() -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    async with saying([closing], [OK]) as (server, client):
        for _ in range(2):
            assert (await client.get(server.url)).status == 200
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "the connection was closed before the answer was there"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}}"], "the answer is not JSON"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], "the answer is none that this client reads"),
        ([b"SSH-2.0-x\r\nContent-Length: 0\r\n\r\n"], "the answer is none that this client reads"),
        ([b"x" * 70_000], "the answer's head has no end"),
    ],
)
async def test_what_is_no_answer_is_told_with_its_request(answer: list[bytes] | None, words: str) -> None:
    async with saying(answer, [OK]) as (server, client):
        with pytest.raises(ClientError, match=f"GET {server.url}/a: {words}"):
            await client.get(f"{server.url}/a")
        assert await client.get(f"{server.url}/b") == Reply(200, {}), "the next request has a sound connection"


async def test_nobody_gets_the_answer_of_a_request_that_was_given_up() -> None:
    other = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n123"
    async with saying([other], [OK]) as (server, client):
        server.go_on.clear()
        given_up = asyncio.create_task(client.get(server.url))
        while not server.requests:  # noqa: ASYNC110 - a few milliseconds
            await asyncio.sleep(0.002)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        server.go_on.set()
        while len(server.answers) == 2:  # noqa: ASYNC110 - a few milliseconds
            await asyncio.sleep(0.002)
        assert await client.get(server.url) == Reply(200, {})


async def test_a_server_that_is_not_there_and_an_address_that_is_none_are_named() -> None:
    async with Client("secret") as client:
        for url in ("http://127.0.0.1:1/v1", "http://nowhere", "https://127.0.0.1:1/v1"):
            with pytest.raises(ClientError):
                await client.get(url)
