"""What can be wrong with an export; its own module, so that the command line needs no torch to read it."""

from __future__ import annotations


class ExportError(Exception):
    """A checkpoint that cannot be exported, or a place that it cannot be exported to. Says what would do."""
