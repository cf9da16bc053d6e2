"""Hand-overs between real processes: ranks that share one gloo communicator for decode and training.

    python -m tests.workload.gloo_cycles CYCLES VARIANT...

Each rank has an engine whose work runs on a device of its own (a thread with a queue), behind the caller's back, as on a GPU.
Every piece of work announces itself in shared memory and looks whether work of the other kind is under way on any rank; every
collective exchanges its name. Prints one line per variant: `ok`, or how decode and training met.
"""

from __future__ import annotations

import datetime
import mmap
import multiprocessing as mp
import multiprocessing.connection
import os
import queue
import random
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from rljob_workload.core.handover import Handover, Phase, Step
from rljob_workload.megatron import meeting
from rljob_workload.megatron.device import RankBarrier

RANKS = 2
MIXED = 3
#: Longest wait for the other rank; a mixed-up communicator shows by then at the latest.
SECONDS = 10.0


class BarrierBeforeDrain(Handover):
    drain_order = (Step.STOP_INTAKE, Step.SUSPEND_ENGINE, Step.BARRIER, Step.SYNCHRONIZE, Step.ENTER_TRAIN)


class SignalBeforeBarrier(Handover):
    wake_order = (Step.LEAVE_TRAIN, Step.SYNCHRONIZE, Step.RESUME_ENGINE, Step.BARRIER)


#: Variant: the machine, and whether the device that is drained is the rank's own.
VARIANTS: dict[str, tuple[type[Handover], bool]] = {
    "right": (Handover, True),
    "barrier-before-drain": (BarrierBeforeDrain, True),
    "signal-before-barrier": (SignalBeforeBarrier, True),
    "wrong-device": (Handover, False),
}


class Shared:
    """Memory of all ranks: what each is doing. Bytes: decode of each rank, training of each rank."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * RANKS)

    def begin(self, kind: int, rank: int) -> None:
        """Announce, then look: of two that begin at once, one sees the other."""
        self._memory[kind * RANKS + rank] = 1
        other = 1 - kind
        if any(self._memory[other * RANKS : (other + 1) * RANKS]):
            names = ("decodes", "trains")
            mixed(f"rank {rank} {names[kind]} while a rank {names[other]}")

    def end(self, kind: int, rank: int) -> None:
        self._memory[kind * RANKS + rank] = 0


DECODE, TRAIN = 0, 1


def mixed(how: str) -> None:
    print(f"mixed: {how}", flush=True)
    os._exit(MIXED)


class GlooRank:
    """A rank's parts: engine, devices, barrier."""

    def __init__(self, rank: int, shared: Shared, *, own_device: bool) -> None:
        self._rank, self._shared, self._own = rank, shared, own_device
        self._barrier = RankBarrier(SECONDS)
        # Two devices, as on a node with two ranks; the calling thread's current one is always the first.
        self._devices: list[queue.Queue[str]] = [queue.Queue(), queue.Queue()]
        self._device = self._devices[1]
        self._random = random.Random(f"rank {rank}")
        threading.Thread(target=self._run_device, daemon=True).start()

    def _run_device(self) -> None:
        while True:
            name = self._device.get()
            self._shared.begin(DECODE, self._rank)
            self.delay()
            self.collective(name)
            self.delay()
            self._shared.end(DECODE, self._rank)
            self._device.task_done()

    def delay(self) -> None:
        """At random, now and then for long."""
        time.sleep(self._random.choice((0.0, 0.0, 0.0002, 0.003)))

    def collective(self, name: str) -> None:
        """One on the shared communicator: all ranks must be at the same."""
        mine = torch.tensor(list(name.ljust(16).encode()), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(everybody, mine)
        names = [bytes(part.tolist()).decode().strip() for part in everybody]
        if len(set(names)) > 1:
            mixed(f"collectives {names} met")

    def decode(self, cycle: int, count: int) -> None:
        for number in range(count):
            self._device.put(f"decode {cycle}.{number}")

    def stop_intake(self) -> None:
        self.delay()

    def suspend_engine(self) -> None:
        self.delay()

    def synchronize(self) -> None:
        (self._device if self._own else self._devices[0]).join()

    def barrier(self, phase: Phase) -> None:
        self._barrier.wait(phase)

    def enter_train(self) -> None:
        self._shared.begin(TRAIN, self._rank)

    def leave_train(self) -> None:
        self.delay()
        self._shared.end(TRAIN, self._rank)
        self.delay()

    def resume_engine(self) -> None:
        self.decode(0, 1)


def rank_main(rank: int, listener: socket.socket, shared: Shared, cycles: int, variant: str) -> None:
    mine = listener if rank == 0 else None
    store = meeting.meet(meeting.address_of(listener), rank=rank, world=RANKS, timeout=SECONDS, listener=mine)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    machine, own_device = VARIANTS[variant]
    part = GlooRank(rank, shared, own_device=own_device)
    handover = machine(rank, part)
    plan = random.Random(7)
    for number in range(cycles):
        part.decode(number, plan.randint(0, 3))
        handover.to_train()
        part.collective(f"train {number}")
        part.delay()
        if plan.random() < 0.2:
            with handover.saving():
                part.collective(f"save {number}")
        handover.to_decode()
    part._device.join()
    dist.barrier()
    os._exit(0)


def run(variant: str, cycles: int) -> str:
    """One variant; `ok` when all cycles went through."""
    listener = meeting.listen("127.0.0.1")
    context: Any = mp.get_context("fork")
    shared = Shared()
    ranks = [context.Process(target=rank_main, args=(rank, listener, shared, cycles, variant)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    listener.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):
            break
        multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], 1.0)
    for process in ranks:
        process.kill()
        process.join()
    codes = [process.exitcode for process in ranks]
    return "ok" if codes == [0] * RANKS else "mixed" if MIXED in codes else f"ended with {codes}"


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(f"{name}: {run(name, int(sys.argv[1]))}", flush=True)
