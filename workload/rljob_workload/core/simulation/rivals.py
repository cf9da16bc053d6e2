"""What other systems save and resume, as rules on the same simulated trainer.

Each rule turns the moment of a save into the state that a resume by that rule would have. Failed tries are dropped and not
counted, as those systems do; evictions for age and filtering are left to the core, in the rivals' favour. Systems that a
rule stands for are named in docs/lossless.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rljob_workload.core.ledger import State
from rljob_workload.core.ledger_file import ledger_from_json

#: (ordinal, state at the save, trained) -> state after the resume: d done, p to be answered again, b finished.
_Rule = Callable[[int, State | None, bool], str]


class Rival:
    """Keeps what a rule needs to know beside the ledger's file."""

    def __init__(self, rule: str, *, buffer: bool = True) -> None:
        self.rule = rule
        self.buffer = buffer
        self.trained: set[int] = set()
        self.dropped: set[int] = set()

    def forget(self) -> None:
        """A resume from scratch."""
        self.trained, self.dropped = set(), set()

    def saved(self, text: str) -> str:
        """The checkpoint with the rule's own knowledge."""
        return json.dumps(json.loads(text) | {"trained": sorted(self.trained), "dropped": sorted(self.dropped)})

    def resumed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state that this rule resumes to."""
        self.trained, self.dropped = set(saved.pop("trained")), set(saved.pop("dropped"))
        ledger = ledger_from_json(saved["ledger"])
        rule = self._rule(ledger.next_ordinal, {o: ledger.state_of(o) for o in ledger.live()})
        letters = [rule(o, ledger.state_of(o), o in self.trained) for o in range(ledger.next_ordinal)]
        frontier = next((o for o, letter in enumerate(letters) if letter != "d"), len(letters))
        buffered = {o for o, letter in enumerate(letters) if letter == "b"}
        again = {o for o, letter in enumerate(letters) if letter == "p"}
        self.dropped -= again
        saved["ledger"] |= {
            "frontier_ordinal": frontier,
            "window": ",".join(letters[frontier:]),
            "trained": letters.count("d"),
            "filtered": 0,
            "skipped": {},
            "skipped_names": {},
        }
        saved["buffer"] = [group for group in saved["buffer"] if group["ordinal"] in buffered]
        return saved

    def _rule(self, next_ordinal: int, live: dict[int, State | None]) -> _Rule:
        frontier = max(self.trained, default=-1) + 1
        outstanding = min((o for o, state in live.items() if state is not State.BUFFERED), default=next_ordinal)
        low = min((o for o in range(next_ordinal) if o not in self.trained), default=next_ordinal)
        consumed = {o for o in range(next_ordinal) if o not in live}  # dropped ones count as consumed
        cut = min(outstanding, frontier)

        def kept(state: State | None) -> bool:
            return self.buffer and state is State.BUFFERED

        rules: dict[str, _Rule] = {
            "live-cursor": lambda o, state, trained: "b" if kept(state) else "d",
            "frontier": lambda o, state, trained: "b" if kept(state) else "d" if o < frontier else "p",
            "low-water": lambda o, state, trained: "d" if o < low else "p",
            "cut": lambda o, state, trained: "b" if kept(state) else "d" if o < cut else "p",
            "consumed-set": lambda o, state, trained: "d" if o in consumed else "p",
        }
        return rules[self.rule]
