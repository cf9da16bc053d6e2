"""What outside may ask of a running attempt: save now, save and end. Asked in any thread, served by the driver's.

The endpoints are for the pods' preStop hooks, for suspending a job, and for people with a token. They answer while a step is
under way; with `?wait=SECONDS` a save is waited for and named in the answer.
"""

from __future__ import annotations

import hmac
import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import parse_qs

from rljob_api import names
from rljob_api.progress import CheckpointInfo
from rljob_workload.core.due import Due
from rljob_workload.runtime.stop import StopSignal

log = logging.getLogger("rljob.control")

#: Longest time that a request may wait for its save.
LONGEST_WAIT_SECONDS = 3600.0

#: A status and the JSON object that goes with it.
Answer = tuple[HTTPStatus, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask. The file holds the token; it is read at every request, so it can be replaced while the run goes on."""

    token_file: Path | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Access:
        """As the launcher says in its environment."""
        path = environment.get(names.ENV_CONTROL_TOKEN_FILE, "")
        return cls(Path(path) if path else None)

    def refusal(self, authorization: str) -> Answer | None:
        """Why a request with this `Authorization` header is not served; None when it may be."""
        if self.token_file is None:
            return error(HTTPStatus.NOT_FOUND, f"the control endpoints are closed: {names.ENV_CONTROL_TOKEN_FILE} is not set")
        try:
            token = self.token_file.read_bytes().strip()
        except OSError as err:
            log.warning("cannot read the control token %s: %s", self.token_file, err.strerror or err)
            return error(HTTPStatus.FORBIDDEN, "the file with the control token cannot be read; the driver's log says why")
        if not token:
            return error(HTTPStatus.FORBIDDEN, "the file with the control token is empty")
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            return error(HTTPStatus.UNAUTHORIZED, "send the run's token: Authorization: Bearer TOKEN")
        if not hmac.compare_digest(given.strip().encode(), token):
            return error(HTTPStatus.FORBIDDEN, "the token is not this run's")
        return None


class Control:
    """The meeting place of the endpoints and the driver.

    The driver waits on `events` beside its own business; whatever is put there only wakes it up, the wish itself is in `Due`.
    (`SimpleQueue.put` is reentrant, so a signal handler may call it.)
    """

    def __init__(self, stop: StopSignal) -> None:
        self.events: SimpleQueue[str] = SimpleQueue()
        self._stop = stop
        self._due: Due | None = None
        self._changed = threading.Condition()
        self._version = 0
        #: Saves that were begun, and the newest one that has ended.
        self._begun = 0
        self._ended = 0
        self._newest: CheckpointInfo | None = None
        self._over = False

    # ---- the driver's side ------------------------------------------------------------------

    def attach(self, due: Due, version: int, newest: CheckpointInfo | None) -> None:
        """From now on there is something to save."""
        with self._changed:
            self._due, self._version, self._newest = due, version, newest

    @property
    def version(self) -> int:
        """Steps behind the weights. Read in signal handlers too: no lock here."""
        return self._version

    def stepped(self, version: int) -> None:
        """So many steps are behind the weights."""
        self._version = version

    def saving(self) -> int:
        """What is there now is about to be saved: everybody who has asked waits for this save. Returns its ticket."""
        with self._changed:
            self._begun += 1
            return self._begun

    def saved(self, newest: CheckpointInfo | None, ticket: int) -> None:
        """That save is on the volume (None: there is no state yet): everybody who waits for it has it."""
        with self._changed:
            self._newest = newest
            self._ended = ticket
            self._changed.notify_all()

    def close(self) -> None:
        """The attempt is over: nobody waits any longer."""
        with self._changed:
            self._due, self._over = None, True
            self._changed.notify_all()

    def ask_stop(self) -> None:
        """Save and end. Called in a signal handler too: no lock here."""
        due = self._due
        if due is not None:
            due.ask_stop()
            self.events.put("stop")

    # ---- the endpoints' side ----------------------------------------------------------------

    def answer(self, path: str, query: str) -> Answer:
        """Serve an authorised request."""
        if path == names.CONTROL_STOP_PATH:
            return self._stopping()
        if path != names.CONTROL_SAVE_PATH:
            known = f"{names.CONTROL_SAVE_PATH} and {names.CONTROL_STOP_PATH}"
            return error(HTTPStatus.NOT_FOUND, f"no such path: {path}; there are {known}")
        text = parse_qs(query, keep_blank_values=True).get("wait", ["0"])[-1]
        try:
            wait = float(text)
        except ValueError:
            wait = math.nan
        if not 0 <= wait <= LONGEST_WAIT_SECONDS:
            return error(HTTPStatus.BAD_REQUEST, f"wait={text!r} is not a number of seconds from 0 to {LONGEST_WAIT_SECONDS:g}")
        return self._save(wait)

    def _stopping(self) -> Answer:
        if self._stop.request():
            return HTTPStatus.ACCEPTED, self._word(accepted=True, message="saves and ends")
        return HTTPStatus.CONFLICT, self._word(accepted=False, message="the attempt has ended")

    def _save(self, wait: float) -> Answer:
        with self._changed:
            due, ticket = self._due, self._begun
            if due is None:
                why = "the attempt has ended" if self._over else "the attempt is starting; there is nothing new to save"
                return HTTPStatus.CONFLICT, self._word(accepted=False, message=why)
        due.ask_save()
        self.events.put("save")
        with self._changed:
            self._changed.wait_for(lambda: self._ended > ticket or self._over, timeout=wait)
            if self._ended > ticket:
                return HTTPStatus.OK, self._word(accepted=True, saved=True, message="saved")
            if self._over:
                return HTTPStatus.CONFLICT, self._word(accepted=False, message="the attempt ended before it could save")
        said = f"not saved within {wait:g} s; the save is still wanted" if wait else "will be saved"
        return HTTPStatus.ACCEPTED, self._word(accepted=True, message=said)

    def _word(self, *, accepted: bool, message: str, saved: bool = False) -> dict[str, Any]:
        word: dict[str, Any] = {"accepted": accepted, "step": self._version, "message": message}
        if saved:
            word["checkpoint"] = self._newest.to_wire() if self._newest else None
        return word


def error(status: HTTPStatus, text: str) -> Answer:
    """An answer that says what was wrong with the request."""
    return status, {"accepted": False, "error": text}
