"""Where a run's server listens, who may ask it, and under which name its model is served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """What the driver tells the collector."""

    host: str
    token_file: str
    model: str
