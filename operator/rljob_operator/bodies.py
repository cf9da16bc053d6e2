"""Reading the body of an answer that somebody else's pod gives: never more than this process should hold."""

from __future__ import annotations

import aiohttp

LONGEST_BODY = 2**20
"""Bytes of an answer of Ray or of a driver that are kept."""


async def read_end(content: aiohttp.StreamReader) -> str:
    """The end of a body: a driver's log may be longer than this process should hold, and its end is what matters."""
    kept = bytearray()
    async for chunk in content.iter_any():
        kept += chunk
        if len(kept) > 2 * LONGEST_BODY:
            del kept[:-LONGEST_BODY]
    return kept[-LONGEST_BODY:].decode(errors="replace")
