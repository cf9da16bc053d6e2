"""Saving and resuming the collection: what is kept, what is answered again, what is refused.

After a resume every prompt of the saved run is where its books say: done, finished (in the restored buffer), or waiting to be
answered again. Prompts that the dead attempt handed out after the save never happened for the weights; the source stands at
the save's place, so they come again as new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_workload.core.groups import FinishedGroup, group_from_json, group_to_json
from rljob_workload.core.ledger import Ledger, SkipCause, State
from rljob_workload.core.ledger_file import ledger_from_json, ledger_to_json, resume_in_flight
from rljob_workload.core.source import Source, SourceChangedError
from rljob_workload.core.window import Window

log = logging.getLogger("rljob.core")

SNAPSHOT_VERSION = 1


class RolloutError(Exception):
    """Saved collector state that cannot be read."""


@dataclass(frozen=True, slots=True)
class ResumeRules:
    """How a saved run may be taken over."""

    #: The policy version of the checkpoint (its step); None leaves the ages to the first step.
    version: int | None
    #: Train on finished groups of the checkpoint; False answers them again.
    load_buffer: bool
    #: With other data: True counts the undone prompts as skipped and begins the new data, False refuses.
    restart_on_change: bool
    #: Prompts trained by a checkpoint that has no ledger.
    trained_before: int
    group_size: int


@dataclass(slots=True)
class RestoreReport:
    """What a resume took over."""

    handed_out: int
    restored_groups: int
    rehanded: list[int]
    #: Prompts given up because the data is another one.
    source_changed: int = 0
    #: Upper bound of prompts lost before a checkpoint without a ledger.
    at_risk: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Restored:
    """The state to go on with."""

    ledger: Ledger
    buffer: dict[int, FinishedGroup]
    #: Ordinals to be answered again; sorted, and so a heap.
    waiting: list[int]
    report: RestoreReport


def snapshot(ledger: Ledger, source: Source, buffer: Iterable[FinishedGroup]) -> dict[str, Any]:
    """Everything to resume from, of one moment. Refused while a training step is open."""
    return {
        "version": SNAPSHOT_VERSION,
        "ledger": ledger_to_json(ledger),
        "source": source.save(),
        "buffer": [group_to_json(group) for group in buffer],
    }


def restore(saved: Any, source: Source, window: Window, rules: ResumeRules) -> Restored:
    """Bring ledger, buffer and source to the moment of a snapshot, under this attempt's rules."""
    if saved is None:
        return _without_ledger(source, window, rules)
    if not isinstance(saved, Mapping) or saved.get("version") != SNAPSHOT_VERSION:
        found = saved.get("version") if isinstance(saved, Mapping) else type(saved).__name__
        raise RolloutError(f"the saved collector state is malformed: field 'version': {found!r} is not {SNAPSHOT_VERSION}")
    for name, kind in {"ledger": Mapping, "source": Mapping, "buffer": list}.items():
        if not isinstance(saved.get(name), kind):
            raise RolloutError(
                f"the saved collector state is malformed: field {name!r}: found {type(saved.get(name)).__name__}"
            )
    ledger = ledger_from_json(saved["ledger"])
    resume_in_flight(ledger)
    report = RestoreReport(ledger.next_ordinal, 0, [], at_risk=ledger.at_risk)
    buffer = _restore_buffer(ledger, saved["buffer"], window, rules)
    try:
        source.restore(saved["source"], ledger.next_ordinal, ledger.live())
    except SourceChangedError as err:
        if not rules.restart_on_change:
            raise SourceChangedError(
                f"{err}; use the same data, another checkpoint directory, or spec.data.onChange Restart, which gives up the "
                f"{len(ledger.live())} undone prompts and begins the new data"
            ) from err
        report.source_changed = _give_up(ledger)
        report.warnings.append(f"{err}; {report.source_changed} undone prompts are skipped (SourceChanged)")
        buffer = {}
        source.restart(ledger.next_ordinal)
    waiting = ledger.in_state(State.PENDING, State.RETRYABLE)
    report.restored_groups, report.rehanded = len(buffer), list(waiting)
    return Restored(ledger, buffer, waiting, report)


def _restore_buffer(ledger: Ledger, saved: list[Any], window: Window, rules: ResumeRules) -> dict[int, FinishedGroup]:
    """The finished groups that can be trained; the others become retryable."""
    groups: dict[int, FinishedGroup] = {}
    if rules.load_buffer:
        for place, data in enumerate(saved):
            try:
                group = group_from_json(data)
            except (KeyError, TypeError, ValueError, AttributeError) as err:
                raise RolloutError(
                    f"the saved collector state is malformed: field 'buffer[{place}]': {type(err).__name__}: {err}"
                ) from err
            groups[group.ordinal] = group
    usable: dict[int, FinishedGroup] = {}
    for ordinal in ledger.in_state(State.BUFFERED):
        found = groups.get(ordinal)
        if found is None or len(found.answers) != rules.group_size or _is_of_the_future(found, rules.version):
            ledger.reopen(ordinal)
        elif rules.version is not None and window.too_old(found.first_version, rules.version):
            ledger.evict(ordinal)
        else:
            usable[ordinal] = found
    return usable


def _is_of_the_future(group: FinishedGroup, version: int | None) -> bool:
    """Whether newer weights than the checkpoint's sampled an answer: it belongs to another checkpoint."""
    return version is not None and any(scored.answer.last_version > version for scored in group.answers)


def _give_up(ledger: Ledger) -> int:
    """All undone prompts belong to data that is gone."""
    for ordinal in ledger.in_state(State.BUFFERED):
        ledger.reopen(ordinal)
    undone = ledger.live()
    for ordinal in undone:
        ledger.skip(ordinal, SkipCause.SOURCE_CHANGED)
    return len(undone)


def _without_ledger(source: Source, window: Window, rules: ResumeRules) -> Restored:
    """A checkpoint of something that kept no books: go on behind its trained prompts, and say what that may have cost."""
    trained = rules.trained_before
    at_risk = min(trained, (window.max_age + 1) * window.prompts_per_step)
    ledger = Ledger.without_history(trained, at_risk)
    while source.next_ordinal < trained:
        source.pull()
        source.release(source.next_ordinal - 1)
    warning = (
        f"the checkpoint has no prompt ledger: up to {at_risk} prompts may have been lost before it (status.prompts.atRisk); "
        "from the next checkpoint on none is"
    )
    return Restored(ledger, {}, [], RestoreReport(trained, 0, [], at_risk=at_risk, warnings=[warning]))
