"""The audit journal: what was asked of the engine and what became of it, written down as it happens.

An auditor reads it beside the ranks' own records of what they trained; the trainer never does. It is written when the
environment variable RLJOB_JOURNAL is set, one JSON object a line, `journal.jsonl` in the run's directory:

    {"life": attempt}                                  the books were opened
    {"restored": step, "buffer": bool, "rehanded": [ordinal]}  ... with a checkpoint's state
    {"asked": [[ordinal, row, version]]}               row: CRC-32 of the prompt's tokens
    {"answered": ordinal, "size": n, "first": version, "equal": bool, "verdict": "buffered" | "filtered" | "evicted"}
    {"failed": ordinal}   {"withdrawn": ordinal}   {"evicted": ordinal}   {"skipped": ordinal, "cause": cause}
    {"committed": step}   {"snapshot": attempt}
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rljob_workload.algorithm.batch import Request
from rljob_workload.core.groups import Group
from rljob_workload.core.ledger import SkipCause
from rljob_workload.core.resume import RestoreReport
from rljob_workload.core.rollouts import Rollouts, RolloutSettings, SkipListener, Verdict
from rljob_workload.core.source import Source
from rljob_workload.core.window import Window

#: Set to anything: the journal is kept.
ENV_JOURNAL = "RLJOB_JOURNAL"
JOURNAL = "journal.jsonl"


def row_number(tokens: Sequence[int]) -> int:
    """What the journal calls a prompt."""
    return zlib.crc32(bytes(str(list(tokens)), "ascii"))


#: `Rollouts` and what is made like it.
RolloutsMaker = Callable[[Source, Window, RolloutSettings, SkipListener | None], Rollouts]


def keeper_of_books(directory: Path, attempt: int) -> RolloutsMaker:
    """`Rollouts`, or the one with a witness where a journal is wanted."""
    if not os.environ.get(ENV_JOURNAL):
        return Rollouts
    path = directory / JOURNAL
    _append(path, {"life": attempt})
    return partial(JournalledRollouts, path=path, attempt=attempt)


class JournalledRollouts(Rollouts):
    """The collector's bookkeeping, with a witness beside it."""

    def __init__(
        self,
        source: Source,
        window: Window,
        settings: RolloutSettings,
        on_skip: SkipListener | None,
        *,
        path: Path,
        attempt: int,
    ) -> None:
        super().__init__(source, window, settings, on_skip)
        self._path = path
        self._attempt = attempt

    def dispatch(self, version: int, now: float, limit: int | None = None) -> list[Request]:
        """Note what is asked."""
        requests = super().dispatch(version, now, limit)
        if requests:
            self._note(asked=[[request.tag[0], row_number(request.tokens), version] for request in requests])
        return requests

    def scored(self, group: Group, scores: Sequence[tuple[float, bool]]) -> Verdict:
        """Note the answers and their fate. An eviction is part of the same line."""
        verdict = super().scored(group, scores)
        if verdict is not Verdict.LATE:
            self._note(
                answered=group.ordinal,
                size=len(group.answers),
                first=min(answer.first_version for answer in group.answers),
                equal=len({reward for reward, _ in scores}) == 1,
                one_try=len({answer.tag for answer in group.answers}) == 1,
                verdict=verdict,
            )
        return verdict

    def failed(self, group: Group) -> SkipCause | None:
        """Note a lost try (a late one is none)."""
        if self.is_open(group):
            self._note(failed=group.ordinal)
        return super().failed(group)

    def withdraw(self, group: Group) -> None:
        """Note a try that was lost by no fault of its prompt."""
        if self.is_open(group):
            self._note(withdrawn=group.ordinal)
        super().withdraw(group)

    def commit(self, step: int, ordinals: Sequence[int]) -> None:
        """Note that the books have a step; which prompts it trained is the ranks' word."""
        super().commit(step, ordinals)
        self._note(committed=step)

    def snapshot(self) -> dict[str, Any]:
        """Note the moment of a save."""
        saved = super().snapshot()
        self._note(snapshot=self._attempt)
        return saved

    def restore(self, saved: Any, **rules: Any) -> RestoreReport:
        """Note what this life goes on from."""
        report = super().restore(saved, **rules)
        self._note(restored=rules.get("version"), buffer=rules.get("load_buffer", True), rehanded=report.rehanded)
        return report

    def _settle(self, version: int) -> None:
        before = set(self._buffer)
        super()._settle(version)
        for ordinal in sorted(before - set(self._buffer)):
            self._note(evicted=ordinal)

    def _skip(self, ordinal: int, cause: SkipCause, particulars: str) -> None:
        super()._skip(ordinal, cause, particulars)
        self._note(skipped=ordinal, cause=cause)

    def _note(self, **fields: Any) -> None:
        _append(self._path, fields)


def _append(path: Path, fields: dict[str, Any]) -> None:
    """One write a line: what a kill leaves behind is whole lines."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(fields).encode() + b"\n")
