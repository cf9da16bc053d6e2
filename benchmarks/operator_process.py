"""`make bench-operator`: memory and start-up time of the operator process, against the cluster of `dev/cluster.sh env`.

Writes build/bench/operator.json and prints the same as a table. The installed operator is scaled down meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from dev.kube import ROOT, CommandError, Kubectl, cluster_environment

from rljob_api.crd import custom_resource_definition
from rljob_api.names import API_VERSION, KIND

JOBS = 200
REST_SECONDS = 20
START_LIMIT = 60.0
LOG = ROOT / "build/bench/operator.log"


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    measure: str
    unit: str
    ours: float
    peer: float | None
    ratio: float | None
    better: str
    note: str


def main() -> int:
    """Measure, print, write."""
    try:
        environment = cluster_environment()
        kubectl = Kubectl(environment, f"bench-{secrets.token_hex(3)}")
        with alone(environment), namespace(kubectl):
            rows = measure(kubectl, environment)
    except CommandError as error:
        print(f"bench-operator: {error}; `make cluster-up` starts a cluster", file=sys.stderr)
        return 1
    path = ROOT / "build/bench/operator.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    for row in rows:
        print(f"{row.measure:<46} {row.ours:>9.2f} {row.unit:<4} {row.note}")
    print(f"written to {path.relative_to(ROOT)}")
    return 0


@contextlib.contextmanager
def alone(environment: dict[str, str]) -> Iterator[None]:
    """The installed operator would do the work that is measured."""
    kubectl = Kubectl(environment, "rljob-system")
    given = yaml.safe_dump(custom_resource_definition())
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=given)
    deployment = kubectl.find("deployment", "rljob")
    replicas = deployment["spec"]["replicas"] if deployment else 0
    if replicas:
        kubectl("scale", "deployment", "rljob", "--replicas=0")
        kubectl("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=rljob", "--timeout=60s")
    try:
        yield
    finally:
        if replicas:
            kubectl("scale", "deployment", "rljob", f"--replicas={replicas}")


@contextlib.contextmanager
def namespace(kubectl: Kubectl) -> Iterator[None]:
    """A namespace for the jobs."""
    kubectl("create", "namespace", kubectl.namespace)
    try:
        yield
    finally:
        kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


def measure(kubectl: Kubectl, environment: dict[str, str]) -> list[Row]:
    """All rows."""
    kubectl("apply", "-f", "-", given=manifest("first"))
    with operator(kubectl, environment) as (process, began):
        seen = wait_for_status(kubectl, process, 1) - began
        first = resident(process.pid)
        before, made = cpu_seconds(process.pid), time.monotonic()
        kubectl("create", "-f", "-", given="---\n".join(manifest(f"job-{number}") for number in range(JOBS)))
        judged = wait_for_status(kubectl, process, JOBS + 1) - made
        spent = cpu_seconds(process.pid) - before
        many = resident(process.pid)
        rest = cpu_seconds(process.pid)
        time.sleep(REST_SECONDS)
        rest = cpu_seconds(process.pid) - rest
    with operator(kubectl, environment) as (process, began):
        again = wait_for_log(process, began)
    return [
        Row("start to first status", "s", round(seen, 2), None, None, "lower", "process start to the status of a waiting job"),
        Row("start to serving", "s", round(again, 2), None, None, "lower", "process start to the end of its checks"),
        Row("RSS, one job", "MiB", first, None, None, "lower", "resident memory of the process"),
        Row(f"RSS, {JOBS + 1} jobs", "MiB", many, None, None, "lower", "jobs that wait, without pods"),
        Row(f"{JOBS} new jobs to {JOBS} statuses", "s", round(judged, 2), None, None, "lower", "kubectl's creation included"),
        Row(f"CPU for {JOBS} new jobs", "s", round(spent, 2), None, None, "lower", "watched, judged, written"),
        Row("CPU at rest", "%", round(100 * rest / REST_SECONDS, 2), None, None, "lower", f"{JOBS + 1} jobs, {REST_SECONDS} s"),
    ]


def manifest(name: str) -> str:
    """A job that is stored but not honoured: its status is written once, then it waits for nothing but an edit."""
    spec: dict[str, Any] = copy.deepcopy(yaml.safe_load((ROOT / "examples/copy.yaml").read_text())["spec"])
    spec["queueName"] = "nowhere"
    return yaml.safe_dump({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec})


@contextlib.contextmanager
def operator(kubectl: Kubectl, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """The process, and when it was started."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    key = LOG.with_suffix(".key")
    key.write_text(secrets.token_hex(32))
    values = {**environment, "RLJOB_HEALTH_PORT": "0", "RLJOB_RAY_ACCESS": "ApiServerProxy", "RLJOB_KEY_FILE": str(key)}
    command = [sys.executable, "-m", "rljob_operator", "--namespace", kubectl.namespace]
    with LOG.open("w") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, env=values, stdout=log, stderr=log, text=True, cwd=ROOT)
        try:
            yield process, began
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_for_status(kubectl: Kubectl, process: subprocess.Popen[str], count: int) -> float:
    """When so many jobs had a status."""
    path = "jsonpath={range .items[*]}{.status.observedGeneration}{end}"
    wait(process, lambda: kubectl("get", "rlj", "-o", path).count("1") >= count, f"{count} jobs with a status")
    return time.monotonic()


def wait_for_log(process: subprocess.Popen[str], began: float) -> float:
    """Seconds to the line that says what is served."""
    wait(process, lambda: "serving RLJobs" in LOG.read_text(), "its first log line")
    return time.monotonic() - began


def wait(process: subprocess.Popen[str], holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds. Raises CommandError with the operator's words when it ended, or after START_LIMIT."""
    deadline = time.monotonic() + START_LIMIT
    while not holds():
        if process.poll() is not None:
            raise CommandError(f"the operator ended: {LOG.read_text().strip()[-500:]}")
        if time.monotonic() > deadline:
            raise CommandError(f"not within {START_LIMIT:g} s: {what}; see {LOG.relative_to(ROOT)}")
        time.sleep(0.01)


def resident(pid: int) -> float:
    """Resident memory in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise CommandError(f"process {pid} has no VmRSS")


def cpu_seconds(pid: int) -> float:
    """User and system time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
