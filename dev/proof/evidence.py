"""What really happened in a run, put together from the ranks' records, the journal and the checkpoints' lineage.

The ledger is not asked. Trained prompts come from the file that each rank writes at its optimizer step; all ranks must tell
the same. Which life goes on from which checkpoint comes from the volume.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dev.proof.job import DATA
from dev.proof.life import JOURNAL, HarnessError, read_lines
from rljob_workload.core.checkpoint import RunDirectory
from rljob_workload.core.simulation import auditor as told
from rljob_workload.core.store.lineage import Name
from rljob_workload.data.builtin import load_builtin
from rljob_workload.environments.unreliable import never_judged
from rljob_workload.runtime.journal import row_number

#: What becomes of an answered group that is not buffered.
_VERDICTS: dict[str, type[told.Filtered | told.Evicted]] = {"filtered": told.Filtered, "evicted": told.Evicted}


@dataclass
class Records:
    """Everything that was written down about a run."""

    #: (attempt, step) -> ordinals, from the ranks.
    trained: dict[tuple[int, int], tuple[int, ...]]
    #: attempt -> its journal.
    journal: dict[int, list[dict[str, Any]]]
    #: attempt -> what it resumed from.
    resumed: dict[int, tuple[int, int] | None]
    #: attempt -> its fencing token.
    tokens: dict[int, int]
    problems: list[str] = field(default_factory=list)


def read_records(directory: Path) -> Records:
    """All records of a run directory."""
    ranks = sorted((directory / "trained").glob("rank-*.jsonl"))
    if not ranks:
        raise HarnessError(f"no rank has written what it trained in {directory / 'trained'}")
    journal: dict[int, list[dict[str, Any]]] = defaultdict(list)
    attempt = 0
    for event in read_lines(directory / JOURNAL):
        attempt = event.get("life", attempt)
        journal[attempt].append(event)
    told_by = [_trained(path) for path in ranks]
    records = Records(told_by[0], dict(journal), *_lineage(directory))
    for other, path in zip(told_by[1:], ranks[1:], strict=True):
        # A kill may reach one rank before its line and the other after it: that step was never committed.
        for key in told_by[0].keys() & other.keys():
            if told_by[0][key] != other[key]:
                records.problems.append(f"{path.name} trained other prompts than rank 0 in attempt and step {key}")
    return records


def _trained(path: Path) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(line["attempt"], line["step"]): tuple(line["ordinals"]) for line in read_lines(path)}


def _lineage(directory: Path) -> tuple[dict[int, tuple[int, int] | None], dict[int, int]]:
    """From the volume's record of tokens: what each attempt goes on from, and its token."""
    resumed: dict[int, tuple[int, int] | None] = {}
    tokens: dict[int, int] = {}
    for entry in RunDirectory(directory).fence().entries:
        name = Name.parse(entry.resumed_from) if entry.resumed_from else None
        resumed[entry.attempt] = (name.step, name.token) if name else None
        tokens[entry.attempt] = entry.token
    return resumed, tokens


# ---- the run as the auditor is told it -------------------------------------------------------------


def facts(seed: int, retry_budget: int, builtin: str = DATA) -> told.Facts:
    """What is true of the data, which is shuffled: its order is computed anew here."""
    rows = [row_number(row.tokens) for row in load_builtin(builtin).rows]
    orders: dict[int, list[int]] = {}

    def row_at(ordinal: int) -> int:
        epoch, place = divmod(ordinal, len(rows))
        if epoch not in orders:
            orders[epoch] = list(range(len(rows)))
            random.Random(f"{seed}:{epoch}").shuffle(orders[epoch])  # noqa: S311 - the data's documented order
        return rows[orders[epoch][place]]

    return told.Facts(row_at, (), (), retry_budget)


def poisoned() -> set[int]:
    """Rows that the environment never judges."""
    return {row_number(row.tokens) for row in load_builtin(DATA).rows if never_judged(row.expected)}


def tell(records: Records, group_size: int, max_age: int) -> Iterator[told.Event]:
    """The whole run in the order in which it happened."""
    for attempt in sorted(records.journal):
        yield from _Life(records, attempt).tell(group_size, max_age)


class _Life:
    """One life's journal, with the ranks' word put in where a step was committed."""

    def __init__(self, records: Records, attempt: int) -> None:
        self._events = records.journal[attempt]
        self._trained = {step: ordinals for (life, step), ordinals in sorted(records.trained.items()) if life == attempt}
        self._token = records.tokens[attempt]
        self._checkpoint = records.resumed[attempt]
        self._step = self._checkpoint[0] if self._checkpoint else 0

    def tell(self, group_size: int, max_age: int) -> Iterator[told.Event]:
        alive = False
        for event in self._events:
            if "restored" in event or ("asked" in event and not alive):
                alive = True
                yield self._resumed(event, group_size, max_age)
            if "committed" in event:
                self._step = event["committed"]
                yield from self._steps_up_to(self._step)
            yield from self._translated(event)
        yield from self._steps_up_to(max(self._trained, default=0))  # the kill came before their commit

    def _steps_up_to(self, last: int) -> Iterator[told.Event]:
        for step in [step for step in self._trained if step <= last]:
            yield told.Trained(step, self._trained.pop(step))

    def _resumed(self, event: dict[str, Any], group_size: int, max_age: int) -> told.Resumed:
        rehanded = tuple(event["rehanded"]) if "restored" in event else None
        checkpoint = checkpoint_number(*self._checkpoint) if self._checkpoint else None
        return told.Resumed(checkpoint, self._step, event.get("buffer", True), group_size, max_age, rehanded)

    def _translated(self, event: dict[str, Any]) -> Iterator[told.Event]:
        match event:
            case {"asked": asked}:
                for ordinal, row, version in asked:
                    yield told.Asked(ordinal, row, version)
            case {"answered": ordinal, "verdict": verdict}:
                yield told.Answered(ordinal, event["size"], event["first"], event["equal"], event["one_try"])
                if verdict != "buffered":
                    yield _VERDICTS[verdict](ordinal)
            case {"failed": ordinal}:
                yield told.Failed(ordinal)
            case {"withdrawn": ordinal}:
                yield told.Withdrawn(ordinal)
            case {"evicted": ordinal}:
                yield told.Evicted(ordinal)
            case {"skipped": ordinal, "cause": cause}:
                yield told.Skipped(ordinal, cause)
            case {"snapshot": _}:
                yield told.Saved(checkpoint_number(self._step, self._token))
            case {"life": _} | {"restored": _} | {"committed": _}:
                pass  # told by `tell` itself
            case _:
                raise HarnessError(f"{JOURNAL}: {event} is no event that the auditor knows")


def checkpoint_number(step: int, token: int) -> int:
    """One number for a checkpoint."""
    return token * 10_000_000 + step
