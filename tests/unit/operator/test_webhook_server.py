"""The webhook as a process of its own: HTTPS, paths, bodies, and a certificate that changes under it."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .builders import SPEC


def certificate(directory: Path, name: str = "localhost") -> None:
    """A self-signed pair, put in place the way a kubelet does: a link to a directory is exchanged."""
    made = directory / f"..{name}"
    made.mkdir(parents=True)
    key, shown = str(made / "tls.key"), str(made / "tls.crt")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost")
    command = ("openssl", "req", "-x509", *kind, "-keyout", key, "-out", shown, *names)
    subprocess.run(command, check=True, capture_output=True)
    link = directory / "..new"
    link.symlink_to(made)
    link.rename(directory / "..data")
    for file in ("tls.crt", "tls.key"):
        if not (directory / file).exists():
            (directory / file).symlink_to(f"..data/{file}")


def served_name(port: int, directory: Path) -> str:
    """Common name of the certificate that the server shows now."""
    context = ssl.create_default_context(cafile=str(directory / "tls.crt"))
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        shown: Any = tls.getpeercert()
    return str(dict(part[0] for part in shown["subject"])["commonName"])


class Server:
    """The running process, and a client."""

    def __init__(self, port: int, directory: Path, session: aiohttp.ClientSession) -> None:
        self.port, self.directory, self.session = port, directory, session

    async def send(self, method: str, path: str, **body: Any) -> tuple[int, Any]:
        """Status, and the answer as JSON where it is that."""
        async with self.session.request(method, f"https://localhost:{self.port}{path}", ssl=False, **body) as answer:
            return answer.status, await answer.json() if "json" in answer.content_type else await answer.text()

    async def review(self, **spec: Any) -> dict[str, Any]:
        """The verdict on a job."""
        job = {"metadata": {"name": "copy"}, "spec": {**copy.deepcopy(SPEC), **spec}}
        kind = {"group": "rljob.dev", "version": "v1alpha1", "kind": "RLJob"}
        request = {"uid": "1", "kind": kind, "operation": "CREATE", "object": job}
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        status, answer = await self.send("POST", "/validate?timeout=5s", json=body)
        assert status == 200, answer
        return dict(answer["response"])


def start(command: tuple[str, ...], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The process, with its words in a file."""
    with log.open("w") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A webhook that listens."""
    certificate(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "RLJOB_WEBHOOK_PORT": str(port), "RLJOB_WEBHOOK_CERTIFICATES": str(tmp_path)}
    command = (sys.executable, "-m", "rljob_operator.webhook")
    process = start(command, environment, tmp_path / "log")
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            made = Server(port, tmp_path, session)
            async with asyncio.timeout(20):
                while True:
                    try:
                        assert (await made.send("GET", "/healthz"))[0] == 200
                        break
                    except aiohttp.ClientConnectionError:
                        assert process.poll() is None, (tmp_path / "log").read_text()
                        await asyncio.sleep(0.05)
            yield made
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, (tmp_path / "log").read_text()


async def test_verdicts_paths_bodies_and_a_new_certificate(server: Server) -> None:
    assert (await server.review())["allowed"] is True
    assert "world size 1" in (await server.review(parallelism={"tensor": 2}))["status"]["message"]
    for path in ("/", "/validat", "/validate/x", "/mutate"):
        assert (await server.send("POST", path, json={}))[0] == 404, path
    assert (await server.send("GET", "/validate"))[0] == 405
    for data in (b"", b"{", b"[" * 200_000, b"\xff\xfe", b"null", b'{"request": {}}', b'"\\ud800"', b"9" * 5000):
        assert (await server.send("POST", "/validate", data=data))[0] == 400, data[:20]
    assert (await server.send("POST", "/validate", data=b"x" * (17 * 2**20)))[0] == 413

    assert await asyncio.to_thread(served_name, server.port, server.directory) == "localhost"
    certificate(server.directory, "renewed")
    assert await asyncio.to_thread(served_name, server.port, server.directory) == "renewed"
    (server.directory / "..data").unlink()
    assert (await server.review())["allowed"] is True  # while the mount is being exchanged, the old one goes on


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RLJOB_WEBHOOK_CERTIFICATES": "/no/such"}, "/no/such/tls.crt: No such file or directory"),
        ({"RLJOB_WEBHOOK_PORT": "x"}, "RLJOB_WEBHOOK_PORT=x: expected a port"),
        ({"RLJOB_LOG_LEVEL": "LOUD"}, "RLJOB_LOG_LEVEL=LOUD: expected DEBUG"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(environment: dict[str, str], words: str) -> None:
    command = (sys.executable, "-m", "rljob_operator.webhook")
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
