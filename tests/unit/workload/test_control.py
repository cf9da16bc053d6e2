"""The control endpoints: who may ask, what is answered when, and that a wish reaches the driver."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api import names
from rljob_api.progress import CheckpointInfo
from rljob_workload.core.due import Cause, Due, DueRules
from rljob_workload.runtime.control import Access, Control
from rljob_workload.runtime.progress import Progress, ProgressServer
from rljob_workload.runtime.stop import StoppedError, StopSignal

from .test_driver_surroundings import report

TOKEN = "s3cret"


class World:
    """A served control, and the driver's side of it."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "token"
        self.file.write_text(TOKEN + "\n")
        self.budgets: list[str] = []
        self.stop = StopSignal(budget=self.budgets.append)
        self.control = Control(self.stop)
        self.due = Due(DueRules(100, 100), time.monotonic)
        self.serve(Access(self.file))

    def serve(self, access: Access) -> None:
        self.server = ProgressServer(Progress(report()), self.control, access, "127.0.0.1", 0)

    def post(
        self, path: str, token: str | None = TOKEN, body: bytes = b"", method: str = "POST", header: str = "Authorization"
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        headers = {} if token is None else {header: f"Bearer {token}"}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def save(self, step: int) -> None:
        """What the driver does when it has saved."""
        self.due.begun()
        ticket = self.control.saving()
        self.control.saved(CheckpointInfo(step=step, path=f"runs/d/n/step-{step:06d}-t000001"), ticket)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.control.close()
    world.server.close()


@pytest.mark.parametrize("path", [names.CONTROL_SAVE_PATH, names.CONTROL_STOP_PATH])
def test_only_the_runs_token_opens_the_endpoints(world: World, path: str) -> None:
    world.control.attach(world.due, 0, None)
    assert world.post(path, token=None)[0] == 401
    status, said = world.post(path, token="wrong")
    assert (status, said["error"]) == (403, "the token is not this run's")
    assert world.post(path, token=TOKEN + "x")[0] == 403
    world.file.write_text("another")
    assert world.post(path)[0] == 403
    world.file.write_text("")
    assert world.post(path, token="")[0] == 403
    world.file.unlink()
    assert "cannot be read" in world.post(path)[1]["error"]
    assert world.due.urgent() is None
    assert not world.stop.asked


def test_through_the_api_servers_proxy_the_token_comes_in_another_header(world: World) -> None:
    world.control.attach(world.due, 0, None)
    assert world.post(names.CONTROL_SAVE_PATH, token="wrong", header=names.HEADER_PROXIED_TOKEN)[0] == 403
    assert world.post(names.CONTROL_SAVE_PATH, header=names.HEADER_PROXIED_TOKEN)[0] == 202


def test_a_replaced_token_counts_from_the_next_request_on(world: World) -> None:
    world.control.attach(world.due, 3, None)
    world.file.write_text("another")
    assert world.post(names.CONTROL_SAVE_PATH, token="another")[0] == 202


def test_without_a_token_file_the_endpoints_are_closed_and_say_how_they_are_opened(world: World) -> None:
    world.server.close()
    world.serve(Access.of({}))
    status, said = world.post(names.CONTROL_SAVE_PATH)
    assert status == 404
    assert "RLJOB_CONTROL_TOKEN_FILE is not set" in said["error"]
    assert Access.of({names.ENV_CONTROL_TOKEN_FILE: "/x"}).token_file == Path("/x")


def test_a_save_is_accepted_and_reaches_the_driver(world: World) -> None:
    world.control.attach(world.due, 7, None)
    assert world.post(names.CONTROL_SAVE_PATH) == (202, {"accepted": True, "step": 7, "message": "will be saved"})
    assert world.due.urgent() is Cause.REQUEST
    assert world.control.events.get(timeout=60) == "save"


def test_a_save_that_is_waited_for_names_the_checkpoint(world: World) -> None:
    world.control.attach(world.due, 7, None)

    def driver() -> None:
        world.control.events.get(timeout=60)
        world.control.stepped(8)
        world.save(8)

    thread = threading.Thread(target=driver)
    thread.start()
    status, said = world.post(names.CONTROL_SAVE_PATH + "?wait=30")
    thread.join()
    assert (status, said["accepted"], said["step"]) == (200, True, 8)
    assert said["checkpoint"] == {"step": 8, "path": "runs/d/n/step-000008-t000001"}
    assert world.due.urgent() is None


def test_a_save_that_was_asked_for_after_another_one_had_begun_waits_for_its_own(world: World) -> None:
    """The first one's copies are older than the wish, however late its files are written."""
    world.control.attach(world.due, 7, None)
    world.due.begun()
    earlier = world.control.saving()

    def driver() -> None:
        world.control.events.get(timeout=60)
        world.control.saved(CheckpointInfo(step=7, path="runs/d/n/step-000007-t000001"), earlier)
        world.due.took(0.1)
        assert world.due.urgent() is Cause.REQUEST
        world.save(9)

    thread = threading.Thread(target=driver)
    thread.start()
    _, said = world.post(names.CONTROL_SAVE_PATH + "?wait=30")
    thread.join()
    assert said["checkpoint"]["step"] == 9
    assert world.due.urgent() is None


def test_a_wait_ends_with_its_time_or_with_the_attempt(world: World) -> None:
    world.control.attach(world.due, 7, None)
    status, said = world.post(names.CONTROL_SAVE_PATH + "?wait=0.01")
    assert (status, said["message"]) == (202, "not saved within 0.01 s; the save is still wanted")
    timer = threading.Timer(0.05, world.control.close)
    timer.start()
    status, said = world.post(names.CONTROL_SAVE_PATH + "?wait=60")
    assert (status, said["accepted"], said["message"]) == (409, False, "the attempt ended before it could save")
    assert world.post(names.CONTROL_SAVE_PATH)[0] == 409


def test_before_training_there_is_nothing_to_save(world: World) -> None:
    status, said = world.post(names.CONTROL_SAVE_PATH + "?wait=60")
    assert (status, said["accepted"]) == (409, False)
    assert "starting" in said["message"]


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "x", "", "4000"])
def test_an_odd_wait_is_refused(world: World, wait: str) -> None:
    world.control.attach(world.due, 7, None)
    status, said = world.post(f"{names.CONTROL_SAVE_PATH}?wait={wait}")
    assert status == 400
    assert repr(wait) in said["error"]
    assert world.due.urgent() is None


def test_stop_is_what_sigterm_is_and_may_be_repeated(world: World) -> None:
    world.control.attach(world.due, 7, None)
    with world.stop.installed(), world.stop.while_training(world.control.ask_stop):
        for _ in range(2):
            status, said = world.post(names.CONTROL_STOP_PATH)
            assert (status, said["accepted"], said["step"]) == (202, True, 7)
        assert world.stop.by == "a control request"
        assert world.budgets == ["a control request"]
        assert world.due.urgent() is Cause.STOP
    world.stop.over()
    assert world.post(names.CONTROL_STOP_PATH)[0] == 409


def test_stop_before_training_ends_the_start(world: World) -> None:
    def start() -> None:
        world.post(names.CONTROL_STOP_PATH)
        signal.sigtimedwait([signal.SIGUSR2], 5)  # the handler's exception comes here at the latest

    with world.stop.installed(), pytest.raises(StoppedError, match="SIGTERM"):
        start()


def test_the_report_is_answered_while_a_save_is_waited_for_and_with_no_token(world: World) -> None:
    world.control.attach(world.due, 7, None)
    waiting = threading.Thread(target=world.post, args=(names.CONTROL_SAVE_PATH + "?wait=60",))
    waiting.start()
    world.control.events.get(timeout=60)
    assert world.post(names.PROGRESS_PATH, token=None, method="GET")[0] == 200
    assert waiting.is_alive()
    world.save(7)
    waiting.join(60)
    assert not waiting.is_alive()


def test_other_paths_methods_and_bodies_have_their_answers(world: World) -> None:
    world.control.attach(world.due, 7, None)
    assert world.post("/control/other")[0] == 404
    assert world.post(names.CONTROL_SAVE_PATH, method="GET")[0] == 405
    assert world.post(names.CONTROL_SAVE_PATH, body=b"x" * 100)[0] == 202
    assert world.post(names.CONTROL_SAVE_PATH, body=b"x" * 70_000)[0] == 413


@pytest.mark.parametrize(("length", "status"), [("abc", 400), ("-5", 400), ("\u0663", 400), ("9" * 5000, 413)])
def test_a_length_that_is_none_is_refused_in_words(world: World, length: str, status: int) -> None:
    world.control.attach(world.due, 7, None)
    with socket.create_connection(("127.0.0.1", world.server.port), timeout=60) as connection:
        connection.sendall(f"POST {names.CONTROL_SAVE_PATH} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
        assert int(connection.recv(1024).split()[1]) == status
