"""The pods' preStop hook asks the driver to save and end, waits for it, and never holds a pod up for anything else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rljob_workload.runtime.prestop import PrestopError, Settings, connected_head, end_run, from_environment


class _Driver(ThreadingHTTPServer):
    """A driver's control endpoint with the answers of a test."""

    def __init__(self, *answers: tuple[int, str] | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []
        self.then_close = False

    def stop(self) -> None:
        """No connection is taken any more."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Driver

    def do_POST(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization", "")))
        answer = self.server.answers.pop(0) if self.server.answers else (202, "{}")
        if answer is None:
            self.connection.close()
            return
        self.send_response(answer[0])
        self.end_headers()
        self.wfile.write(answer[1].encode())
        if self.server.then_close:  # as a process that ends: from now on connections are refused
            threading.Thread(target=self.server.stop).start()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "auth_token"
    path.write_text("secret\n")
    return path


@pytest.fixture
def start() -> Iterator[object]:
    drivers: list[_Driver] = []

    def _start(*answers: tuple[int, str] | None, then_close: bool = False) -> _Driver:
        driver = _Driver(*answers)
        driver.then_close = then_close
        threading.Thread(target=driver.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        drivers.append(driver)
        return driver

    yield _start
    for driver in drivers:
        driver.stop()


def settings(driver: _Driver, token: Path, seconds: float = 30) -> Settings:
    return Settings("127.0.0.1", seconds, token, driver.server_port)


def test_it_asks_with_the_token_until_the_driver_has_ended(start, token: Path) -> None:  # type: ignore[no-untyped-def]
    driver = start((202, "{}"), None, (202, "{}"), (409, "the attempt has ended"))
    assert end_run(settings(driver, token)) == "nothing to wait for: 409 the attempt has ended"
    assert driver.asked == [("/control/stop", "Bearer secret")] * 4


def test_a_driver_that_goes_while_it_is_waited_for_has_saved(start, token: Path) -> None:  # type: ignore[no-untyped-def]
    driver = start(then_close=True)
    assert end_run(settings(driver, token)) == "the driver has saved and ended"


@pytest.mark.parametrize("status", [401, 403, 404, 409, 500])
def test_a_driver_that_will_not_save_is_not_waited_for(start, token: Path, status: int) -> None:  # type: ignore[no-untyped-def]
    driver = start((status, "why"))
    assert end_run(settings(driver, token)) == f"nothing to wait for: {status} why"
    assert len(driver.asked) == 1


def test_without_a_driver_there_is_nothing_to_save(start, token: Path) -> None:  # type: ignore[no-untyped-def]
    driver = start()
    driver.stop()
    assert end_run(settings(driver, token)) == "no driver: ConnectionRefusedError: [Errno 111] Connection refused"


def test_a_head_that_has_no_address_any_more_is_not_waited_for(token: Path) -> None:
    assert end_run(Settings("copy-1-head-svc.invalid", 30, token)).startswith("no driver: gaierror")


def test_the_budget_ends_the_wait(start, token: Path) -> None:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    said = end_run(settings(start(), token, seconds=0.2))
    assert said == "the driver has not ended within 0 s (deadlines.saveSeconds); last answer: {}"
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(
    ("environment", "words"),
    [({}, "RLJOB_DRIVER_HOST is not set"), ({"RLJOB_DRIVER_HOST": "x", "RLJOB_SAVE_SECONDS": "soon"}, "'soon'")],
)
def test_what_is_missing_is_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(PrestopError, match=words):
        from_environment(environment)


def test_a_worker_finds_the_head_by_its_open_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connected_head(port) == ""
        with socket.create_connection(("127.0.0.1", port)):
            assert connected_head(port) == "127.0.0.1"


@pytest.mark.parametrize(
    ("table", "remote", "address"),
    [
        ("tcp", "0509090A:18EB", "10.9.9.5"),
        ("tcp6", "0000000000000000FFFF00000509090A:18EB", "10.9.9.5"),
        ("tcp6", "B80D0120000000000000000001000000:18EB", "2001:db8::1"),
        ("tcp", "0509090A:1F9A", ""),
    ],
)
def test_the_tables_of_the_kernel_are_read(tmp_path: Path, table: str, remote: str, address: str) -> None:
    local = "0100007F:C000" if table == "tcp" else f"{0:032X}:C000"
    closing = f"  0: {local} {remote} 08 0 0"
    (tmp_path / table).write_text(f"header\n{closing}\n  1: {local} {remote} 01 00000000:00000000 0\n")
    assert connected_head(tables=tmp_path) == address
