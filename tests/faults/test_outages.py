"""What a run must not notice: the operator, the API server and Ray's dashboard going away for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from dev.case import Case
from dev.kube import Kubectl

from rljob_api.reasons import ConditionType
from tests.e2e.conftest import EMBEDDED, SYSTEM

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

ENDLESS = 100_000
OUTAGE = 300.0
"""Seconds; after so many KubeRay's RayJob gives a run up whose dashboard does not answer."""
OPERATOR = "app.kubernetes.io/name=rljob,app.kubernetes.io/component=operator"


def goes_on(case: Case, step: int) -> None:
    """The same attempt does more steps."""
    job = case.reaches(step + 5, 1)
    assert (job["status"]["attempt"], job["status"].get("restarts", 0)) == (1, 0), case.story()


def test_operator_pod_deleted(case: Case, kubectl: Kubectl) -> None:
    case.apply(algorithm__grpo__steps=ENDLESS)
    step = case.reaches(10)["status"]["step"]
    system = Kubectl(kubectl.environment, SYSTEM)
    (before,) = system.pods(OPERATOR)
    system("delete", "pod", before["metadata"]["name"], "--grace-period=0", "--force")
    goes_on(case, step)
    assert {pod["metadata"]["name"] for pod in system.pods(OPERATOR)} != {before["metadata"]["name"]}


def test_api_server_down_for_60_seconds(case: Case, kubectl: Kubectl) -> None:
    if kubectl.environment.get("KUBECONFIG") != EMBEDDED:
        pytest.skip("needs the embedded cluster: its API server is halted")
    case.apply(algorithm__grpo__steps=ENDLESS)
    step = case.reaches(10)["status"]["step"]
    pid = int(Path("/run/rljob/pids/kube-apiserver").read_text().split()[0])
    system = Kubectl(kubectl.environment, SYSTEM)
    (before,) = system.pods(OPERATOR)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(60)  # the outage itself, not a wait for something
    finally:
        os.kill(pid, signal.SIGCONT)
    goes_on(case, step)
    (after,) = system.pods(OPERATOR)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_dashboard_unreachable_for_5_minutes(case: Case) -> None:
    """Ten times the stall deadline: the driver's own report says that the run goes on."""
    stall = 30
    case.apply(
        algorithm__grpo__steps=ENDLESS,
        generation__answerTimeoutSeconds=20,
        environment__timeoutSeconds=20,
        deadlines={"stallSeconds": stall, "saveSeconds": 20, "handoverSeconds": 20},
    )
    case.reaches(10)
    case.signal("head", "dashboard/dashboard.py", signal.SIGSTOP)
    message = case.shows(ConditionType.DRIVER_RUNNING, "Unreachable")
    assert "does not answer" in message
    began = time.monotonic()
    step = 0
    while time.monotonic() - began < OUTAGE:
        step = case.reaches(step + 1, 1)["status"]["step"]
        time.sleep(1)
    case.signal("head", "dashboard/dashboard.py", signal.SIGCONT)
    case.shows(ConditionType.DRIVER_RUNNING, "Running")
    goes_on(case, step)
    case.passed("DriverRunning=True/Running", "DriverRunning=Unknown/Unreachable", "DriverRunning=True/Running")
