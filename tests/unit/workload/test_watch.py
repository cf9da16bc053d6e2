"""What the report says while nothing advances."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from rljob_api.progress import PromptCounts
from rljob_workload.runtime import watch as module
from rljob_workload.runtime.progress import Progress
from rljob_workload.runtime.watch import SILENT, Watch, handover, oldest_prompts

from .test_driver_surroundings import report

OLD = {"ordinal": 3, "age_seconds": 41.5, "tokens": 10, "answers": 2, "attempt": 1, "tag": [3, 7]}


def test_tokens_are_those_of_complete_answers_and_of_the_unfinished_ones_that_only_ranks_know() -> None:
    ranks = [{"tokens_in_flight": {(3, 7): 5, (4, 0): 9}}, {"tokens_in_flight": {(3, 7): 5}}, {}]
    (oldest,) = oldest_prompts([OLD], ranks)
    assert (oldest.ordinal, oldest.age_seconds, oldest.tokens, oldest.answers, oldest.attempt) == (3, 41.5, 15, 2, 1)


@pytest.mark.parametrize(
    ("phases", "phase", "absent"),
    [
        (["Decode", "Decode"], None, None),
        (["Decode", "Draining"], "Draining", [0]),
        (["Train", "Draining"], "Draining", []),
        (["Train", None], "Train", [1]),
        (["Waking", "Decode"], "Waking", [1]),
    ],
)
def test_a_hand_over_is_named_by_its_slowest_rank_and_those_that_are_not_there(
    phases: list[str | None], phase: str | None, absent: list[int] | None
) -> None:
    said = handover([None if name is None else {"phase": name, "phase_seconds": 2.5} for name in phases])
    assert (said and said.phase, said and said.absent_ranks, said and said.seconds) == (phase, absent, phase and 2.5)


class World:
    """A collector and a rank whose calls answer, or do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collector: dict[str, Any] | None = {
            "state": "Collecting",
            "oldest_in_flight": [OLD],
            "counts": {"training": 0},
            "skipped_names": {},
        }
        self.rank: dict[str, Any] | None = {"phase": "Decode"}
        self.progress = Progress(report())
        actors = SimpleNamespace(collector=self.actor("collector"), ranks=[self.actor("rank")])
        monkeypatch.setattr(module.ray, "wait", lambda calls, **_: ([c for c in calls if getattr(self, c)], []))
        monkeypatch.setattr(module.ray, "get", self.get)
        self.watch = Watch(actors, self.progress)  # type: ignore[arg-type]

    def actor(self, name: str) -> Any:
        return SimpleNamespace(status=SimpleNamespace(remote=lambda: name))

    def get(self, name: str, timeout: float) -> Any:
        if getattr(self, name) is None:
            raise GetTimeoutError
        return getattr(self, name)


def test_a_look_puts_the_collectors_state_and_the_oldest_prompts_into_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.watch.look()
    assert world.progress.report.collector_state == "Collecting"
    assert [one.ordinal for one in world.progress.report.oldest] == [3]


def test_a_step_is_in_training_while_the_ledger_has_prompts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.progress.update(phase="Generating")
    assert world.collector is not None
    for training, phase in ((4, "Training"), (0, "Generating")):
        world.collector["counts"] = {"training": training}
        world.watch.look()
        assert world.progress.report.phase == phase


def test_skips_are_reported_and_warned_of_while_no_step_completes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(module.log, "propagate", True)
    monkeypatch.setattr(logging.getLogger("rljob"), "propagate", True)
    assert world.collector is not None
    for skipped in (0, 1, 1, 2, 3, 4):
        world.collector["counts"] = {"handed_out": 16, "in_flight": 16 - skipped, "skipped": skipped, "training": 0}
        world.collector["skipped_names"] = {"RetryBudgetExhausted": list(range(skipped))} if skipped else {}
        world.watch.look()
        said = world.progress.report.prompts
        assert (said.handed_out, said.in_flight, said.skipped) == (16, 16 - skipped, skipped)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split()[0] for line in lines] == ["1", "2", "4"]
    assert lines[2] == "4 prompts are skipped by now (RetryBudgetExhausted: 0, 1, 2, 3); the collector's log says why"


def test_a_step_and_its_prompts_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.progress.update(step=1, prompts=PromptCounts(handed_out=24, trained=8))
    assert world.collector is not None
    for trained, handed_out in ((16, 32), (0, 16), (8, 16)):
        world.collector["counts"] = {"handed_out": handed_out, "trained": trained, "training": 0}
        world.watch.look()
        assert world.progress.report.prompts.handed_out == 24


def test_a_collector_that_does_not_answer_is_reported_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.collector = None
    world.watch.look()
    assert world.progress.report.collector_state == SILENT
    assert world.progress.report.oldest == []


def test_after_the_end_the_report_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    with world.watch.looking():
        pass
    world.progress.update(collector_state="", oldest=[])
    world.watch.look()
    assert world.progress.report.collector_state == ""
