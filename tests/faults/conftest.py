"""Faults on the real cluster. Each test's condition trail goes to build/faults.json, and a table is printed at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dev.case import Case
from dev.kube import ROOT, Kubectl

from tests.e2e.conftest import environment, kubectl

__all__ = ["environment", "kubectl"]

_RESULTS = pytest.StashKey[list[dict[str, Any]]]()
_OUTCOME = pytest.StashKey[str]()

MakeCase = Callable[..., Case]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.when == "call":
        item.stash[_OUTCOME] = report.outcome
    return report


@pytest.fixture
def make_case(request: pytest.FixtureRequest, kubectl: Kubectl) -> Iterator[MakeCase]:
    """Makes a case by name; the trails of all cases of the test are kept."""
    cases: list[Case] = []
    began = time.monotonic()

    def make(name: str = "copy") -> Case:
        cases.append(Case(kubectl, name))
        return cases[-1]

    yield make
    for case in cases:
        case.close()
    request.config.stash[_RESULTS].append(
        {
            "fault": request.node.name.removeprefix("test_").replace("_", " "),
            "outcome": request.node.stash.get(_OUTCOME, "error"),
            "seconds": round(time.monotonic() - began, 1),
            "trail": {f"{case.name}, {number}": case.trail for number, case in enumerate(cases, 1)},
        }
    )


@pytest.fixture
def case(make_case: MakeCase) -> Case:
    """The usual one."""
    return make_case()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = config.stash[_RESULTS]
    if not results:
        return
    path = ROOT / "build/faults.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    terminalreporter.section("faults")
    width = max(len(one["fault"]) for one in results)
    for one in results:
        terminalreporter.line(f"{one['fault']:<{width}}  {one['outcome']:<7} {one['seconds']:>6.1f} s  {_end(one['trail'])}")
    terminalreporter.line(f"the trails: {path.relative_to(ROOT)}")


def _end(trails: dict[str, list[str]]) -> str:
    """The last word of each job about itself."""
    words = [entry.split(" ")[-1] for trail in trails.values() for entry in trail]
    ends = [word.removeprefix("Succeeded=") for word in words if word.startswith("Succeeded=")]
    attempts = max((int(word.removeprefix("attempt=")) for word in words if word.startswith("attempt=")), default=0)
    return f"{ends[-1] if ends else '-'}, attempts {attempts}"
