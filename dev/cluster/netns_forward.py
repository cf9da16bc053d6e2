"""Forward a TCP port of this machine's loopback into a network namespace.

    netns_forward.py LISTEN_PORT NETNS_FILE TARGET_PORT

The listening socket is made first and stays in the caller's namespace; then the process enters the other one, where it
makes its outgoing connections (to 127.0.0.1:TARGET_PORT). So the cluster can live in a namespace that has no route outside.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000
CHUNK = 1 << 16


def enter_network_namespace(path: str) -> None:
    """Move this process into the namespace (os.setns needs Python 3.12; the machine's own may be older)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(path).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until it ends, and pass the end on; the other direction may go on."""
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:  # the peer is gone, which ends both directions
        writer.close()


async def serve(listener: socket.socket, target: int) -> None:
    """Accept connections for ever."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:  # nothing listens there yet: the client sees a closed connection and tries again
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        far_writer.close()
        writer.close()

    async with await asyncio.start_server(connect, sock=listener) as server:
        await server.serve_forever()


def main(listen_port: int, namespace: str, target_port: int) -> None:
    """Listen here, connect there."""
    listener = socket.create_server(("127.0.0.1", listen_port))
    enter_network_namespace(namespace)
    asyncio.run(serve(listener, target_port))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
