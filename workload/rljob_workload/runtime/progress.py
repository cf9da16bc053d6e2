"""The progress report: kept by the driver, served as `GET /progress`, mirrored to `progress.json`."""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rljob_api import names
from rljob_api.progress import ProgressReport, PromptCounts
from rljob_workload.core.checkpoint import write_json
from rljob_workload.runtime.control import Access, Answer, Control, error

log = logging.getLogger("rljob.progress")

#: Seconds between two writes of progress.json while nothing but the step changes.
MIRROR_SECONDS = 1.0
#: Bytes of a request's body that are read (and ignored).
LONGEST_BODY = 65_536

_CONTROL = (names.CONTROL_SAVE_PATH, names.CONTROL_STOP_PATH)


def utc_now() -> str:
    """RFC 3339, UTC, whole seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Progress:
    """The newest report. Updated by the driver's thread and by the one that looks after it, read by the server's."""

    def __init__(self, report: ProgressReport, mirror: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._mirroring = threading.Lock()
        self._report = report
        self._mirror = mirror
        self._mirrored = 0.0
        self._final_read = threading.Event()
        self._write_mirror()

    @property
    def report(self) -> ProgressReport:
        """The newest report."""
        with self._lock:
            return self._report

    def update(self, *, training: bool | None = None, seen: PromptCounts | None = None, **fields: Any) -> None:
        """Replace fields of the report. `training`: how far a step is that the driver waits for; elsewhere it means nothing.

        `seen`: the prompts as somebody beside the driver saw them. Taken only between two steps: the report's step and its
        prompts are of one moment, and what was seen before a step or behind it comes too late or too early.
        """
        with self._lock:
            known = self._report.prompts
            if seen is not None and seen.trained == known.trained and seen.handed_out >= known.handed_out:
                fields["prompts"] = seen
            phase = self._report.phase
            if training is not None and phase in ("Generating", "Training"):
                fields["phase"] = "Training" if training else "Generating"
            self._report = self._report.model_copy(update={**fields, "updated_time": utc_now()})
            important = self._report.phase != phase and self._report.phase in ("Finished", "Failed", "Loading")
        if important or time.monotonic() - self._mirrored > MIRROR_SECONDS:
            self._write_mirror()

    def read(self) -> bytes:
        """The report as the endpoint answers it."""
        report = self.report
        if report.finished or report.failed:
            self._final_read.set()
        return json.dumps(report.to_wire()).encode()

    def wait_until_read(self, seconds: float) -> bool:
        """After the end: wait until somebody has fetched the final report."""
        return self._final_read.wait(seconds)

    def _write_mirror(self) -> None:
        with self._mirroring:
            # The report is read inside: whoever writes last writes the newest.
            self._mirrored = time.monotonic()
            if self._mirror is None:
                return
            try:
                write_json(self._mirror, self.report.to_wire())
            except OSError as err:
                # A full volume must not end the run: the next checkpoint says so, with its own exit code.
                log.warning("cannot write %s: %s", self._mirror, err.strerror or err)


class ProgressServer:
    """Serves the report, and the control endpoints beside it, until closed. Every request has a thread of its own."""

    def __init__(self, progress: Progress, control: Control, access: Access, host: str, port: int) -> None:
        self._server = ThreadingHTTPServer((host, port), _handler(progress, control, access))
        self._server.daemon_threads = True
        # It asks this often whether it is closed, which the end of every run waits for; half a second by default.
        looks = {"poll_interval": 0.02}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=looks, name="progress", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served (of interest when 0 was asked for)."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _refused_body(length: str) -> Answer | None:
    """Why a body of this Content-Length is not read; None where it is."""
    if not (length.isascii() and length.isdecimal()):
        return error(HTTPStatus.BAD_REQUEST, f"Content-Length: {length!r} is not a number of bytes")
    if len(length) > len(str(LONGEST_BODY)) or int(length) > LONGEST_BODY:
        return error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body of at most {LONGEST_BODY} bytes is read")
    return None


def _handler(progress: Progress, control: Control, access: Access) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == names.PROGRESS_PATH:
                self._send(HTTPStatus.OK, progress.read())
            elif path in _CONTROL:
                self._answer(error(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} is asked with POST"))
            else:
                self._answer(error(HTTPStatus.NOT_FOUND, f"no such path: {path}; the report is at {names.PROGRESS_PATH}"))

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "0")
            if (refused := _refused_body(length)) is not None:
                # What follows is not read, so it must not be taken for the connection's next request.
                self.close_connection = True
                self._answer(refused)
                return
            self.rfile.read(int(length))
            url = urlsplit(self.path)
            token = self.headers.get("Authorization", "") or self.headers.get(names.HEADER_PROXIED_TOKEN, "")
            refused = access.refusal(token) if url.path in _CONTROL else None
            self._answer(refused or control.answer(url.path, url.query))

        def _answer(self, answer: Answer) -> None:
            status, data = answer
            self._send(status, json.dumps(data).encode())

        def _send(self, status: HTTPStatus, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged: the operator asks every few seconds."""

    return Handler
