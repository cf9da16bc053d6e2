"""What the tests of the workload share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rljob_workload.runtime.logs import close_files

if TYPE_CHECKING:
    from rljob_workload.runtime.collector import Collector

    from .serving import Served


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A run sets its loggers up for its process; here many share one, each with its own standard error."""
    logger = logging.getLogger("rljob")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:] = handlers
    logger.propagate = propagate
    logger.setLevel(level)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Collector]]:
    """`fake_ranks.collector_in` in the test's directory."""
    from .fake_ranks import collector_in  # imports Ray, which most tests beside the collector's do without

    yield partial(collector_in, tmp_path)
    close_files()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """A front that is served, with the engine of `serving`."""
    from .serving import served  # imports the server, which few tests need

    with served(tmp_path) as running:
        yield running
