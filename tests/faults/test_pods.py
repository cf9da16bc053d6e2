"""Pods and processes that go: the attempt ends, its evidence stays, the next one resumes."""

from __future__ import annotations

import pytest

from .case import Case, Job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG = 100_000
"""Steps of a run that is to be hit, not to be finished."""


def counts(job: Job) -> tuple[int, int, int, int]:
    """Attempts, restarts, prompts skipped, prompts trained twice."""
    status = job["status"]
    prompts = status["prompts"]
    return status["attempt"], status.get("restarts", 0), prompts.get("skipped", 0), prompts.get("trainedTwice", 0)


def finish(case: Case, attempt: int) -> Job:
    """Let a run that was made endless end soon: steps may be edited, and hold from the next attempt on."""
    case.apply(algorithm__grpo__steps=1, failurePolicy=FOUR)
    case.delete_pod("head")
    return case.until(lambda job: job["status"]["attempt"] > attempt, "the last attempt")


FOUR = {"maxRestarts": 4, "backoffSeconds": 1, "resetAfterProgress": False}


@pytest.mark.slow
def test_head_pod_deleted_three_times(case: Case) -> None:
    case.apply(algorithm__grpo__steps=2500, failurePolicy=FOUR)
    for attempt in (1, 2, 3):
        case.reaches(attempt * 10, attempt)
        case.delete_pod("head")
    job = case.ends()
    case.passed(
        "attempt=1",
        "Succeeded=Unknown/Running",
        "ClusterReady=False/HeadLost",
        "Succeeded=Unknown/Restarting",
        "attempt=2",
        "Succeeded=Unknown/Running",
        "ClusterReady=False/HeadLost",
        "attempt=3",
        "Succeeded=Unknown/Running",
        "ClusterReady=False/HeadLost",
        "attempt=4",
        "Succeeded=True/Completed",
    )
    assert counts(job) == (4, 3, 0, 0)
    assert job["status"]["step"] == 2500
    assert job["status"]["resume"]["fromStep"] > 0
    case.nothing_is_left()
