"""What the report says while nothing advances: the collector's state, the oldest prompts, a hand-over under way.

A thread asks the actors' control calls now and then. It never waits for the driver and the driver never waits for it, so the
report goes on while a step hangs, which is when somebody reads it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rljob_api.progress import Handover, OldestPrompt
from rljob_workload.runtime.launch import Actors
from rljob_workload.runtime.progress import Progress
from rljob_workload.runtime.step import prompt_counts

log = logging.getLogger("rljob.driver")

#: Seconds between two looks; an operator reads less often.
LOOK_SECONDS = 2.0
#: Control calls answer in milliseconds.
ANSWER_SECONDS = 5.0
#: What the report says of a collector that does not.
SILENT = "NotAnswering"
#: A rank's phases that are part of a hand-over, in the order in which it goes through them.
HANDOVER_PHASES = ("Draining", "Train", "Save", "Waking")


class Watch:
    """Looks at the actors of one attempt."""

    def __init__(self, actors: Actors, progress: Progress) -> None:
        self._actors = actors
        self._progress = progress
        self._ended = threading.Event()
        #: Skipped prompts that somebody has been told of.
        self._told = progress.report.prompts.skipped

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look until the block ends."""
        thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(1.0)  # a look that waits for a silent actor must not hold up the end; it changes nothing any more

    def _follow(self) -> None:
        while True:
            try:
                self.look()
            except Exception as err:
                # An actor that has died ends the driver's own call to it, with the cause; here it is only a missing line.
                if not isinstance(err, RayError) and not self._ended.is_set():
                    raise
                log.debug("no look at the actors: %s", type(err).__name__)
            if self._ended.wait(LOOK_SECONDS):
                return

    def look(self) -> None:
        """Ask everybody once, and put what they say into the report. Raises RayError where an actor has died."""
        calls = [self._actors.collector.status.remote(), *(rank.status.remote() for rank in self._actors.ranks)]
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)
        answers = [_answer(call) if call in done else None for call in calls]
        collector, ranks = answers[0], answers[1:]
        if self._ended.is_set():
            return
        oldest = [] if collector is None else oldest_prompts(collector["oldest_in_flight"], [rank for rank in ranks if rank])
        state = SILENT if collector is None else str(collector["state"])
        training = collector is not None and collector["counts"]["training"] > 0
        seen = None if collector is None else prompt_counts(collector)
        self._progress.update(training=training, seen=seen, collector_state=state, oldest=oldest, handover=handover(ranks))
        if seen is not None and seen.skipped > self._told and (not self._told or seen.skipped >= 2 * self._told):
            # The first one, and then each doubling: where every prompt fails, one line for each would hide the rest.
            self._told = seen.skipped
            named = "; ".join(f"{cause}: {', '.join(map(str, names[:8]))}" for cause, names in seen.skipped_by.items())
            log.warning("%d prompts are skipped by now (%s); the collector's log says why", seen.skipped, named)


def _answer(call: Any) -> Any:
    try:
        return ray.get(call, timeout=0)
    except GetTimeoutError:
        return None


def oldest_prompts(described: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> list[OldestPrompt]:
    """The collector's oldest prompts, with the tokens that the ranks' engines have generated of unfinished answers."""
    running: dict[tuple[int, ...], int] = {}
    for rank in ranks:
        for tag, tokens in rank.get("tokens_in_flight", {}).items():
            # Ranks of one replica hold the same answers.
            running[tuple(tag)] = max(running.get(tuple(tag), 0), tokens)
    return [
        OldestPrompt(
            ordinal=one["ordinal"],
            age_seconds=one["age_seconds"],
            tokens=one["tokens"] + running.get(tuple(one["tag"]), 0),
            answers=one["answers"],
            attempt=one["attempt"],
        )
        for one in described
    ]


def handover(ranks: Sequence[Mapping[str, Any] | None]) -> Handover | None:
    """The hand-over that ranks are in: the phase that the slowest is in, and who is not even there. None: all decode."""
    phases = [None if rank is None else str(rank["phase"]) for rank in ranks]
    inside = [phase for phase in phases if phase in HANDOVER_PHASES]
    if not inside:
        return None
    phase = min(inside, key=HANDOVER_PHASES.index)
    absent = [index for index, other in enumerate(phases) if other not in HANDOVER_PHASES]
    seconds = max(float(rank.get("phase_seconds", 0.0)) for rank in ranks if rank and rank["phase"] == phase)
    return Handover(phase=phase, seconds=round(seconds, 3), absent_ranks=absent[:64])
