"""`make bench-operator`: what the operator costs and how soon it acts, against the cluster of `dev/cluster.sh env`.

python -m benchmarks.operator_process [--jobs N,N] [--children N,N,N] [--kills N]

Writes build/bench/operator.json and prints the same as a table. First heads of real runs are killed (`recovery`); then the
installed operator is scaled down, and no kubelet takes part: memory and processor time are the process's own (/proc), requests
its own count (/metrics).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from dev.kube import ROOT, CommandError, Kubectl, cluster_environment

from rljob_api.crd import custom_resource_definition
from rljob_api.names import API_VERSION, KIND
from rljob_operator.api import ApiError, ApiUnreachableError

from . import recovery
from .first_child import delete_jobs, wait_for_children
from .results import Row, table, write, write_block

REST_SECONDS = 30
START_LIMIT = 600.0
PAGE = ROOT / "docs/operator.md"
BEGIN, END = "<!-- cost: written by `make bench-operator-page` -->", "<!-- end of cost -->"
LOG = ROOT / "build/bench/operator.log"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="bench-operator", description=__doc__)
    parser.add_argument("--jobs", default="100,1000", help="numbers of stored jobs at which memory and time are read")
    parser.add_argument("--children", default="1,100,1000", help="numbers of jobs applied at once; 0: leave that part out")
    parser.add_argument("--kills", type=int, default=3, help="heads to kill of a real run, each; 0: leave that part out")
    parser.add_argument("--rayjob-mode", default="K8sJobMode", help="submissionMode of the RayJob whose heads are killed")
    parser.add_argument("--page", action="store_true", help="write the table into docs/operator.md too")
    options = parser.parse_args()
    jobs, children = ([int(one) for one in text.split(",")] for text in (options.jobs, options.children))
    rows: list[Row] = []
    wrong = ""
    try:
        environment = cluster_environment()
        os.environ.update(environment)  # the clients of the parts read KUBECONFIG themselves
        kubectl = Kubectl(environment, f"bench-{secrets.token_hex(3)}")
        if options.kills:
            rows += killed_heads(environment, options.kills, options.rayjob_mode)
        with alone(environment), namespace(kubectl):
            rows += measure(kubectl, environment, jobs)
            for count in filter(None, children):
                rows += first_children(kubectl, environment, count)
    except (CommandError, ApiError, ApiUnreachableError, TimeoutError) as error:
        wrong = f"{type(error).__name__}: {error}"  # what was measured before it is kept
    if rows:
        path = write("operator", rows)
        print(table(rows))
        print(f"written to {path.relative_to(ROOT)}")
    if wrong:
        print(f"bench-operator: {wrong}; `make cluster-up` starts a cluster", file=sys.stderr)
        return 1
    if options.page:
        write_block(PAGE, BEGIN, END, rows)
    return 0


def killed_heads(environment: dict[str, str], kills: int, mode: str) -> list[Row]:
    """Real runs under the installed operator. Raises CommandError where there is none."""
    deployment = Kubectl(environment, "rljob-system").find("deployment", "rljob")
    if deployment is None or not deployment["spec"]["replicas"]:
        raise CommandError("no operator is installed, which --kills needs: dev/images.sh all; dev/deploy.sh up")
    kubectl = Kubectl(environment, f"bench-{secrets.token_hex(3)}")
    with namespace(kubectl):
        kubectl("apply", "-f", "examples/copy-claim.yaml")
        return recovery.rows(kubectl.namespace, kills, mode)


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


def measure(kubectl: Kubectl, environment: dict[str, str], counts: list[int]) -> list[Row]:
    """The process with so many jobs that it knows, judges, and has nothing to start for."""
    rows = []
    kubectl("apply", "-f", "-", given=manifest("first"))
    with operator(kubectl, environment) as (process, began, port):
        seen = wait_for_status(kubectl, process, 1) - began
        rows.append(row("start to first status", "s", seen, "process start to the status of a waiting job"))
        rows.append(row("RSS, 1 job", "MiB", resident(process.pid), "resident memory of the process"))
        known = 1
        memory = [(1, resident(process.pid))]
        for count in counts:
            asked, spent = requests(port), cpu_seconds(process.pid)
            for first in range(known, count, 200):
                made = (manifest(f"job-{number}") for number in range(first, min(first + 200, count)))
                kubectl("create", "-f", "-", given="---\n".join(made), timeout=600)
            wait_for_status(kubectl, process, count)
            spent = cpu_seconds(process.pid) - spent
            memory.append((count, resident(process.pid)))
            rows.append(row(f"RSS, {count} jobs", "MiB", memory[-1][1], "jobs that wait, without pods"))
            rows.append(row(f"CPU for jobs {known + 1} to {count}", "s", spent, "watched, judged, status written"))
            share = (requests(port) - asked) / (count - known)
            rows.append(row(f"API requests a job, {count} jobs", "", share, "creation to written status; no watches"))
            known = count
        (few, least), (many, most) = memory[0], memory[-1]
        rows.append(row("RSS slope", "KiB/job", 1024 * (most - least) / (many - few), f"between {few} and {many} jobs"))
        asked, rest = requests(port), cpu_seconds(process.pid)
        time.sleep(REST_SECONDS)
        rest = cpu_seconds(process.pid) - rest
        rows.append(row("CPU at rest", "%", 100 * rest / REST_SECONDS, f"{known} jobs, {REST_SECONDS} s"))
        rows.append(
            row("API requests at rest", "/min", 60 * (requests(port) - asked) / REST_SECONDS, f"{known} jobs, no watches")
        )
    with operator(kubectl, environment) as (process, began, _):
        rows.append(row("start to serving", "s", wait_for_log(process, began), f"the end of its checks, {known} jobs"))
    asyncio.run(delete_jobs(kubectl.namespace))
    return rows


def row(measure: str, unit: str, ours: float, note: str, peer: float | None = None) -> Row:
    """A line where less is better."""
    return Row(measure, unit, ours, peer, "lower", note)


def first_children(kubectl: Kubectl, environment: dict[str, str], count: int) -> list[Row]:
    """From a job's request to its RayCluster, beside RayJob, for so many at once."""
    kubectl("apply", "-f", "examples/copy-claim.yaml")
    with operator(kubectl, environment) as (process, _, _):
        kubectl("apply", "-f", "-", given=manifest("first"))
        wait_for_status(kubectl, process, 1)  # it watches
        ours = asyncio.run(wait_for_children(kubectl.namespace, "RLJob", count))
    theirs = asyncio.run(wait_for_children(kubectl.namespace, "RayJob", count))
    note = "request to the RayCluster seen by a watch, no kubelet; peer: KubeRay's RayJob"
    return [
        row(
            f"apply to RayCluster, p{share * 100:.0f}, {count} jobs at once",
            "s",
            ours.percentile(share),
            note,
            theirs.percentile(share),
        )
        for share in (0.5, 0.99)
    ]


def manifest(name: str) -> str:
    """A job that is stored but not honoured: its status is written once, then it waits for nothing but an edit."""
    spec: dict[str, Any] = copy.deepcopy(yaml.safe_load((ROOT / "examples/copy.yaml").read_text())["spec"])
    spec["queueName"] = "nowhere"
    return yaml.safe_dump({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec})


@contextlib.contextmanager
def operator(kubectl: Kubectl, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], float, int]]:
    """The process, when it was started, and its health port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    LOG.parent.mkdir(parents=True, exist_ok=True)
    key = LOG.with_suffix(".key")
    key.write_text(secrets.token_hex(32))
    values = {**environment, "RLJOB_HEALTH_PORT": str(port), "RLJOB_RAY_ACCESS": "ApiServerProxy", "RLJOB_KEY_FILE": str(key)}
    command = [sys.executable, "-m", "rljob_operator", "--namespace", kubectl.namespace]
    with LOG.open("w") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, env=values, stdout=log, stderr=log, text=True, cwd=ROOT)
        try:
            yield process, began, port
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_for_status(kubectl: Kubectl, process: subprocess.Popen[str], count: int) -> float:
    """When so many jobs had a status."""
    path = "jsonpath={range .items[*]}{.status.observedGeneration}{end}"
    wait(process, lambda: kubectl("get", "rlj", "-o", path, timeout=300).count("1") >= count, f"{count} jobs with a status")
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
        time.sleep(0.05)


def requests(port: int) -> float:
    """Requests to the API server that the process has made."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    lines = [line for line in page.splitlines() if line.startswith("rljob_operator_api_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


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
