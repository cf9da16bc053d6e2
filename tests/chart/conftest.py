"""Rendering the chart with Helm, and asking the cluster that it is installed in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dev.kube import ROOT, CommandError, cluster_environment, run

KUBE_VERSION = "1.35.4"
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The cluster's environment, with its helm and kubectl on PATH."""
    try:
        environment = cluster_environment()
    except CommandError as error:
        pytest.skip(f"no cluster: {error}")
    where = next((p for p in environment["PATH"].split(":") if os.access(Path(p) / "helm", os.X_OK)), None)
    if where is None:
        pytest.skip("helm is not on PATH (make cluster-up builds one)")
    return environment


@pytest.fixture(scope="session")
def helm(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs helm; the caller judges its exit status."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ("helm", *arguments), env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
        )

    return call


@pytest.fixture(scope="session")
def render(environment: dict[str, str]) -> Render:
    """The objects that the chart makes with these values (`--set` syntax)."""

    def call(*settings: str, chart: str = "charts/rljob") -> list[dict[str, Any]]:
        values = [part for setting in settings for part in ("--set", setting)]
        command = ("helm", "template", "rljob", chart, "-n", "rljob-system", "--kube-version", KUBE_VERSION, *values)
        return [found for found in yaml.safe_load_all(run(*command, environment=environment)) if found]

    return call
