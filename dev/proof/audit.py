"""The verdict on a run: lost, trained twice, and what a saved data-loader place would have lost in the same run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dev.proof.evidence import Records, facts, poisoned, read_records, tell
from dev.proof.job import Sizes
from rljob_workload.core.simulation import auditor as told
from rljob_workload.runtime.metrics import read_metrics


@dataclass
class Audit:
    """What the records say."""

    lost: list[int]
    trained_twice: int
    violations: list[str]
    violation_count: int
    handed_out: int
    trained: int
    filtered: int
    filtered_ordinals: list[int]
    skipped: dict[int, str]
    skipped_by: dict[str, int]
    #: Skipped prompts whose row the environment never judges.
    skipped_poisoned: int
    rolled_back_steps: int
    rolled_back_prompts: int
    answered_again: int
    extra_answers: int
    resumes: int
    #: What the same kills would have lost by rules that save the loader's place: without and with the finished groups.
    live_cursor: dict[str, int]
    #: (attempt, ordinals) of the steps that the final weights have, and of those that were rolled back.
    kept: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    undone: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Nothing lost, nothing trained twice, nothing that could not have been."""
        return not self.lost and not self.trained_twice and not self.violation_count


def audit(directory: Path, sizes: Sizes, report: Mapping[str, Any]) -> Audit:
    """Judge a finished run. `report`: its last progress report, whose counters must be what the records say."""
    records = read_records(directory)
    data = facts(sizes.seed, sizes.retry_budget)
    witness = told.Auditor(data)
    forgotten: dict[str, set[int]] = {"place": set(), "place and buffer": set()}
    resumes = 0
    for event in tell(records, sizes.generations_per_prompt, sizes.max_age):
        witness.observe(event)
        if isinstance(event, told.Resumed) and event.checkpoint is not None:
            resumes += 1
            forgotten["place"] |= set(witness.undone())
            forgotten["place and buffer"] |= set(witness.undone()) - set(witness.answered())
    prompts = report["prompts"]
    live = sum(prompts[name] for name in ("training", "buffered", "inFlight", "pending", "retryable"))
    counted = (prompts[name] for name in ("handedOut", "trained", "filtered", "skipped"))
    witness.observe(told.Reported(*counted))
    witness.observe(told.Ended(live, stalled=False))
    verdict, now = witness.verdict(), witness.lineage
    problems = [*records.problems, *verdict.examples, *_impossible(records, now, data, directory)]
    kept, undone = _steps(records)
    return Audit(
        lost=verdict.lost_ordinals,
        trained_twice=verdict.trained_twice,
        violations=problems[:10],
        violation_count=verdict.violations + len(problems) - len(verdict.examples),
        handed_out=now.high,
        trained=sum(now.trained.values()),
        filtered=len(now.filtered),
        filtered_ordinals=sorted(now.filtered),
        skipped=dict(sorted(now.skipped.items())),
        skipped_by=dict(Counter(now.skipped.values())),
        skipped_poisoned=sum(data.row_at(ordinal) in poisoned() for ordinal in now.skipped),
        rolled_back_steps=len(undone),
        rolled_back_prompts=sum(len(ordinals) for _, ordinals in undone),
        answered_again=verdict.asked_again_after_crash,
        extra_answers=verdict.extra_answers,
        resumes=resumes,
        live_cursor={rule: len(ordinals) for rule, ordinals in forgotten.items()},
        kept=kept,
        undone=undone,
    )


def _impossible(records: Records, now: told.Lineage, data: told.Facts, directory: Path) -> list[str]:
    """What the auditor's events do not show: poisoned rows that were trained, steps out of order, time that ran back."""
    wrong = []
    bad = poisoned()
    judged = [ordinal for ordinal in [*now.trained, *now.filtered] if data.row_at(ordinal) in bad]
    if judged:
        wrong.append(f"prompts {judged[:8]} were trained or filtered, and the environment judges none of them")
    steps = sorted(_final(records))
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"the lineage has {len(steps)} steps up to {steps[-1]}")
    seconds = [line["elapsed_seconds"] for line in read_metrics(directory / "metrics.jsonl")]
    if seconds != sorted(seconds):
        wrong.append("the accumulated seconds of metrics.jsonl run back")
    return wrong


def _final(records: Records) -> dict[int, int]:
    """Step -> the attempt whose step the final weights have."""
    owner: dict[int, int] = {}
    for attempt in sorted(records.journal):
        if not any("restored" in event or "asked" in event for event in records.journal[attempt]):
            continue  # killed before it was anything
        checkpoint = records.resumed[attempt]
        base = checkpoint[0] if checkpoint else 0
        owner = {step: life for step, life in owner.items() if step <= base}
        owner |= {step: attempt for life, step in records.trained if life == attempt}
    return owner


#: (attempt, ordinals) by step.
_Steps = list[tuple[int, tuple[int, ...]]]


def _steps(records: Records) -> tuple[_Steps, _Steps]:
    owner = _final(records)
    kept: _Steps = []
    undone: _Steps = []
    for (attempt, step), ordinals in sorted(records.trained.items()):
        (kept if owner.get(step) == attempt else undone).append((attempt, ordinals))
    return kept, undone
