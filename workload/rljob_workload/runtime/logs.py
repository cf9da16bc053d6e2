"""Log files on the run's volume: one per process and attempt, so that they outlive the cluster."""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def log_to_file(path: Path) -> None:
    """Also write the `rljob` loggers of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
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
