"""Ranks meet at a port that nobody can take between its being named and their coming. Real gloo ranks in processes."""

from __future__ import annotations

import datetime
import multiprocessing as mp
import multiprocessing.connection
import socket
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from rljob_workload.megatron import meeting

WORLD = 3
SECONDS = 60.0


def rank_main(rank: int, address: str, listener: socket.socket | None, pipe: Connection) -> None:
    """Join the others, add up the ranks, and say what came out."""
    store = meeting.meet(address, rank=rank, world=WORLD, timeout=SECONDS, listener=listener)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    pipe.send(int(total))
    pipe.recv()  # rank 0 serves the store until all are done


def test_ranks_that_come_before_rank_0_wait_and_nobody_can_take_the_port_meanwhile() -> None:
    context = mp.get_context("forkserver")
    listener = meeting.listen("127.0.0.1")
    address = meeting.address_of(listener)
    port = int(address.rpartition(":")[2])
    pipes: list[Connection] = []
    ranks = []
    try:
        for rank in (1, 2, 0):
            if rank == 0:
                for pipe in pipes:
                    assert not pipe.poll(), "the others cannot be further than the door"
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", port))
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, address, None if rank else listener, theirs), daemon=True)
            process.start()
            ranks.append(process)
            pipes.append(ours)
        listener.close()
        for pipe in pipes:
            assert pipe.poll(SECONDS), "a rank did not come"
            assert pipe.recv() == 3
        for pipe in pipes:
            pipe.send("end")
        for process in ranks:
            process.join(SECONDS)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_the_listener_is_of_the_address_that_was_asked_for_and_of_no_other() -> None:
    with meeting.listen("127.0.0.1") as listener:
        host, _, port = meeting.address_of(listener).rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=SECONDS):
            pass
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", int(port)), timeout=SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_listener_at_the_wrong_rank_is_named_at_once(rank: int) -> None:
    with meeting.listen("127.0.0.1") as listener:
        with pytest.raises(ValueError, match=f"rank {rank} of 2 has {'no' if rank == 0 else 'a'} listener"):
            meeting.meet(meeting.address_of(listener), rank=rank, world=2, timeout=1, listener=listener if rank else None)
        assert listener.fileno() >= 0, "still the caller's"


def test_a_rank_that_never_comes_ends_the_meeting_at_its_deadline() -> None:
    listener = meeting.listen("127.0.0.1")
    with pytest.raises(dist.DistError, match="1/2"):
        meeting.meet(meeting.address_of(listener), rank=0, world=2, timeout=1, listener=listener)
