"""How a run ends when it does not end well: one exception per exit code, so that no failure is anonymous."""

from __future__ import annotations

from rljob_api.exitcodes import ExitCode


class RunError(Exception):
    """The attempt is over; `code` says how, the message says what, where and what would help."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
