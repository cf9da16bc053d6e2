"""When to kill, and what the kill hit.

Moments are drawn from the seed over wall time. Some are held back until the trainer is where the proof wants it to be, which
is seen from outside, in files; there is no hook in the trainer. What a kill really hit is judged afterwards, by what it left
behind: only that goes into the table.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from dev.proof.life import READY_SECONDS, Life
from rljob_workload.core.checkpoint import RunDirectory
from rljob_workload.core.store.fence import Entry


class Hit(StrEnum):
    """Where the trainer was when it was killed."""

    RESUME = "during a resume"
    START = "before it had taken up a checkpoint"
    SAVE = "inside a save"
    COMMIT = "between optimizer step and commit"
    SAVED = "between a save and the next prompt"
    STEPS = "while generating or training"


#: What the proof insists on.
WANTED = (Hit.SAVE, Hit.COMMIT, Hit.RESUME)
#: A save takes tens of milliseconds on a small model.
SAVE_SECONDS = 0.06
#: The collector is held this long, so that the ranks can end the step that they are in.
FREEZE_SECONDS = 0.25
#: A process that waits for its disk stops only afterwards; one that takes longer is let go and held another time.
STOP_SECONDS = 5.0
_GIVE_UP_SECONDS = 120.0
#: A resume takes about this share of a start; the rest is imports and Ray.
RESUME_SHARE = 0.35


@dataclass(frozen=True)
class Plan:
    """One kill to come: what it aims at, and its two draws from [0, 1)."""

    aim: Hit
    when: float
    within: float


def plans(draw: random.Random, kills: int, each: int) -> list[Plan]:
    """`each` kills for every wanted moment, the others anywhere, in an order of the seed's (the first and the last anywhere).

    The last one leaves the most of the run behind it, and a missed moment needs steps to be tried again.
    """
    aims = [aim for aim in WANTED for _ in range(each)]
    aims += [Hit.STEPS] * max(0, kills - len(aims) - 2)
    draw.shuffle(aims)
    aims = [Hit.STEPS, *aims, Hit.STEPS]
    return [plan(draw, aim) for aim in aims]


def plan(draw: random.Random, aim: Hit) -> Plan:
    """One more kill."""
    return Plan(aim, draw.random(), draw.random())


def strike(life: Life, plan: Plan, *, delay: float, start_seconds: float) -> bool:
    """Wait for the moment and kill. False when the run had ended before."""
    if plan.aim is Hit.RESUME:
        # From the moment at which it has chosen a checkpoint and taken its token, to about its first prompt.
        if not life.wait_until(lambda: token_of(life) is not None, "it takes a token", seconds=READY_SECONDS):
            return False
        wanted = time.monotonic() + plan.when * RESUME_SHARE * start_seconds
        if not life.wait_until(lambda: time.monotonic() > wanted, "", seconds=start_seconds + 60, every=0.05):
            return False
    else:
        if not life.wait_until_ready():
            return False
        began = time.monotonic()
        if not life.wait_until(lambda: time.monotonic() - began > delay, "", seconds=delay + 60, every=0.05):
            return False
        if plan.aim is Hit.SAVE and not _until_save(life, plan.within * SAVE_SECONDS):
            return False
        if plan.aim is Hit.COMMIT and not until_uncommitted(life, plan.within):
            return False
    if life.process.poll() is not None:
        return False
    life.kill()
    return True


def _until_save(life: Life, more: float) -> bool:
    """A checkpoint is being written."""
    before = set(life.directory.iterdir())

    def writing() -> bool:
        return any(path.name.startswith(".tmp-step") for path in set(life.directory.iterdir()) - before)

    if not life.wait_until(writing, "a save begins", seconds=_GIVE_UP_SECONDS, every=0.001):
        return False
    time.sleep(more)
    return True


def until_uncommitted(life: Life, within: float) -> bool:
    """Hold the collector, again and again, until the ranks have ended a step in the meantime: it cannot be committed then."""
    holder = life.collector()

    def caught() -> bool:
        if holder is None:
            return False
        try:
            if _stand_still(holder):
                before = len(life.trained())  # what ended earlier may have been committed before it stood still
                time.sleep(FREEZE_SECONDS)
                if len(life.trained()) > before:
                    return True
            holder.resume()
        except psutil.NoSuchProcess:  # the run ends; `wait_until` tells how
            return False
        time.sleep(0.01 * within)  # a small part of a step: what ends within it has been committed
        return False

    return life.wait_until(caught, "a step ends while the collector is held", seconds=_GIVE_UP_SECONDS, every=0.001)


def _stand_still(process: psutil.Process) -> bool:
    """Stop a process; whether it did within `STOP_SECONDS`. Raises NoSuchProcess where it is gone."""
    process.suspend()
    deadline = time.monotonic() + STOP_SECONDS
    while (status := process.status()) != psutil.STATUS_STOPPED:
        if status == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def hit(life: Life) -> Hit:
    """What the killed life was doing, by what it left: its journal, rank 0's record, and the directory."""
    events = life.events()
    if not any("asked" in event for event in events):
        token = token_of(life)
        return Hit.START if token is None or token.resumed_from is None else Hit.RESUME
    committed = [event["committed"] for event in events if "committed" in event]
    trained = life.trained()
    if trained and trained[-1] not in committed:
        return Hit.COMMIT
    if _unpublished(life, events):
        return Hit.SAVE
    last: dict[str, Any] = next((event for event in reversed(events) if {"snapshot", "asked"} & event.keys()), {})
    return Hit.SAVED if "snapshot" in last else Hit.STEPS


def _unpublished(life: Life, events: list[dict[str, Any]]) -> bool:
    """Whether the newest save of this life has not become a checkpoint. Engines may have gone on generating meanwhile."""
    step, saved = 0, None
    for event in events:
        step = event.get("committed", step)
        if "snapshot" in event:
            saved = step
    return saved is not None and not any(name.startswith(f"step-{saved:06d}-") for name in _checkpoints(life.directory))


def token_of(life: Life) -> Entry | None:
    """The token that this life holds, which says what it goes on from; None while it has taken none."""
    entries = RunDirectory(life.directory).fence().entries
    return next((entry for entry in reversed(entries) if entry.attempt == life.number), None)


def _checkpoints(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith("step-")]
