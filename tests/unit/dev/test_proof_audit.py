"""The proof's auditor finds what is wrong with a run's records, and nothing in those of a good run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dev.proof.audit import Audit, audit
from dev.proof.job import Sizes
from dev.proof.life import HarnessError

from rljob_workload.algorithm.batch import Answer
from rljob_workload.core.checkpoint import Owner, RunDirectory
from rljob_workload.core.rollouts import Rollouts, RolloutSettings
from rljob_workload.core.source import SeekableSource
from rljob_workload.core.window import Window
from rljob_workload.data.builtin import load_builtin
from rljob_workload.runtime.journal import ENV_JOURNAL, JOURNAL, keeper_of_books

SIZES = Sizes(steps=6, prompts_per_step=4, generations_per_prompt=2, max_age=1)


class Trainer:
    """Lives of a trainer without a model: the journal is the real one, the ranks' record is written here."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempt = 0
        self.saved: tuple[int, Any] = (0, None)
        (directory / "trained").mkdir()

    def live(self, until: int, *, commit_last: bool = True) -> Rollouts:
        self.attempt += 1
        settings = RolloutSettings(2, 8, 16, 60.0, SIZES.retry_budget)
        books = keeper_of_books(self.directory, self.attempt)(
            SeekableSource(load_builtin("copyv").rows, seed=SIZES.seed, shuffle=True), Window(4, 1, SIZES.steps), settings, None
        )
        step, state = self.saved
        parent = f"step-{step:06d}-t{self.attempt - 1:06d}" if state else None
        RunDirectory(self.directory).take_token(Owner(name="proof", uid="u", attempt=self.attempt), parent)
        if state:
            books.restore(json.loads(json.dumps(state)), version=step, load_buffer=True)
        while step < until:
            self.answer(books, step)
            taken = books.take(step + 1, step)
            assert taken is not None
            step += 1
            with (self.directory / "trained" / "rank-00000.jsonl").open("a") as file:
                line = {"attempt": self.attempt, "step": step, "ordinals": taken[0].ordinals}
                file.write(json.dumps(line) + "\n")
            if step == until and not commit_last:
                break
            books.commit(step, taken[0].ordinals)
            self.saved = (step, books.snapshot())
        return books

    def answer(self, books: Rollouts, version: int) -> None:
        """Three of four prompts are answered at once; every fifth is not, until a step cannot do without."""
        while books.missing(version):
            for request in books.dispatch(version, 0.0):
                answers = [Answer(request.tag, (1,), (-0.5,), ((0, version),))] * 2
                for group in books.arrive(answers):
                    if request.tag[0] == 3:
                        books.failed(group)
                    elif request.tag == (9, 0):
                        books.withdraw(group)
                    else:
                        books.scored(group, [(0.0, False), (1.0, True)])


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two lives: the first is killed after an optimizer step that it did not commit."""
    monkeypatch.setenv(ENV_JOURNAL, "1")
    trainer = Trainer(tmp_path)
    trainer.live(3, commit_last=False)
    trainer.live(SIZES.steps)
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


def report(**changes: int) -> dict[str, Any]:
    live = dict.fromkeys(("training", "buffered", "inFlight", "pending", "retryable"), 0)
    return {"prompts": {**live, "handedOut": 25, "trained": 24, "filtered": 0, "skipped": 1, **changes}}


def judged(directory: Path) -> Audit:
    return audit(directory, SIZES, report())


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_that_lost_nothing_is_clean(directory: Path) -> None:
    found = judged(directory)
    assert found.clean, found.violations
    assert (found.trained, found.handed_out, found.skipped) == (24, 25, {3: "RetryBudgetExhausted"})
    assert (found.rolled_back_steps, found.rolled_back_prompts, found.resumes) == (1, 4, 1)
    assert found.live_cursor["place"] > 0


def test_a_prompt_that_a_rank_did_not_train_is_lost(directory: Path) -> None:
    rewrite(directory / "trained" / "rank-00000.jsonl", lambda lines: lines[-1]["ordinals"].pop())
    found = judged(directory)
    assert len(found.lost) == 1
    assert not found.clean


def test_a_prompt_that_two_steps_trained_is_found(directory: Path) -> None:
    rewrite(directory / "trained" / "rank-00000.jsonl", lambda lines: lines[-1]["ordinals"].append(lines[0]["ordinals"][0]))
    assert judged(directory).trained_twice == 1


def test_a_step_that_was_resumed_over_is_not_counted_twice_and_one_that_was_not_is(directory: Path) -> None:
    def resumed_from_the_future(lines: list[dict[str, Any]]) -> None:
        lines[:] = [line for line in lines if not (line["attempt"] == 2 and line["step"] == 3)]

    rewrite(directory / "trained" / "rank-00000.jsonl", resumed_from_the_future)
    found = judged(directory)
    assert len(found.lost) == 4
    assert "the lineage has" in " ".join(found.violations)


def test_a_skip_without_its_failures_does_not_hold(directory: Path) -> None:
    def never_failed(lines: list[dict[str, Any]]) -> None:
        lines[:] = [line for line in lines if "failed" not in line]

    rewrite(directory / JOURNAL, never_failed)
    assert "was skipped as RetryBudgetExhausted, which does not hold" in " ".join(judged(directory).violations)


def test_a_withdrawn_prompt_that_is_answered_all_the_same_is_found(directory: Path) -> None:
    def answered_at_once(lines: list[dict[str, Any]]) -> None:
        withdrawn = lines.index({"withdrawn": 9})
        again = next(line for line in lines[withdrawn:] if "asked" in line)
        assert 9 in [ordinal for ordinal, *_ in again["asked"]]
        again["asked"] = [one for one in again["asked"] if one[0] != 9]

    rewrite(directory / JOURNAL, answered_at_once)
    assert "prompt 9 was answered though no try of it was under way" in " ".join(judged(directory).violations)


def test_a_withdrawal_that_is_not_in_the_books_does_not_go_unseen(directory: Path) -> None:
    rewrite(directory / JOURNAL, lambda lines: lines.remove({"withdrawn": 9}))
    assert "prompt 9 was asked though it is being answered" in " ".join(judged(directory).violations)


def test_an_event_that_the_auditor_does_not_know_is_refused(directory: Path) -> None:
    rewrite(directory / JOURNAL, lambda lines: lines.append({"forgotten": 1}))
    with pytest.raises(HarnessError, match="forgotten"):
        judged(directory)


def test_counters_that_say_something_else_are_found(directory: Path) -> None:
    assert not audit(directory, SIZES, report(trained=23, skipped=2)).clean


def test_another_row_under_the_same_number_is_lost(directory: Path) -> None:
    def other_row(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if "asked" in line)["asked"][0][1] += 1

    rewrite(directory / JOURNAL, other_row)
    assert judged(directory).lost == [0]
