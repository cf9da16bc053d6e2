"""Connections to the HTTP server: each kind of bad client has its end, and none gets in the way of another."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from rljob_workload.server import wire

from .serving import ALLOWED, TOKEN, Served, post, until, waiting


def connect(server: Served) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.create_connection((str(address.hostname), int(address.port or 0)))
    connection.settimeout(10)
    return connection


def ask(connection: socket.socket) -> bytes:
    """The beginning of an answer, on a connection that stays open."""
    connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    return connection.recv(4096)


async def test_a_thousand_connections_are_served_and_those_beyond_are_told_to_come_again(server: Served) -> None:
    kept = []
    try:
        for _ in range(wire.MOST_CONNECTIONS):
            kept.append(connect(server))
            assert (await asyncio.to_thread(ask, kept[-1])).startswith(b"HTTP/1.1 200 ")
        kept.append(connect(server))
        refusal = await asyncio.to_thread(kept[-1].recv, 4096)
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in refusal
    finally:
        for connection in kept:
            connection.close()
    await until(lambda: len(server.front._listeners._servers[0].connections) < wire.MOST_CONNECTIONS)
    assert (await post(server, {"prompt": "1="}))[0] == 200


async def test_strangers_who_hold_silent_connections_lock_nobody_out(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEAD_SECONDS", 600.0)
    silent = [connect(server) for _ in range(wire.MOST_CONNECTIONS + 5)]
    try:
        assert (await post(server, {"prompt": "1="}))[0] == 200
        assert await asyncio.to_thread(silent[0].recv, 1) == b"", "who has been silent longest makes room"
        assert (await asyncio.to_thread(ask, silent[-1])).startswith(b"HTTP/1.1 200 "), "who came last has time yet"
    finally:
        for connection in silent:
            connection.close()


async def test_who_is_hung_up_on_before_the_connection_came_about_is_hung_up_on(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a burst all connections are accepted, and only then the first of them is made."""
    monkeypatch.setattr(wire, "MOST_CONNECTIONS", 1)
    made = wire._Server(server.front._listeners._serving(0), 100)
    first, second = made.connection(), made.connection()
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(lambda: first, theirs)
    ours.setblocking(False)
    assert await asyncio.wait_for(loop.sock_recv(ours, 1), 10) == b""
    assert made._open == {second}
    ours.close()


async def test_answers_that_are_not_read_do_not_pile_up(server: Served) -> None:
    connection = connect(server)
    body = json.dumps({"prompt": ["123="] * 128, "logprobs": 1, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.setblocking(False)
    with suppress(BlockingIOError):
        for _ in range(1000):
            connection.sendall(head.encode() + body)
    await until(lambda: bool(server.engine.seen))
    (held,) = server.front._listeners._servers[0].connections
    seen = 0
    while len(server.engine.seen) > seen:  # until it answers no more, or has answered all
        seen = len(server.engine.seen)
        await asyncio.sleep(0.2)
    assert held.transport is not None
    assert held.transport.get_write_buffer_size() < 1_000_000
    connection.close()


async def test_a_client_that_says_nothing_is_hung_up_on(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(wire, "BODY_SECONDS", 0.1)
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n")  # and never the rest of the head
    assert await asyncio.wait_for(reader.read(), 10) == b""
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 20\r\n\r\n"
    writer.write(head.encode() + b"{")  # and never the rest of the body
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
    assert b" 408 " in answer
    writer.close()
    assert (await post(server, {"prompt": "1="}))[0] == 200


async def test_a_second_request_has_no_more_time_for_its_head_than_the_first(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.2)
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\nGET /v1/mo".encode())
    assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
    writer.write(b"dels HTTP/1.1\r\n")  # and never the rest of the second head
    await asyncio.wait_for(reader.read(), 10)  # its end
    writer.close()


@pytest.mark.parametrize("kind", ["head", "body", "pieces"])
async def test_a_head_that_was_begun_behind_a_running_request_has_no_more_time(
    kind: str, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first bytes come with the request, or while that is answered; and then nothing more."""
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.2)
    server.engine.up = False
    body = json.dumps({"prompt": "1="}).encode()
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    if kind == "pieces":
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        length = "Transfer-Encoding: chunked"
    else:
        length = f"Content-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{length}\r\n\r\n".encode()
    writer.write(head + body + b"GET /v1/mo" if kind == "head" else head)
    if kind != "head":
        await asyncio.sleep(0.05)
        writer.write(body + b"GET /v1/mo")
    await until(lambda: waiting(server) == 1)
    await asyncio.sleep(0.4)  # the running request is nobody's silence
    assert waiting(server) == 1
    server.engine.up = True
    assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
    await asyncio.wait_for(reader.read(), 10)  # its end
    writer.close()


@pytest.mark.parametrize("together", [True, False])
async def test_a_connection_on_which_nothing_was_begun_may_idle(
    together: bool, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_SECONDS", 0.1)
    body = json.dumps({"prompt": "1="}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    for _ in range(2):
        for part in (head.encode() + body,) if together else (head.encode(), body[:5], body[5:]):
            writer.write(part)
            await asyncio.sleep(0.02)
        answer = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode().lower()
        assert answer.startswith("http/1.1 200 ok\r\n")
        await reader.readexactly(int(answer.split("content-length: ")[1].split("\r\n")[0]))
        await asyncio.sleep(0.3)
    writer.close()


async def test_who_asks_whether_to_send_the_body_is_told_at_once(server: Served) -> None:
    """curl does with larger bodies, and waits a second for the word; a body that is not wanted is refused without it."""
    address = urlsplit(server.url)
    body = json.dumps({"prompt": "1="}).encode()
    for length, token, status in ((len(body), TOKEN, b" 100 "), (2**40, TOKEN, b" 413 "), (len(body), "no", b" 401 ")):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nExpect: 100-continue\r\n"
        writer.write(f"{head}Content-Length: {length}\r\n\r\n".encode())
        assert status in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        if status == b" 100 ":
            assert await reader.readline() == b"\r\n"
            writer.write(body)
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        writer.close()


async def test_old_clients_and_those_that_want_to_close_are_answered_and_hung_up_on(server: Served) -> None:
    address = urlsplit(server.url)
    for version, header in (("1.0", ""), ("1.1", "Connection: close\r\n")):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"GET /v1/models HTTP/{version}\r\nHost: x\r\n{header}Authorization: Bearer {TOKEN}\r\n\r\n".encode())
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")  # to the end: the server closes
        assert b" 200 " in head.split(b"\r\n")[0]
        assert json.loads(body)["object"] == "list"
        writer.close()


async def test_requests_that_come_together_are_answered_one_after_the_other(server: Served) -> None:
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    for prompt in ("1=", "12="):
        body = json.dumps({"prompt": prompt, "return_token_ids": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n{body}".encode())
    for digits in (1, 2):
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode().lower()
        assert head.startswith("http/1.1 200 ok\r\n")
        assert "\r\ncontent-type: application/json\r\n" in head
        assert "\r\ndate: " in head
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        (choice,) = json.loads(await reader.readexactly(length))["choices"]
        assert len(choice["prompt_token_ids"]) == digits + 2
    writer.close()


async def test_strangers_hold_no_connections_and_fill_no_log(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever they send: each is answered once and hung up on."""
    address = urlsplit(server.url)
    get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    for sent, status in (
        (get + b"\r\n", b" 401 "),
        (get + b"Authorization: Bearer \xff\xfe\r\n\r\n", b" 401 "),
        (get + b"Authorization: Bearer t\xc3\xb6k\r\n\r\n", b" 401 "),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", b" 401 "),
        (b"\x16\x03\x01 no HTTP at all\r\n\r\n", b" 400 "),
        (b"GET / HTTP/9.9\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b" 400 "),
    ):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 10)  # to the end: the server closes
        assert status in answer.split(b"\r\n")[0], sent
        writer.close()
    await until(lambda: not server.front._listeners._servers[0]._open)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG and record.name != "asyncio"] == []


async def test_a_compressed_body_is_the_clients_mistake(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    status, answer = await post(server, b"no gzip", headers=ALLOWED | {"Content-Encoding": "gzip"})
    assert (status, "send the body uncompressed" in answer["error"]["message"]) == (415, True)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG and record.name != "asyncio"] == []


async def test_a_body_in_pieces_that_do_not_fit_is_the_clients_mistake(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode() + b"zz\r\n{}\r\n")
    assert b" 400 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
    writer.close()
    assert [record for record in caplog.records if record.levelno > logging.DEBUG and record.name != "asyncio"] == []
