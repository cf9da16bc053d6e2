"""The collector, as its parts see it. Each of them asks for what it needs beside this."""

from __future__ import annotations

from typing import Protocol

from rljob_workload.core.rollouts import Rollouts
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.server.desk import Desk


class Owner(Protocol):
    """What all parts use; everything but `monitor` with the lock held."""

    @property
    def monitor(self) -> Monitor: ...
    @property
    def rollouts(self) -> Rollouts: ...
    @property
    def desk(self) -> Desk: ...
    def settle(self) -> None: ...
