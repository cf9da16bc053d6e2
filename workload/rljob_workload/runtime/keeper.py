"""What is saved of what a run has reached, and who learns of it: the rules of when, the control endpoints, the report.

`Saves` writes checkpoints; here it is decided what is in one, and known which step the newest of them has.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from rljob_api.exitcodes import ExitCode
from rljob_api.progress import CheckpointInfo
from rljob_workload.core.checkpoint import Checkpoint, RunDirectory
from rljob_workload.core.due import Due, DueRules
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.control import Control
from rljob_workload.runtime.progress import Progress
from rljob_workload.runtime.record import Record
from rljob_workload.runtime.resume import Beginning, Resumed, checkpoint_info
from rljob_workload.runtime.saves import Saves
from rljob_workload.runtime.settings import Attempt


@dataclass(frozen=True, slots=True)
class Parts:
    """What the steps and the saves of an attempt work with, once its actors are there."""

    attempt: Attempt
    calls: Calls
    record: Record
    progress: Progress
    control: Control


class Keeper:
    """All checkpoints of one attempt, from when there is something to save: the rules' seconds count from here."""

    def __init__(self, parts: Parts, begin: Beginning, resumed: Resumed) -> None:
        self._parts = parts
        attempt = parts.attempt
        self._saves = Saves(attempt, begin.token, RunDirectory(attempt.directory))
        if begin.checkpoint is not None:
            self._saves.resumed(begin.checkpoint)
        rules = DueRules(
            every_steps=attempt.spec.checkpoint.every_steps,
            last_step=attempt.spec.algorithm.grpo.steps,
            every_seconds=attempt.spec.checkpoint.every_seconds,
            deadline=parts.record.ends,
        )
        #: Says when a save is due. The control endpoints put their wishes there.
        self.due = Due(rules, time.monotonic)
        self._saved_step = resumed.version
        self._newest: CheckpointInfo | None = resumed.report.get("checkpoint")
        self._ticket = 0
        parts.control.attach(self.due, resumed.version, self._newest)

    def stepped(self, gradient: float) -> None:
        """A step with this gradient norm was trained: the next save must differ from the last one."""
        self._saves.stepped(gradient)

    def save(self, step: int) -> None:
        """Save the state of this step; the engines are down and the collector is paused. It is published later.

        Raises RunError: SAVE_FAILED, FENCED, HUNG; what went wrong with the save before, too.
        """
        parts = self._parts
        parts.progress.update(phase="Saving")
        self._saves.wait()  # one at a time; also, its end must not be taken for this one's
        began = time.monotonic()
        # In this order: who asks in between has this save, and gets one more at worst.
        self.due.begun()
        self._ticket = parts.control.saving()
        deadline = parts.attempt.spec.deadlines.save_seconds
        collected = parts.calls.get(parts.calls.collector.snapshot.remote(), deadline, "the collector gives no snapshot")
        state = {
            "collector": collected,
            "elapsed_seconds": parts.record.clocks.elapsed,
            "totals": asdict(parts.record.totals),
            "name": parts.attempt.name,
            "namespace": parts.attempt.namespace,
            "uid": parts.attempt.uid,
            "attempt": parts.attempt.number,
        }
        self._saves.begin(parts.calls, step, state, lambda saved: self._saved(saved, time.monotonic() - began))
        self._saved_step = step

    def save_if_new(self, step: int) -> bool:
        """Save between two steps, the engines awake; False where the newest state is saved already, True: they are down."""
        if self.acknowledge(step):
            return False
        self._parts.calls.ranks("sleep", self._parts.attempt.spec.deadlines.handover_seconds, ExitCode.HANDOVER_TIMEOUT)
        self.save(step)
        return True

    def acknowledge(self, step: int) -> bool:
        """Whether this step, the newest, was saved last: then whoever has asked for a save has it, once it is published."""
        if step > self._saved_step:
            return False
        self.due.served()
        self._ticket = self._parts.control.saving()
        if not step or (self._newest is not None and self._newest.step == step):
            self._parts.control.saved(self._newest, self._ticket)
        return True

    def check(self) -> None:
        """Raises what went wrong with a save in the background: RunError (SAVE_FAILED, FENCED, RANK_LOST)."""
        self._saves.check()

    def wait(self) -> None:
        """The pending save, if there is one, has been published. Raises RunError."""
        self._saves.wait()

    def settle(self) -> None:
        """The attempt is ending, well or badly: a save that can still be published is."""
        self._saves.settle()

    def _saved(self, checkpoint: Checkpoint, seconds: float) -> None:
        """There is a new checkpoint on the volume (told by the thread that wrote it)."""
        # First the checkpoint, then the ticket: `acknowledge` has it the other way round, and one of the two sees both.
        self._newest = checkpoint_info(self._parts.attempt, checkpoint)
        self._parts.progress.update(checkpoint=self._newest)
        self.due.took(seconds)
        self._parts.control.saved(self._newest, self._ticket)
