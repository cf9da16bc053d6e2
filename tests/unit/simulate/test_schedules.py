"""The short form of `make proof-sim`: seeded schedules, the edges by hypothesis, the mutants, the rivals."""

from __future__ import annotations

import ast
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rljob_workload.core.simulation import auditor, proof
from rljob_workload.core.simulation.auditor import (
    Answered,
    Asked,
    Auditor,
    Ended,
    Evicted,
    Facts,
    Failed,
    Filtered,
    Reported,
    Resumed,
    Saved,
    Skipped,
    Trained,
    Withdrawn,
)
from rljob_workload.core.simulation.mutants import MUTANTS
from rljob_workload.core.simulation.settings import RULES, SOURCES, SettingsError, SimSettings, random_schedule
from rljob_workload.core.simulation.world import World


@pytest.mark.parametrize("hundred", range(8))
def test_random_schedules_lose_nothing_and_train_nothing_twice(hundred: int) -> None:
    first = 1_000_000 + 100 * hundred  # other schedules than the long form's
    tally, failing = proof.run_schedules(range(first, first + 100))
    assert not failing, "\n".join(failing)
    assert (tally.schedules, tally.lost, tally.trained_twice, tally.invariant_violations) == (100, 0, 0, 0)
    assert tally.crashes > 200
    assert tally.answered_again_after_crashes > 0
    assert tally.withdrawn_tries > 500


# Without shrinking: the schedules are small, and the command that repeats one is printed.
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    st.builds(
        SimSettings,
        seed=st.integers(0, 2**32),
        prompts=st.integers(1, 25),
        crashes=st.integers(0, 12),
        failure_rate=st.sampled_from((0.0, 0.05, 0.4)),
        source=st.sampled_from(SOURCES),
        load_replay_buffer=st.booleans(),
        rows=st.integers(1, 30),
        prompts_per_step=st.integers(1, 5),
        group_size=st.integers(2, 3),
        max_age=st.integers(1, 3),
        in_flight=st.integers(0, 6),
        retry_budget=st.integers(0, 2),
        handout=st.integers(1, 9),
        keep_rows=st.booleans(),
        save_every=st.integers(1, 4),
        filter_rate=st.sampled_from((0.0, 0.3, 0.95)),
        bad_rows=st.sampled_from((0.0, 0.1)),
        spread=st.sampled_from((0.0, 0.5, 1.5)),
        train_time=st.sampled_from((0.0, 5.0)),
        answer_timeout=st.sampled_from((2.5, 30.0)),
        vary=st.booleans(),
        withdrawal_rate=st.sampled_from((0.0, 0.02, 0.2)),
    )
)
def test_no_edge_of_the_settings_loses_a_prompt(drawn: SimSettings) -> None:
    outcome = World(drawn).run()
    assert outcome.clean, f"{drawn.command()}\n{outcome.verdict}\n{outcome.refused}"
    assert outcome.counts.live == 0
    assert outcome.counts.skipped == sum(outcome.counts.skipped_by.values())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("buffer", [True, False])
def test_a_long_run_with_many_crashes(source: str, buffer: bool) -> None:
    drawn = SimSettings(seed=7, prompts=3200, crashes=25, source=source, load_replay_buffer=buffer, bad_rows=0.002)
    outcome = World(drawn).run()
    assert outcome.clean, outcome.verdict
    assert outcome.crashes == 25
    assert outcome.counts.trained == 3200
    assert set(outcome.counts.skipped_by) >= {"RetryBudgetExhausted", "PromptTooLong"}


def test_a_run_is_repeated_by_its_seed() -> None:
    assert World(random_schedule(5)).run() == World(random_schedule(5)).run()


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[mutant.name for mutant in MUTANTS])
def test_a_mistake_in_the_core_is_caught_by_the_auditor(number: int) -> None:
    found = proof.catch(number)
    assert found["schedule"], f"{MUTANTS[number].name} survives {proof.MUTANT_SCHEDULES} schedules"


def test_the_mutants_leave_the_core_as_it_was() -> None:
    for mutant in MUTANTS:
        before = mutant.owner.__dict__[mutant.attribute]
        with mutant.applied():
            assert mutant.owner.__dict__[mutant.attribute] is not before
        assert mutant.owner.__dict__[mutant.attribute] is before


def test_the_rivals_lose_or_repeat_where_the_ledger_does_neither() -> None:
    def run(rule: str, *, buffer: bool = True) -> auditor.Verdict:
        base = SimSettings(seed=1, prompts=1600, rows=5000, crashes=10, failure_rate=0.0, filter_rate=0.0, answer_timeout=1e3)
        return World(replace(base, rule=rule, load_replay_buffer=buffer)).run().verdict

    found = {rule: run(rule) for rule in RULES}
    assert (found["ledger"].lost, found["ledger"].trained_twice) == (0, 0)
    assert found["live-cursor"].lost > 50
    assert run("live-cursor", buffer=False).lost > found["live-cursor"].lost
    assert found["frontier"].lost > 0
    assert (found["low-water"].lost, found["low-water"].trained_twice > 100) == (0, True)
    assert found["cut"].trained_twice > 100
    assert (found["consumed-set"].lost, found["consumed-set"].trained_twice) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 0}, "--prompts 0: at least 1"),
        ({"crashes": -1}, "--crashes -1"),
        ({"failure_rate": 1.0}, "--failure-rate 1.0"),
        ({"withdrawal_rate": -0.1}, "--withdrawal-rate -0.1"),
        ({"rule": "hope"}, "--rule hope: one of ledger"),
        ({"save_every": 0}, "--save-every 0"),
        ({"bad_rows": 0.5}, "--bad-rows 0.5"),
        ({"group_size": 1}, "--group-size 1"),
        ({"in_flight": -1}, "--in-flight -1"),
        ({"spread": float("nan")}, "--spread nan"),
        ({"bad_rows": float("nan")}, "--bad-rows nan"),
    ],
)
def test_a_setting_that_makes_no_run_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        World(replace(SimSettings(), **changes))  # type: ignore[arg-type]


# ---- the auditor itself -----------------------------------------------------------------------


def test_the_auditor_shares_no_code_with_what_it_judges() -> None:
    tree = ast.parse(Path(auditor.__file__).read_text())
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert set(imported) == {"__future__", "collections", "collections.abc", "dataclasses"}


def audited(*events: auditor.Event, row_at: object = None) -> auditor.Verdict:
    judge = Auditor(Facts(lambda ordinal: ordinal % 4, too_long={3}, unreadable=(), retry_budget=1))
    judge.observe(Resumed(None, 0, True, 2, 1, None))
    for event in events:
        judge.observe(event)
    return judge.verdict()


def trained(*ordinals: int, step: int = 1) -> list[auditor.Event]:
    asked: list[auditor.Event] = [Asked(o, o % 4, 0) for o in ordinals]
    return [*asked, *(Answered(o, 2, 0, False) for o in ordinals), Trained(step, ordinals)]


def test_the_auditor_counts_what_the_final_weights_never_saw() -> None:
    verdict = audited(*trained(0, 2), Asked(1, 1, 0), Ended(1, stalled=False))
    assert (verdict.lost, verdict.lost_ordinals, verdict.violations) == (1, [1], 1)


def test_the_auditor_follows_the_lineage_and_forgets_what_a_crash_undid() -> None:
    life = Resumed(1, 1, True, 2, 1, (2,))
    verdict = audited(*trained(0, 1), Asked(2, 2, 0), Saved(1), *trained(2, step=2)[1:], life, *trained(2, step=2))
    assert (verdict.lost, verdict.trained_twice, verdict.violations) == (0, 0, 0)
    assert (verdict.rolled_back_prompts, verdict.extra_answers, verdict.asked_again_after_crash) == (1, 1, 1)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Asked(0, 2, 0)], "asked with row 2, the stream has 0"),
        ([*trained(0), Asked(0, 0, 1)], "asked though it is done"),
        ([Asked(0, 0, 0), Answered(0, 2, 0, False), Asked(0, 0, 0)], "asked though its answers are there"),
        ([Trained(1, (0,))], "trained prompt 0 without answers"),
        ([Asked(0, 0, 0), Answered(0, 2, 0, False), Trained(4, (0,))], "at age 3"),
        ([Asked(0, 0, 0), Answered(0, 2, 0, False), Filtered(0)], "filtered though its rewards differ"),
        ([Asked(0, 0, 0), Failed(0), Skipped(0, "RetryBudgetExhausted")], "skipped as RetryBudgetExhausted"),
        ([Skipped(0, "PromptTooLong")], "skipped as PromptTooLong"),
        ([Evicted(0)], "evicted without answers"),
        ([Asked(0, 0, 0), Failed(0)] * 3, "tried 3 times"),
        ([Failed(0)], "failed though no try"),
        ([Answered(0, 2, 0, False)], "answered though no try"),
        ([Asked(0, 0, 0), Asked(0, 0, 0)], "asked though it is being answered"),
        ([Withdrawn(0)], "withdrawn though no try"),
        ([*trained(0), Withdrawn(0)], "withdrawn though no try"),
        ([Asked(0, 0, 0), Answered(0, 2, 0, False), Withdrawn(0)], "withdrawn though no try"),
        ([Asked(0, 0, 0), Failed(0), Withdrawn(0)], "withdrawn though no try"),
        ([Asked(0, 0, 0), Withdrawn(0), Withdrawn(0)], "withdrawn though no try"),
        ([Asked(0, 0, 0), Withdrawn(0), Failed(0)], "failed though no try"),
        ([Asked(0, 0, 0), Withdrawn(0), Answered(0, 2, 0, False)], "answered though no try"),
        ([*[Asked(0, 0, 0), Withdrawn(0)] * 9, Skipped(0, "RetryBudgetExhausted")], "skipped as RetryBudgetExhausted"),
        ([Asked(0, 0, 0), Saved(1), Resumed(1, 1, True, 2, 1, (0,)), Withdrawn(0)], "withdrawn though no try"),
        ([Asked(0, 0, 0), Withdrawn(0), Saved(1), Resumed(1, 1, True, 2, 1, ())], r"prompts \[0\] are wrongly"),
        ([*trained(0), Reported(1, 2, 0, 0)], "the ledger says"),
        ([*trained(0), Saved(1), Resumed(1, 1, True, 2, 1, (0,))], r"prompts \[0\] are wrongly"),
        ([Asked(0, 0, 0), Answered(0, 2, 0, False, one_try=False)], "a try that had been given up"),
        ([Ended(0, stalled=True)], "waits for ever"),
    ],
)
def test_the_auditor_names_what_must_not_be(events: list[auditor.Event], message: str) -> None:
    verdict = audited(*events)
    assert verdict.violations == 1
    assert re.search(message, verdict.examples[0])


def test_a_justified_skip_is_none_of_its_business() -> None:
    failed = [Asked(0, 0, 0), Failed(0)]
    assert audited(Skipped(3, "PromptTooLong"), *failed, *failed, Skipped(0, "RetryBudgetExhausted")).violations == 0


def test_a_withdrawn_prompt_may_be_asked_again_as_often_as_it_is_withdrawn_and_is_lost_when_it_is_not() -> None:
    withdrawn = [Asked(0, 0, 0), Withdrawn(0)]
    again = audited(*withdrawn * 5, *trained(0), Ended(0, stalled=False))
    assert (again.lost, again.trained_twice, again.violations, again.withdrawn) == (0, 0, 0, 5)
    assert audited(*trained(1), *withdrawn).lost_ordinals == [0]


def test_schedules_cover_both_sources_and_every_switch() -> None:
    drawn = [random_schedule(seed) for seed in random.Random(0).sample(range(10_000), 300)]
    for name in (
        "source",
        "load_replay_buffer",
        "keep_rows",
        "vary",
        "retry_budget",
        "max_age",
        "filter_rate",
        "prompts_per_step",
    ):
        assert len({getattr(schedule, name) for schedule in drawn}) > 1, name
