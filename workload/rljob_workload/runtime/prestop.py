"""Runs in every pod of a run before it is stopped: asks the driver to save and end, waits until it has, and goes.

`python -m rljob_workload.runtime.prestop` is the pods' preStop hook. Kubernetes ends a pod only after its hook, so a drain, a
deletion and a suspension each leave a checkpoint, and no step is trained after it that would be lost. It never holds a pod
longer than the save's budget, and a driver that is gone or has no endpoint is no reason to wait. Standard library only: it has
to start at once while everything else is stopped.

When a whole run is deleted, the head's Service may go before its pods, and its name with it. A worker therefore finds the head
by the connection that Ray's node process keeps to it.
"""

from __future__ import annotations

import http
import http.client
import ipaddress
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rljob_api import names

_CONNECT_SECONDS = 3.0
_CONNECT_TRIES = 3
_ESTABLISHED = "01"
_PAUSE_SECONDS = 0.5


class PrestopError(Exception):
    """The hook was started without what it needs; the message names the variable."""


class _NoConnectionError(Exception):
    """Nobody answers at the driver's address."""

    def __init__(self, words: str, final: bool) -> None:
        super().__init__(words)
        self.final = final
        """The host said so (refused, no such name, no route), where a timeout may be a busy one."""


@dataclass(frozen=True)
class Settings:
    """Where the driver is, how long a save may take, and the token of its endpoints."""

    host: str
    seconds: float
    token_file: Path | None
    port: int = names.PROGRESS_PORT


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings. Raises PrestopError."""
    host, seconds = environment.get(names.ENV_DRIVER_HOST, ""), environment.get(names.ENV_SAVE_SECONDS, "")
    if not host:
        raise PrestopError(f"{names.ENV_DRIVER_HOST} is not set; the driver's host would do")
    if not seconds.isdecimal():
        raise PrestopError(f"{names.ENV_SAVE_SECONDS} is {seconds!r}; a whole number of seconds would do")
    token = environment.get(names.ENV_CONTROL_TOKEN_FILE)
    return Settings(host, float(seconds), Path(token) if token else None)


def connected_head(port: int = names.GCS_PORT, tables: Path = Path("/proc/net")) -> str:
    """Address of the host that something in this pod has an open connection with, at Ray's port; empty where there is none."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (tables / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, _, remote, state, *_ = line.split()
            address, _, number = remote.partition(":")
            if state == _ESTABLISHED and int(number, 16) == port:
                return _address(address)
    return ""


def _address(text: str) -> str:
    """An address of /proc/net: words of the machine's byte order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def end_run(settings: Settings) -> str:
    """Ask the driver to save and end, and wait until it has, it refuses, or the budget is over; one line for the log."""
    if not settings.host.startswith("127."):
        settings = replace(settings, host=connected_head() or settings.host)
    until = time.monotonic() + settings.seconds
    last, unconnected = "", 0
    while time.monotonic() < until:
        try:
            status, body = _ask(settings)
        except _NoConnectionError as error:
            unconnected += 1
            if error.final or unconnected == _CONNECT_TRIES:
                return "the driver has saved and ended" if last else f"no driver: {error}"
        except (OSError, http.client.HTTPException) as error:
            last = f"{type(error).__name__}: {error}"
        else:
            if status != http.HTTPStatus.ACCEPTED:  # which says: it saves, and then it ends
                return f"nothing to wait for: {status} {body[:200]}"
            last = body[:200]
        time.sleep(min(_PAUSE_SECONDS, max(until - time.monotonic(), 0)))
    return f"the driver has not ended within {settings.seconds:.0f} s (deadlines.saveSeconds); last answer: {last}"


def _ask(settings: Settings) -> tuple[int, str]:
    connection = http.client.HTTPConnection(settings.host, settings.port, timeout=_CONNECT_SECONDS)
    headers = {} if settings.token_file is None else {"Authorization": f"Bearer {settings.token_file.read_text().strip()}"}
    try:
        try:
            connection.connect()
        except OSError as error:
            raise _NoConnectionError(f"{type(error).__name__}: {error}", not isinstance(error, TimeoutError)) from error
        connection.request("POST", names.CONTROL_STOP_PATH, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(65536).decode(errors="replace")
    finally:
        connection.close()


def main() -> int:
    """Always 0: a hook that fails would only hide why the pod was stopped."""
    try:
        said = end_run(from_environment(os.environ))
    except (PrestopError, OSError) as error:
        said = str(error)
    print(f"rljob preStop: {said}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
