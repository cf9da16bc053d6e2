"""How a run ends when it does not end well: one exception per exit code, so that no failure is anonymous."""

from __future__ import annotations

import re

from rljob_api.exitcodes import ExitCode

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NAMED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")


class RunError(Exception):
    """The attempt is over; `code` says how, the message says what, where and what would help."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CollectorFailedError(Exception):
    """A replica or the collector itself failed; the attempt is over."""


class HungError(Exception):
    """Somebody did not answer within a deadline; the message names whom, and what was waited for."""


def plain(text: str) -> str:
    """Without the colours that Ray puts into remote tracebacks."""
    return _COLOURS.sub("", text)


def cause_line(text: str) -> str:
    """One line for people out of an exception's text, which may be a remote traceback: its last named error."""
    lines = [line.strip() for line in plain(text).splitlines() if line.strip()]
    if not any(line.startswith(("Traceback (most recent", 'File "')) for line in lines):
        return " ".join(" ".join(lines).split())[:600]
    named = [line for line in lines if _NAMED.match(line)]
    return (named or lines)[-1][:600]
