"""Errors of the command line: shown as one line, never as a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can mend; the message says what, where and what would do."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
