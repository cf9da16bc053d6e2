"""A status stays under 32 kB and readable, whatever it has to quote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_api.preflight import PassedOver, PreflightReport
from rljob_api.progress import CheckpointInfo, Failed, InFlightPrompts, PromptCounts, Resume
from rljob_api.status import RLJobStatus
from rljob_operator.decide import decide
from rljob_operator.draft import clip
from rljob_operator.world import Driver, World

from .builders import apply, before_cluster, counted, job, merge, pod, preflight, report, running, spec, training

LIMIT = 32_000
NASTY = ["\x00", "<", "日", "🦀", '"', "\\", "a"]


def stored(status: RLJobStatus) -> int:
    """Bytes as the API server writes it (Go's JSON escapes <, > and &)."""
    text = json.dumps(status.to_wire(), ensure_ascii=False, separators=(",", ":"))
    return len(text.encode()) + 5 * sum(map(text.count, "<>&"))


def worst(char: str) -> World:
    """Everything that the status quotes is as long as its owner may make it."""
    causes = {f"{index}{char * 63}"[:64]: [2**53 - number for number in range(100)] for index in range(8)}
    told = report(
        5,
        prompts=PromptCounts(handed_out=2**53, trained=2**53, skipped=800, skipped_by=causes),
        in_flight_prompts=InFlightPrompts(configured=2**53, effective=1, reason=char * 256),
        checkpoint=CheckpointInfo(step=5, path=f"runs/default/copy/{char * 1000}"),
        resume=Resume(from_step=1),
        failed=Failed(exit_code=76, message=char * 2048),
    )
    findings = {f"{char}{number}": 1 for number in range(200)}
    status = running(unloadable=[f"step-{number:06d}-t000001" for number in range(8)], suspendedSeconds=2**53)
    return training(
        report=told, driver=Driver("FAILED", 76, char * 20_000), job=job(status, {**spec(), **findings}), warning=char * 1000
    )


@pytest.mark.parametrize("char", NASTY)
def test_the_status_of_the_worst_case_stays_small(char: str) -> None:
    before = worst(char)
    first = apply(decide(before), before)
    refused = PreflightReport(
        outcome="Incompatible",
        message=char * 1024,
        differs=[char * 2000] * 16,
        passed_over=[PassedOver(name=char * 128, why=char * 512)] * 8,
    )
    blocked = before_cluster(status=merge(first.to_wire(), counted(2, attemptEndTime=None)), pods=(preflight(refused, 2),))
    after = apply(decide(blocked), blocked)
    assert {one.type for one in after.conditions if len(one.message) > 100} >= {"CheckpointAvailable", "Succeeded"}
    for status in (first, after):
        assert stored(status) < LIMIT, stored(status)
    lost = training(job=job(first.to_wire()), pods=(pod("worker"), pod(ended=True, last_words=char * 9000)))
    assert stored(apply(decide(lost), lost)) < LIMIT


@pytest.mark.parametrize("char", NASTY)
@pytest.mark.parametrize("limit", [20, 101])
def test_a_clipped_text_keeps_both_ends_and_fits(char: str, limit: int) -> None:
    text = f"begin {char * 100} end"
    cut = clip(text, limit)
    assert len(json.dumps(cut, ensure_ascii=False).encode()) - 2 + 5 * cut.count("<") <= limit
    assert " ... " in cut
    assert text.startswith(cut.partition(" ... ")[0])
    assert text.endswith(cut.rpartition(" ... ")[2])
    assert clip("short", 20) == "short"


def test_no_condition_of_a_long_life_is_lost() -> None:
    status: dict[str, Any] = {}
    before = before_cluster(status=status)
    assert len(apply(decide(before), before).conditions) == 10 - 1  # QuotaReserved comes with queues
