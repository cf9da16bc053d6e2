"""What a resume takes over, answers again, gives up or refuses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import Answer
from rljob_workload.core.checkpoint import Checkpoint
from rljob_workload.core.ledger import LedgerError, SkipCause, State
from rljob_workload.core.ledger_file import LedgerFormatError
from rljob_workload.core.rollouts import RolloutError, Rollouts, RolloutSettings
from rljob_workload.core.source import Row, SeekableSource, SourceChangedError, SourceError
from rljob_workload.core.window import Window
from rljob_workload.runtime.prompts import cap_report, resume_totals, too_many_skipped
from rljob_workload.runtime.step import Totals


def make(
    *, p: int = 4, g: int = 2, rows: int = 20, max_age: int = 1, longest: int = 4, seed: int = 0, steps: int = 50
) -> Rollouts:
    source = SeekableSource([Row((1, index), str(index)) for index in range(rows)], seed=seed, shuffle=True)
    return Rollouts(source, Window(p, max_age, steps), RolloutSettings(g, 8, longest, 10.0, 1), skips.append_skip)


class Skips(list[tuple[int, str, str]]):
    def append_skip(self, ordinal: int, cause: SkipCause, particulars: str) -> None:
        self.append((ordinal, cause.value, particulars))


skips = Skips()


@pytest.fixture(autouse=True)
def no_skips() -> None:
    skips.clear()


def finish(rollouts: Rollouts, ordinals: Iterable[int], version: int = 0, g: int = 2) -> None:
    for ordinal in ordinals:
        tag = (ordinal, rollouts._open[ordinal].attempt)
        (group,) = rollouts.arrive([Answer(tag, (5,), (-0.5,), ((0, version),)) for _ in range(g)])
        rollouts.scored(group, [(float(index), False) for index in range(g)])


def saved_run() -> dict[str, Any]:
    """0-3 trained, 4-6 finished, 7 in flight, 8-11 dispatched at version 1."""
    rollouts = make()
    rollouts.dispatch(0, 0.0)
    finish(rollouts, range(7))
    assert rollouts.take(1, 0) is not None
    rollouts.commit(1, (0, 1, 2, 3))
    rollouts.dispatch(1, 0.0)
    saved: dict[str, Any] = json.loads(json.dumps(rollouts.snapshot()))
    return saved


def test_finished_groups_are_kept_and_the_others_answered_again() -> None:
    rollouts = make()
    report = rollouts.restore(saved_run(), version=1)
    assert (report.handed_out, report.restored_groups, report.rehanded) == (12, 3, [7, 8, 9, 10, 11])


def test_without_the_buffer_finished_groups_are_answered_again_and_owe_nothing() -> None:
    rollouts = make()
    report = rollouts.restore(saved_run(), version=1, load_buffer=False)
    assert (report.restored_groups, report.rehanded) == (0, list(range(4, 12)))
    assert not any(rollouts.ledger.is_owed(ordinal) for ordinal in range(4, 12))


def test_groups_of_another_size_are_answered_again() -> None:
    rollouts = make(g=3)
    assert rollouts.restore(saved_run(), version=1).rehanded == list(range(4, 12))
    assert {request.answers for request in rollouts.dispatch(1, 0.0)} == {3}


@pytest.mark.parametrize("p", [1, 2, 8])
def test_another_p_goes_on_with_the_same_prompts(p: int) -> None:
    rollouts = make(p=p, steps=1 + -(-8 // p))
    rollouts.restore(saved_run(), version=1)
    trained: list[int] = []
    version = 1
    while version < 1 + -(-8 // p):
        rollouts.dispatch(version, 0.0)
        finish(rollouts, list(rollouts._open), version)
        taken = rollouts.take(version + 1, version)
        if taken is None:
            continue  # what had become too old is answered again
        version += 1
        rollouts.commit(version, taken[0].ordinals)
        trained += taken[0].ordinals
        rollouts.check()
    assert sorted(trained) == list(range(4, 4 + len(trained)))
    assert rollouts.ledger.counts().live == 0


def test_groups_that_are_too_old_for_the_checkpoint_s_version_are_owed() -> None:
    rollouts = make()
    report = rollouts.restore(saved_run(), version=2)
    assert report.restored_groups == 0
    assert [ordinal for ordinal in range(4, 12) if rollouts.ledger.is_owed(ordinal)] == [4, 5, 6]


def test_groups_of_newer_weights_than_the_checkpoint_s_are_answered_again() -> None:
    assert make().restore(saved_run() | {"buffer": newer(saved_run()["buffer"])}, version=1).restored_groups == 0


def newer(buffer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for group in buffer:
        group["answers"][0]["versions"] = [[0, 1], [1, 2]]
    return buffer


def test_prompts_that_no_longer_fit_are_skipped_by_name() -> None:
    rollouts = make(longest=1)
    rollouts.restore(saved_run(), version=1)
    with pytest.raises(SourceError, match="prompts in a row cannot be used"):
        rollouts.dispatch(1, 0.0)
    assert skips[0] == (7, "PromptTooLong", "2 tokens, at most 1 leave room for an answer")


def test_changed_data_is_refused_with_what_changed_and_what_would_do() -> None:
    with pytest.raises(SourceChangedError, match="rows was 20 and is 21") as caught:
        make(rows=21).restore(saved_run(), version=1)
    assert "spec.data.onChange Restart, which gives up the 8 undone prompts" in str(caught.value)
    with pytest.raises(SourceChangedError, match="seed was 0 and is 5"):
        make(seed=5).restore(saved_run(), version=1)


def test_changed_data_may_restart_and_the_undone_are_counted() -> None:
    rollouts = make(rows=21)
    report = rollouts.restore(saved_run(), version=1, restart_on_change=True)
    assert (report.source_changed, report.rehanded, report.restored_groups) == (8, [], 0)
    assert "8 undone prompts are skipped (SourceChanged)" in report.warnings[0]
    assert rollouts.ledger.skipped_names() == {"SourceChanged": list(range(4, 12))}
    requests = rollouts.dispatch(1, 0.0)
    assert [request.tag[0] for request in requests] == list(range(12, 20))
    fresh = SeekableSource([Row((1, index), str(index)) for index in range(21)], seed=0, shuffle=True)
    assert [request.tokens for request in requests] == [fresh.row(n).tokens for n in range(8)]
    rollouts.check()
    again = make(rows=21)
    assert again.restore(rollouts.snapshot(), version=1).rehanded == list(range(12, 20))
    assert again.expected(12) == rollouts.expected(12)


def test_a_checkpoint_without_a_ledger_is_taken_with_a_warning_and_an_upper_bound() -> None:
    rollouts = make()
    report = rollouts.restore(None, version=5, trained_before=20)
    assert (report.at_risk, report.handed_out) == (8, 20)
    assert "up to 8 prompts may have been lost before it" in report.warnings[0]
    assert [request.tag[0] for request in rollouts.dispatch(5, 0.0)] == list(range(20, 28))
    rollouts.check()
    counts = rollouts.ledger.counts()
    assert (counts.trained, counts.handed_out, counts.at_risk) == (20, 28, 8)
    again = make()
    assert again.restore(json.loads(json.dumps(rollouts.snapshot())), version=5).at_risk == 8  # lossless from here on
    assert again.restore(rollouts.snapshot(), version=5).rehanded == list(range(20, 28))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 2}, RolloutError, "field 'version': 2 is not 1"),
        ({"ledger": None}, RolloutError, "field 'ledger'"),
        ({"source": []}, RolloutError, "field 'source'"),
        ({"buffer": {}}, RolloutError, "field 'buffer'"),
        ({"buffer": [{"ordinal": 4}]}, RolloutError, r"field 'buffer\[0\]': KeyError"),
        ({"buffer": [{"ordinal": 4, "attempt": 0, "answers": [{}]}]}, RolloutError, r"field 'buffer\[0\]'"),
        ({"ledger": {"version": 2}}, LedgerFormatError, "field 'next_ordinal'"),
        ({"source": {"kind": "seekable"}}, SourceError, "field 'fingerprint'"),
    ],
)
def test_malformed_state_names_its_field(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().restore(saved_run() | change, version=1)


@pytest.mark.parametrize("foreign", [[], "x", 5, {}])
def test_foreign_state_is_refused(foreign: Any) -> None:
    with pytest.raises(RolloutError, match="field 'version'"):
        make().restore(foreign)


def test_a_step_that_did_not_happen_gives_its_groups_back() -> None:
    rollouts = make()
    rollouts.dispatch(0, 0.0)
    finish(rollouts, range(5))
    taken = rollouts.take(1, 0)
    assert taken is not None
    with pytest.raises(LedgerError, match="no snapshot between take and commit"):
        rollouts.snapshot()
    rollouts.give_back()
    rollouts.check()
    assert [group["ordinal"] for group in rollouts.snapshot()["buffer"]] == [4, 0, 1, 2, 3]
    again = rollouts.take(1, 0)
    assert again is not None
    assert again[0] == taken[0]


def test_a_source_out_of_step_with_the_ledger_is_noticed_at_once() -> None:
    rollouts = make()
    rollouts._source.pull()
    with pytest.raises(LedgerError, match="0 prompts are handed out, the source stands at 1"):
        rollouts.check()
    with pytest.raises(LedgerError, match="prompt 0 is number 1 of the source"):
        rollouts.dispatch(0, 0.0)


def test_state_of_a_prompt_that_was_in_flight_is_pending() -> None:
    rollouts = make()
    rollouts.restore(saved_run(), version=1)
    assert rollouts.ledger.state_of(7) is State.PENDING


# ---- what the driver makes of it --------------------------------------------------------------


@pytest.fixture
def example() -> dict[str, Any]:
    path = Path(__file__).parents[3] / "examples" / "copy.yaml"
    spec: dict[str, Any] = yaml.safe_load(path.read_text())["spec"]
    spec["algorithm"]["grpo"] |= {"promptsPerStep": 8, "generationsPerPrompt": 8}
    return spec


def spec_with(example: dict[str, Any], **prompts: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(example | {"prompts": prompts})


def counters(skipped: int) -> dict[str, Any]:
    return {"counts": {"skipped": skipped}, "skipped_names": {"BadRow": list(range(skipped))}}


def test_too_many_skipped_prompts_end_the_run_only_if_the_job_says_so(example: dict[str, Any]) -> None:
    assert too_many_skipped(spec_with(example, maxSkipped=1), counters(5)) is None
    fail = spec_with(example, maxSkipped=1, onExceeded="Fail")
    assert too_many_skipped(fail, counters(1)) is None
    why = too_many_skipped(fail, counters(2))
    assert why is not None
    assert why.startswith("2 prompts skipped, prompts.maxSkipped allows 1 and prompts.onExceeded is Fail (BadRow: 0, 1)")


def test_a_lowered_cap_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    report = cap_report({"configured": 200, "effective": 14, "reason": "an actor runs 1000 calls", "warning": "fewer"})
    assert (report.configured, report.effective, report.reason) == (200, 14, "an actor runs 1000 calls")
    assert [record.message for record in caplog.records][:1] == [
        "at most 14 prompts in flight instead of 200: an actor runs 1000 calls"
    ]


def test_a_checkpoint_without_totals_has_trained_its_steps(example: dict[str, Any], tmp_path: Path) -> None:
    totals, spec = Totals(), RLJobSpec.model_validate(example)
    resume_totals(totals, Checkpoint(tmp_path, 10, 1, {}), spec)
    assert (totals.trained_prompts, totals.consumed_samples, totals.elapsed_before) == (80, 640, 0.0)
    saved = {"totals": {"trained_prompts": 72, "consumed_samples": 576}, "elapsed_seconds": 5.5}
    resume_totals(totals, Checkpoint(tmp_path, 10, 1, saved), spec)
    assert (totals.trained_prompts, totals.consumed_samples, totals.elapsed_before) == (72, 576, 5.5)
