"""`/metrics` in Prometheus' text form. Pure: every series is read from the jobs that are known now, so it goes with its job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rljob_api.progress import PromptCounts

from .times import parse_time
from .world import Job

_STATES = ("trained", "filtered", "training", "buffered", "in_flight", "pending", "retryable", "skipped")


@dataclass(frozen=True)
class Process:
    """Numbers of the operator itself."""

    queued: int = 0
    overdue_seconds: float = 0.0
    resync_age_seconds: float = 0.0
    passes: Mapping[str, int] = field(default_factory=dict)
    """Passes over jobs by result: done, failed, defect."""
    requests: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Requests to the API server by method and status code (watches left out)."""


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def sample(self, name: str, value: float | str, /, **labels: str) -> None:
        shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        self._lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def render(jobs: Iterable[Job], process: Process) -> str:
    """The whole page."""
    page, known = _Page(), sorted(jobs, key=lambda job: job.key)
    _numbers(page, known)
    _prompts(page, known)
    _conditions(page, known)
    _process(page, process)
    return page.text()


def _numbers(page: _Page, jobs: list[Job]) -> None:
    for name, kind, text in (
        ("attempt", "gauge", "Attempts started."),
        ("restarts_total", "counter", "Restarts after failures that count toward failurePolicy.maxRestarts."),
        ("step", "gauge", "Training steps done on the lineage of the weights."),
        ("total_steps", "gauge", "Training steps wanted."),
        ("reward", "gauge", "Mean reward of the last step's answers."),
        ("validation_reward", "gauge", "Mean reward of the last validation."),
        ("checkpoint_step", "gauge", "Step of the newest complete checkpoint."),
        ("rolled_back_steps", "gauge", "Steps that the resume of the newest attempt undid."),
        ("in_flight_prompts_cap", "gauge", "Effective cap on prompts answered at the same time."),
        ("last_step_timestamp_seconds", "gauge", "When the last step was committed."),
    ):
        page.family(f"rljob_{name}", kind, text)
        for job in jobs:
            value = _number(job, name)
            if value is not None:
                page.sample(f"rljob_{name}", value, namespace=job.namespace, name=job.name)


def _number(job: Job, name: str) -> float | str | None:
    status = job.status
    match name:
        case "attempt" | "step" | "total_steps" | "reward":
            value: float | str | None = getattr(status, name)
            return value
        case "restarts_total":
            return status.restarts
        case "validation_reward":
            return status.validation.reward if status.validation else None
        case "checkpoint_step":
            return status.checkpoint.step if status.checkpoint else None
        case "rolled_back_steps":
            return status.rolled_back.steps if status.rolled_back else None
        case "in_flight_prompts_cap":
            return status.in_flight_prompts.effective if status.in_flight_prompts else None
        case "last_step_timestamp_seconds":
            return parse_time(status.last_step_time).timestamp() if status.last_step_time else None
    raise KeyError(name)


def _prompts(page: _Page, jobs: list[Job]) -> None:
    reported = [(job, job.status.prompts) for job in jobs if job.status.prompts is not None]
    page.family("rljob_prompts", "gauge", "Prompts of the run by state; the states add up to rljob_prompts_handed_out.")
    for job, prompts in reported:
        for state in _STATES:
            page.sample("rljob_prompts", getattr(prompts, state), namespace=job.namespace, name=job.name, state=state)
    for field_name, text in (
        ("handed_out", "Prompts pulled from the source and numbered."),
        ("trained_twice", "Prompts trained more than once on the lineage of the weights; must be 0."),
        ("at_risk", "Upper bound of prompts lost before a checkpoint without a ledger."),
    ):
        page.family(f"rljob_prompts_{field_name}", "gauge", text)
        for job, prompts in reported:
            page.sample(f"rljob_prompts_{field_name}", _count(prompts, field_name), namespace=job.namespace, name=job.name)


def _count(prompts: PromptCounts, name: str) -> int:
    return int(getattr(prompts, name))


def _conditions(page: _Page, jobs: list[Job]) -> None:
    page.family("rljob_condition", "gauge", "1 for the status that each condition of the job has, with its reason.")
    for job in jobs:
        for one in job.status.conditions:
            page.sample(
                "rljob_condition",
                1,
                namespace=job.namespace,
                name=job.name,
                type=one.type,
                status=one.status,
                reason=one.reason,
            )


def _process(page: _Page, process: Process) -> None:
    for name, value, text in (
        ("queue_length", process.queued, "Jobs that are due or will be."),
        ("queue_overdue_seconds", process.overdue_seconds, "How long the oldest due job has been waiting."),
        ("resync_age_seconds", process.resync_age_seconds, "Seconds since the last complete listing."),
    ):
        page.family(f"rljob_operator_{name}", "gauge", text)
        page.sample(f"rljob_operator_{name}", round(value, 3))
    page.family("rljob_operator_passes_total", "counter", "Passes over jobs by result.")
    for result, count in sorted(process.passes.items()):
        page.sample("rljob_operator_passes_total", count, result=result)
    page.family("rljob_operator_api_requests_total", "counter", "Requests to the API server, watches left out.")
    for (method, code), count in sorted(process.requests.items()):
        page.sample("rljob_operator_api_requests_total", count, method=method, code=code)
