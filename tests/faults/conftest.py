"""Faults on the real cluster. Each test's condition trail goes to build/faults.json, and a table is printed at the end.

The table has a row for every test that was begun, also where its fixtures failed before there was a job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dev.case import Case
from dev.kube import ROOT, Kubectl

from tests.e2e.conftest import environment, kubectl

__all__ = ["environment", "kubectl"]

_RESULTS = pytest.StashKey[list[dict[str, Any]]]()
_ROW = pytest.StashKey[dict[str, Any]]()

MakeCase = Callable[..., Case]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = []


def row_of(item: pytest.Item) -> dict[str, Any]:
    """What the table and the file say of a test."""
    fault = item.name.removeprefix("test_").replace("_", " ")
    return item.stash.setdefault(_ROW, {"fault": fault, "outcome": "passed", "seconds": 0.0, "trail": {}})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    row = row_of(item)
    row["seconds"] = round(row["seconds"] + report.duration, 1)
    if report.outcome != "passed" and row["outcome"] == "passed":
        row["outcome"] = report.outcome if report.when == "call" or report.skipped else "error"
    if report.when == "teardown":
        item.config.stash[_RESULTS].append(row)
    return report


@pytest.fixture
def make_case(request: pytest.FixtureRequest, kubectl: Kubectl) -> Iterator[MakeCase]:
    """Makes a case by name; the trails of all cases of the test are kept."""
    cases: list[Case] = []

    def make(name: str = "copy") -> Case:
        cases.append(Case(kubectl, name))
        return cases[-1]

    yield make
    for case in cases:
        case.close()
    row_of(request.node)["trail"] = {f"{case.name}, {number}": case.trail for number, case in enumerate(cases, 1)}


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
