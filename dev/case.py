"""One RLJob under test on a real cluster; its trail is recorded from the first event to the last, whatever is done to it."""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from dev.kube import ROOT, Kubectl
from rljob_api import names
from rljob_api.reasons import ConditionType
from rljob_cli.errors import UserError
from rljob_cli.watch import condition, ended, events

Job = dict[str, Any]

_KILL = """
import os, signal, sys
words, number = sys.argv[1], int(sys.argv[2])
found = []
for entry in filter(str.isdigit, os.listdir("/proc")):
    try:
        line = open(f"/proc/{entry}/cmdline").read().replace(chr(0), " ")
    except OSError:
        continue
    if words in line and int(entry) != os.getpid():
        found.append(int(entry))
for pid in found:
    os.kill(pid, number)
print(len(found))
"""

SMALL: dict[str, Any] = {
    "trainer.resources": {"cpu": "500m", "memory": "3Gi"},
    "trainer.head": {"resources": {"cpu": "250m", "memory": "2Gi"}},
    "generation.maxInFlightPrompts": None,
    "algorithm.grpo.promptsPerStep": 4,
    "algorithm.grpo.generationsPerPrompt": 4,
    "algorithm.grpo.microBatchSize": 16,
    "validation": None,
    "checkpoint.everySteps": 5,
    "failurePolicy": {"maxRestarts": 3, "backoffSeconds": 1},
    "ttlSecondsAfterFinished": 0,
}
"""The example, cut to a run of a second or two once its pods are there."""


def manifest(name: str, changes: dict[str, Any]) -> str:
    """The example as a small job, with values at dotted paths of its spec; None takes a field out."""
    job = copy.deepcopy(yaml.safe_load((ROOT / "examples/copy.yaml").read_text()))
    if image := os.environ.get("RLJOB_WORKLOAD_IMAGE"):
        job["spec"]["trainer"]["image"] = image
    job["metadata"]["name"] = name
    for path, value in {**SMALL, **changes}.items():
        place = job["spec"]
        *parents, last = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return str(yaml.safe_dump(job))


class Case:
    """A job, its trail, and hands to hurt it with."""

    def __init__(self, kubectl: Kubectl, name: str = "copy") -> None:
        self.kubectl = kubectl
        self.name = name
        self.trail: list[str] = []
        """`seconds Type=Status/Reason` for each change of a condition, and `seconds attempt=N`."""
        self.problems: list[str] = []
        self._began = time.monotonic()
        self._job: Job = {}
        self._known: dict[str, str] = {}
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._record, name=f"trail of {name}", daemon=True)

    # ---- The record ----

    def apply(self, **changes: Any) -> None:
        """Create the job, or replace its spec; dots of a path are written as two underscores."""
        paths = {path.replace("__", "."): value for path, value in changes.items()}
        self.kubectl("apply", "-f", "-", given=manifest(self.name, paths))
        if self._thread.ident is None:
            self._began = time.monotonic()
            self._thread.start()

    def delete(self) -> None:
        """Delete the job, and wait until nothing of it is there; its record ends."""
        self._stop.set()
        self.kubectl("delete", names.RESOURCE, self.name, "--wait=true")
        self.nothing_is_left()

    def close(self) -> None:
        """End the record. Its watch ends by itself in half a minute, and what it still sees is another job's."""
        self._stop.set()

    def _record(self) -> None:
        while not self._stop.is_set():
            try:
                for job in events(self.kubectl.namespace, self.name, 30):
                    if self._stop.is_set():
                        return
                    self._take(job)
            except UserError as error:  # the job is gone, or the API server does not answer: look again
                with self._news:
                    self.problems.append(f"{self._seconds()} {error}")
                    self._news.notify_all()
                self._stop.wait(1.0)

    def _take(self, job: Job) -> None:
        status = job.get("status", {})
        now = {one["type"]: f"{one['status']}/{one['reason']}" for one in status.get("conditions", [])}
        now["attempt"] = str(status.get("attempt", 0))
        with self._news:
            self._job = job
            for name, value in now.items():
                if self._known.get(name) != value:
                    self.trail.append(f"{self._seconds()} {name}={value}")
            self._known = now
            self._news.notify_all()

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:5.1f}"

    # ---- Waiting and judging ----

    def until(self, holds: Callable[[Job], bool], what: str, seconds: float = 180) -> Job:
        """The job as soon as the predicate holds."""
        with self._news:
            if not self._news.wait_for(lambda: bool(self._job) and holds(self._job), seconds):
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.story()}")
            return self._job

    def reaches(self, step: int, attempt: int = 1, seconds: float = 240) -> Job:
        """The job once that attempt has done that step itself or more."""

        def holds(job: Job) -> bool:
            status = job.get("status", {})
            running = condition(job, ConditionType.SUCCEEDED).get("reason") == "Running"
            return status.get("attempt", 0) == attempt and running and status.get("step", 0) >= step

        return self.until(holds, f"step {step} of attempt {attempt}", seconds)

    def ends(self, seconds: float = 300) -> Job:
        """The job once it has succeeded or failed."""
        return self.until(lambda job: ended(job) is not None, "the end of the job", seconds)

    def shows(self, kind: ConditionType, reason: str, seconds: float = 180) -> str:
        """The condition's message once it has that reason."""
        job = self.until(lambda job: condition(job, kind).get("reason") == reason, f"{kind}/{reason}", seconds)
        return str(condition(job, kind)["message"])

    def passed(self, *steps: str) -> None:
        """Assert that the trail has these changes in this order, others between them allowed."""
        rest: Iterator[str] = iter(entry.split(" ")[-1] for entry in self.trail)
        for step in steps:
            assert step in rest, f"{step} is missing, or is not after what precedes it in {steps}\n{self.story()}"

    def story(self) -> str:
        """Trail and status, for people."""
        return "\n".join([*self.trail, *self.problems[-3:], yaml.safe_dump(self._job.get("status", {}))])

    # ---- Hands ----

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        """Pods of the run's Ray: all, or of a role (head, worker)."""
        selector = f"{names.LABEL_JOB}={self.name},{names.LABEL_RAY_CLUSTER}"
        return self.kubectl.pods(f"{selector},{names.LABEL_RAY_NODE_TYPE}={role}" if role else selector)

    def pod(self, role: str) -> str:
        """Name of the run's only pod of that role."""
        (pod,) = self.pods(role)
        return str(pod["metadata"]["name"])

    def delete_pod(self, role: str) -> None:
        """As a person or a drained node would, without a grace period."""
        self.kubectl("delete", "pod", self.pod(role), "--grace-period=0", "--force", "--wait=false")

    def evict(self, role: str) -> None:
        """As `kubectl drain` does: the pod has its grace period, and its DisruptionTarget condition says why it goes."""
        namespace, name = self.kubectl.namespace, self.pod(role)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        self.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))

    def signal(self, role: str, words: str, number: int) -> int:
        """Send a signal to the processes of a pod whose command line has these words; returns how many there were."""
        said = self.kubectl("exec", self.pod(role), "--", "python", "-c", _KILL, words, str(number))
        count = int(said.split()[-1])
        assert count, f"no process in the {role} has {words!r} in its command line"
        return count

    def everything(self) -> list[str]:
        """Kind and name of all that belongs to the job and could be left behind."""
        kinds = "rayclusters,pods,secrets"
        if self.kubectl.find(names.RESOURCE, self.name) is None:  # the policy of a run stays as long as its RLJob
            kinds += ",networkpolicies"
        selector = f"{names.LABEL_JOB}={self.name}"
        found = self.kubectl("get", kinds, "-l", selector, "-o", "name").split()
        return [*found, *self.kubectl("get", "rayclusters,pods", "-o", "name").split()]

    def nothing_is_left(self, seconds: float = 60) -> None:
        """Wait until nothing of the job is there; its own object apart."""
        deadline = time.monotonic() + seconds
        while left := self.everything():
            assert time.monotonic() < deadline, f"left behind after {seconds:g} s: {left}"
            time.sleep(0.5)
