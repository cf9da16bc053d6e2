"""Log files on the run's volume: one per process and attempt, so that they outlive the cluster."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class _LogFile(logging.FileHandler):
    """A log file that says once that it cannot be written; the run's own writes decide what a full volume means."""

    _silent = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self._silent:
            self._silent = True
            print(f"rljob: cannot write {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError as err:  # what is left in its buffer does not fit either
            if not self._silent:
                print(f"rljob: cannot write {self.baseFilename}: {err}", file=sys.stderr)


def log_to_file(path: Path) -> None:
    """Also write the `rljob` loggers of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger("rljob")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def close_files() -> None:
    """Close the log files of this process (a process may run several attempts)."""
    logger = logging.getLogger("rljob")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.FileHandler):
            logger.removeHandler(handler)
            handler.close()
