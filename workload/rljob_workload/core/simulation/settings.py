"""What a simulated run is like: everything follows from these values, so a run is repeated by one command."""

from __future__ import annotations

import math
import random
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

RULES = ("ledger", "live-cursor", "frontier", "low-water", "cut", "consumed-set")
SOURCES = ("seekable", "replayable")


class SettingsError(Exception):
    """A value that no run can have; names the option."""


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One simulated run. Times are in mean answer times."""

    seed: int = 0
    #: Prompts to train; filtered and skipped ones come on top.
    prompts: int = 2000
    crashes: int = 5
    #: Share of tries that fail.
    failure_rate: float = 0.02
    #: Share of tries that are withdrawn by no fault of their prompt; each time half of all others under way go with it.
    withdrawal_rate: float = 0.005
    rule: str = "ledger"
    source: str = "seekable"
    load_replay_buffer: bool = True
    #: Rows of the data set: fewer than prompts, so that epochs end within the run.
    rows: int = 0
    prompts_per_step: int = 32
    group_size: int = 2
    max_age: int = 2
    in_flight: int = 0
    retry_budget: int = 3
    #: Rows per handout of the replayable source.
    handout: int = 32
    #: Rows of undone prompts go into the checkpoint (replayable source).
    keep_rows: bool = True
    save_every: int = 10
    filter_rate: float = 0.05
    #: Share of rows that always fail, of rows whose answers never come, and of rows that are too long or unreadable.
    bad_rows: float = -1.0
    #: Spread of the answer times (sigma of a log-normal).
    spread: float = 1.0
    train_time: float = 0.8
    answer_timeout: float = 40.0
    #: The trainer takes what is finished and evicts what comes too late, instead of waiting for it (`RolloutSettings.waits`);
    #: None: with the rules that are not ours.
    free_order: bool | None = None
    #: Change P, G, ages, caps, batch size and the use of the buffer at every resume.
    vary: bool = False

    def resolved(self) -> SimSettings:
        """With derived defaults filled in. Raises SettingsError for values that make no run."""
        for name, low in {
            "prompts": 1,
            "crashes": 0,
            "prompts_per_step": 1,
            "group_size": 2,
            "max_age": 1,
            "handout": 1,
            "save_every": 1,
            "rows": 0,
            "in_flight": 0,
            "retry_budget": 0,
        }.items():
            if getattr(self, name) < low:
                raise SettingsError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least {low}")
        for name in ("failure_rate", "withdrawal_rate", "filter_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')} {getattr(self, name)}: from 0 to below 1")
        for name in ("spread", "train_time", "answer_timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SettingsError(f"--{name.replace('_', '-')} {getattr(self, name)}: from 0 on, and finite")
        for name, values in {"rule": RULES, "source": SOURCES}.items():
            if getattr(self, name) not in values:
                raise SettingsError(f"--{name} {getattr(self, name)}: one of {', '.join(values)}")
        bad = self.failure_rate / 40 if self.bad_rows < 0 else self.bad_rows
        if not bad <= 0.1:
            raise SettingsError(f"--bad-rows {bad}: at most 0.1")
        rows = self.rows or max(8, self.prompts * 2 // 5)
        free = self.rule != "ledger" if self.free_order is None else self.free_order
        return replace(self, rows=rows, bad_rows=bad, free_order=free)

    def command(self) -> str:
        """The command that repeats this run."""
        words = ["rljob simulate"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING or value == field.default:
                continue
            name = field.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            else:
                words.append(f"--{name} {value}")
        return " ".join(words)


def random_schedule(seed: int) -> SimSettings:
    """A small run with everything drawn from the seed."""
    rng = random.Random(f"schedule:{seed}")  # noqa: S311 - reproducible, not secret
    pick: Any = rng.choice
    prompts_per_step = pick((1, 2, 3, 4, 8))
    prompts = rng.randint(10, 90)
    return SimSettings(
        seed=seed,
        prompts=prompts,
        crashes=rng.randint(1, 6),
        failure_rate=pick((0.0, 0.02, 0.1, 0.3)),
        source=pick(SOURCES),
        load_replay_buffer=pick((True, False)),
        rows=rng.randint(3, prompts + 10),
        prompts_per_step=prompts_per_step,
        group_size=pick((2, 3)),
        max_age=pick((1, 1, 2, 4)),
        in_flight=pick((0, 0, prompts_per_step, 2 * prompts_per_step + 1)),
        retry_budget=pick((0, 1, 3)),
        handout=rng.randint(1, 7),
        keep_rows=pick((True, False)),
        save_every=rng.randint(1, 5),
        filter_rate=pick((0.0, 0.1, 0.5)),
        bad_rows=pick((0.0, 0.05)),
        spread=pick((0.3, 1.0, 2.0)),
        train_time=pick((0.0, 0.8, 3.0)),
        answer_timeout=pick((3.0, 40.0)),
        vary=pick((True, False)),
        free_order=pick((True, False)),
        withdrawal_rate=pick((0.0, 0.02, 0.1)),
    )
