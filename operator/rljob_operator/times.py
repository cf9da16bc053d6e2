"""Times as Kubernetes writes them: RFC 3339, UTC, whole seconds."""

from __future__ import annotations

import datetime


def format_time(moment: datetime.datetime) -> str:
    """`2026-11-29T18:33:08Z`."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime.datetime:
    """An aware datetime. Raises ValueError for anything else than RFC 3339."""
    moment = datetime.datetime.fromisoformat(text.upper())
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment
