"""What the tests of the workload share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A run sets its loggers up for its process; here many share one, each with its own standard error."""
    logger = logging.getLogger("rljob")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:] = handlers
    logger.propagate = propagate
    logger.setLevel(level)
