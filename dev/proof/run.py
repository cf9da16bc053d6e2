"""One proof run: kill by plan, let the last life finish, audit."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dev.proof import moments
from dev.proof.audit import Audit, audit
from dev.proof.job import Sizes, write
from dev.proof.life import EndedError, HarnessError, Life, read_lines
from dev.proof.moments import WANTED, Hit

#: What the harness itself remembers of a run, beside the run's directory.
STORY = "story.json"
#: Kills beyond the plan, to reach the wanted numbers: a moment of milliseconds is sometimes missed.
MOST_MORE = 24
#: Lives that may end by themselves in one run; each is listed.
MOST_ENDED = 5
#: Seconds for the last life, which only has to finish.
FINISH_SECONDS = 1800.0
_START_SECONDS = 8.0


@dataclass
class Kill:
    """One kill, as the table lists it."""

    attempt: int
    aim: str
    hit: str
    #: The newest step that the ranks had taken in this life; 0: none.
    step: int
    #: Seconds since the life began, and since the proof began.
    life_seconds: float
    seconds: float


@dataclass
class Outcome:
    """A run that has been killed, finished, and judged."""

    seed: int
    sizes: Sizes
    kills: list[Kill]
    audit: Audit
    #: Steps, rewards and accumulated seconds, from metrics.jsonl.
    metrics: list[dict[str, Any]]
    seconds: float
    lives: int
    #: Lives that ended neither by our kill nor with the run.
    ended: list[dict[str, int]]

    @property
    def hits(self) -> dict[str, int]:
        """Kills by what they hit."""
        return {str(hit): found for hit in Hit if (found := sum(kill.hit == hit for kill in self.kills))}


def judged(base: Path) -> Outcome:
    """The verdict on a run directory that a proof has left behind."""
    story = json.loads((base / STORY).read_text())
    sizes = Sizes(**story["sizes"])
    report = json.loads((base / "run" / "progress.json").read_text())
    return Outcome(
        story["seed"],
        sizes,
        [Kill(**kill) for kill in story["kills"]],
        audit(base / "run", sizes, report),
        list(read_lines(base / "run" / "metrics.jsonl")),
        story["seconds"],
        story["lives"],
        story["ended"],
    )


class ProofRun:
    """A run directory, its lives and their kills."""

    def __init__(self, directory: Path, sizes: Sizes, seed: int, say: Callable[[str], None] = print) -> None:
        self._base = directory
        self._directory = directory / "run"
        self._job = write(sizes, directory / "job.yaml")
        self._sizes = sizes
        self._seed = seed
        self._draw = random.Random(f"proof:{seed}")  # noqa: S311 - reproducible, not secret
        self._say = say
        self._kills: list[Kill] = []
        self._starts: list[float] = []
        self._ended: list[dict[str, int]] = []
        self._lives = 0
        self._began = time.monotonic()

    def run(self, kills: int, each: int) -> Outcome:
        """At least so many kills, `each` of them at every wanted moment; then the run finishes and is judged."""
        pending = moments.plans(self._draw, kills, each)
        more = 0
        while pending:
            plan = pending.pop(0)
            if not self._attended(plan, len(pending)):
                raise HarnessError(
                    f"the run finished after {len(self._kills)} kills, before all moments were hit; give it more steps"
                )
            if plan.aim in WANTED and self._kills[-1].hit != plan.aim and more < MOST_MORE:
                # At once, not at the end: the run must not be over before every moment was hit.
                more += 1
                pending.insert(0, moments.plan(self._draw, plan.aim))
                if self._kills[-1].hit == Hit.START:  # there is no checkpoint yet: a life has to get further first
                    pending.insert(0, moments.plan(self._draw, Hit.STEPS))
        missed = [str(aim) for aim in WANTED if sum(kill.hit == aim for kill in self._kills) < each]
        if missed:
            raise HarnessError(f"{more} more kills did not hit {each} times: {', '.join(missed)}")
        self._attend(self._finish)
        story = {
            "seed": self._seed,
            "sizes": asdict(self._sizes),
            "kills": [asdict(kill) for kill in self._kills],
            "ended": self._ended,
            "seconds": round(time.monotonic() - self._began, 1),
            "lives": self._lives,
        }
        (self._base / STORY).write_text(json.dumps(story, indent=2))
        return judged(self._base)

    def _attended(self, plan: moments.Plan, more: int) -> bool:
        return self._attend(lambda: self._kill(plan, more))

    def _attend[Result](self, work: Callable[[], Result]) -> Result:
        """Do it again when a life ends by itself, as an operator would: a loaded machine lets Ray's start time out."""
        while True:
            try:
                return work()
            except EndedError as err:
                self._ended.append({"attempt": self._lives, "exit_code": err.exit_code})
                self._say(f"attempt {self._lives} ended by itself with exit code {err.exit_code}")
                if len(self._ended) > MOST_ENDED:
                    raise

    def _begin(self) -> Life:
        self._lives += 1
        return Life.begin(self._job, self._directory, self._lives)

    def _kill(self, plan: moments.Plan, more: int) -> bool:
        life = self._begin()
        start_seconds = statistics.median(self._starts) if self._starts else _START_SECONDS
        if not moments.strike(life, plan, delay=self._delay(plan, more), start_seconds=start_seconds):
            return False
        lasted = time.monotonic() - life.began
        what = moments.hit(life)
        if plan.aim is not Hit.RESUME:
            self._starts.append(self._start_of(life))
        step = max(life.trained(), default=0)
        kill = Kill(self._lives, plan.aim, what, step, round(lasted, 2), round(time.monotonic() - self._began, 1))
        self._kills.append(kill)
        self._say(f"[{kill.seconds:7.1f} s] kill {len(self._kills)}: attempt {kill.attempt}, step {step}, {what}")
        return True

    def _start_of(self, life: Life) -> float:
        """Seconds until its first prompt: the journal's own time is not kept, so the first metric's is used."""
        first = next((line for line in self._metrics() if line["attempt"] == self._lives), None)
        lasted = time.monotonic() - life.began
        return min(lasted, _START_SECONDS) if first is None else lasted - self._trained_seconds()

    def _trained_seconds(self) -> float:
        """Seconds that the newest life spent after its start."""
        mine = [line for line in self._metrics() if line["attempt"] == self._lives]
        earlier = [line for line in self._metrics() if line["attempt"] < self._lives]
        return float(mine[-1]["elapsed_seconds"]) - (float(earlier[-1]["elapsed_seconds"]) if earlier else 0.0)

    def _delay(self, plan: moments.Plan, more: int) -> float:
        """Seconds of training before the kill: drawn, and scaled so that the kills spread over the run's steps."""
        lines = self._metrics()
        if not lines:
            return 1.0 + 5.0 * plan.when
        rate = lines[-1]["step"] / max(1.0, lines[-1]["elapsed_seconds"])
        left = max(0, self._sizes.steps - lines[-1]["step"])
        return 1.6 * plan.when * left / max(0.1, rate) / (more + 2)

    def _metrics(self) -> list[dict[str, float]]:
        return list(read_lines(self._directory / "metrics.jsonl"))

    def _finish(self) -> None:
        life = self._begin()
        if life.wait_until(lambda: False, "the run finishes", seconds=FINISH_SECONDS, every=0.5):
            raise HarnessError("unreachable")
        self._say(f"[{time.monotonic() - self._began:7.1f} s] attempt {self._lives} finished the run")
