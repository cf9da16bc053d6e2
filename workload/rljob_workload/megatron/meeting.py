"""Where the ranks of an attempt meet: a port that rank 0 has from the moment it names it.

A port that is only looked up, closed and bound again by torch some seconds later may be another process's by then: the whole
attempt would end with EADDRINUSE. So the listener itself is handed to torch. Other ranks may connect before rank 0 has come
that far: their connections wait in its queue.
"""

from __future__ import annotations

import datetime
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


def listen(host: str) -> socket.socket:
    """Take a free port of this address of the node; nobody else can until the listener is closed. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)


def address_of(listener: socket.socket) -> str:
    """What the other ranks are told: HOST:PORT."""
    host, port, *_ = listener.getsockname()
    return f"{host}:{port}"


def meet(address: str, *, rank: int, world: int, timeout: float, listener: socket.socket | None = None) -> Store:
    """The store that the ranks' process groups are built with; returns when all have connected.

    `timeout`: seconds, of this and of everything that is asked of the store later. Rank 0 serves it on its `listener`, which is
    torch's from then on. Raises torch's DistError where not all ranks come.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if (rank == 0) != (listener is not None):
        raise ValueError(f"rank {rank} of {world} has {'a' if listener else 'no'} listener; rank 0 needs one, and only rank 0")
    host, _, port = address.rpartition(":")
    return TCPStore(
        host,
        int(port),
        world,
        is_master=rank == 0,
        timeout=datetime.timedelta(seconds=timeout),
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def alone() -> Store:
    """The store of a world of one rank, which has nobody to meet."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()
