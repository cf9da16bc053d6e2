"""Whether the attempt has failed, and why. Evidence first: what ended, then what is overdue."""

from __future__ import annotations

import datetime
import signal

from rljob_api import exitcodes, names
from rljob_api.exitcodes import ExitCode
from rljob_api.spec import Deadlines

from .classify import DISRUPTIONS, Failure
from .deadlines import overdue
from .report import step_reached
from .world import Cluster, Driver, DriverUnknown, Pod, Unreachable, World, is_restartable

_LOG_LINES = 12
_LOG_CHARACTERS = 2000
_SIGNALLED = 128
_EVIDENCE_SECONDS = 3.0
_LAST_REPORT_SECONDS = 30.0
# Lines around the driver's own: the report for machines, and Ray's words about starting it.
_NOT_OURS = (
    names.REPORT_LINE_PREFIX,
    "Job entrypoint command failed with exit code",
    "Runtime env is setting up",
    "Running entrypoint for job",
)


def find_failure(world: World, cluster: Cluster, deadlines: Deadlines) -> Failure | None:
    """The first thing that ended the attempt, or None while it lives."""
    if isinstance(world.driver, Driver) and not is_restartable(world.driver.exit_code) and world.driver.exit_code:
        return _driver_ended(world)  # it said why; pods that went with it say less
    if lost := _pods_lost(world, cluster):
        return lost if lost.evident or not _evidence_may_come(world) else None
    return _driver_ended(world) or _cluster_refused(world, cluster) or overdue(world, cluster, deadlines)


def told_its_end(world: World) -> bool:
    """Whether the driver's last report is one of its end, and Ray has not said since how the process ended.

    Ray's dashboard may be gone, or refuse the token of an operator with another key; the report needs neither.
    """
    told = world.report is not None and (world.report.finished or world.report.failed) is not None
    silent = world.ended_since is not None and not _within(world, world.ended_since, _LAST_REPORT_SECONDS)
    return isinstance(world.driver, Unreachable) and told and silent


def _evidence_may_come(world: World) -> bool:
    """KubeRay deletes an ended pod at once, and the watch that saw how it ended may be a moment late."""
    return _within(world, world.incomplete_since, _EVIDENCE_SECONDS)


def _within(world: World, since: datetime.datetime | None, seconds: float) -> bool:
    """Whether less than that has passed. A moment in the future, after the clock was set back, is long past."""
    return since is not None and 0 <= (world.now - since).total_seconds() < seconds


def _pods_lost(world: World, cluster: Cluster) -> Failure | None:
    exit_code = world.driver.exit_code if isinstance(world.driver, Driver) else None
    if cluster.deleting:
        return Failure("HeadLost", f"RayCluster {cluster.name} is being deleted by someone else", exit_code, lost="head")
    if cluster.suspended and (
        cluster.provisioned is not None or world.begun
    ):  # KubeRay ends the pods, and forgets that they were ever ready
        return Failure("Evicted", f"RayCluster {cluster.name} was suspended by someone else", exit_code, lost="head")
    if cluster.provisioned is None:
        return None
    pods = world.pods_of(cluster.name)
    heads = [pod for pod in pods if pod.head]
    if not any(pod.runs for pod in heads):
        return _lost_pod(world, heads, exit_code, head=True)
    if not world.begun:  # a worker that is still missing was never there: a quota refuses it, say
        return None
    workers = [pod for pod in pods if not pod.head]
    lost = [pod for pod in workers if not _lives(pod, cluster, world.members)]
    if len(workers) - len(lost) < cluster.wanted - 1:  # more than wanted are no loss: somebody has scaled the cluster up
        return _lost_pod(world, lost, exit_code, head=False)
    return None


def _lost_pod(world: World, lost: list[Pod], exit_code: int | None, *, head: bool) -> Failure:
    """The pod that most likely ended the attempt, and why: what Kubernetes did, what the kernel did, or what is not known."""
    job = world.job
    ours = [pod for pod in (*world.departed, *lost) if pod.cluster == job.cluster_name and pod.job_uid == job.uid]
    if world.members:  # one that KubeRay replaced while the cluster was being made ended nothing
        ours = [pod for pod in ours if pod.name in world.members]
    gone = sorted((pod for pod in ours if pod.head == head), key=lambda pod: (not pod.disruption, not pod.last_words))
    pod = gone[0] if gone else None
    name = pod.name if pod else f"of {job.cluster_name}"
    reason = "HeadLost" if head else "WorkerLost"
    words = pod.last_words if pod and pod.last_words else world.warning
    if pod is not None and pod.disruption:
        reason = DISRUPTIONS.get(pod.disruption, "Evicted")
        words = f"{pod.disruption}: {pod.last_words}" if pod.last_words else pod.disruption
    elif pod is not None and pod.end_reason == "OOMKilled":
        reason = "OutOfMemory"
    elif pod in world.departed and pod is not None and pod.deleting and not words:
        words = "it was deleted"  # had it ended by itself, it would say how: KubeRay deletes what it has seen end
    which = "the head pod" if head else "worker pod"
    detail = f"{which} {name} is gone{f': {words}' if words else ''}"
    logs = quote(world.driver.message) if isinstance(world.driver, Driver) and world.driver.ended else ""
    return Failure(reason, detail, exit_code, evident=bool(words), logs=logs, lost="head" if head else "worker")


def _lives(pod: Pod, cluster: Cluster, members: frozenset[str]) -> bool:
    """Runs, and was there when the cluster was first complete: by its name, or by its times where this process came later.

    KubeRay replaces a lost worker within seconds; the replacement knows nothing of the run. A head is not replaced once the
    cluster has been complete (names.ANNOTATION_NO_HEAD_RESTART), so heads need no such test.
    """
    first = cluster.provisioned is not None and pod.created <= cluster.provisioned
    return pod.runs and (pod.name in members if members else first)


def _driver_ended(world: World) -> Failure | None:
    match world.driver:
        case Driver(status="FAILED", exit_code=ExitCode.RANK_LOST) if _within(world, world.ended_since, _EVIDENCE_SECONDS):
            return None  # how the rank's pod ended may be told in a moment
        case Driver(status="FAILED", exit_code=code, message=message):
            told = world.report.failed.message if world.report and world.report.failed else ""
            code = (
                code
                if code is not None or world.report is None or world.report.failed is None
                else world.report.failed.exit_code
            )
            detail = f"the driver ended{describe_end(code)}" + (f": {told}" if told else "")
            reason = "ActiveDeadlineExceeded" if code == ExitCode.DEADLINE else "DriverFailed"
            return Failure(reason, detail, code, final=code == ExitCode.DEADLINE, logs=quote(message))
        case Driver(status="SUCCEEDED", message=message):
            return _ended_too_early(world, message)
        case Driver(status="STOPPED"):
            return Failure("DriverFailed", "the driver was stopped through Ray by someone else")
        case Unreachable() if told_its_end(world) and world.report and world.report.failed:
            code, told = world.report.failed.exit_code, world.report.failed.message
            detail = f"the driver's last report says that it ended{describe_end(code)}" + (f": {told}" if told else "")
            reason = "ActiveDeadlineExceeded" if code == ExitCode.DEADLINE else "DriverFailed"
            return Failure(reason, detail, code, final=code == ExitCode.DEADLINE)
        case DriverUnknown() if world.driver_was_there:
            return Failure("DriverLost", f"Ray no longer knows the submission {world.job.submission_id}")
    return None


def _ended_too_early(world: World, message: str) -> Failure | None:
    """Exit code 0 without success: the last report says otherwise, or none came though steps are missing."""
    report = world.report
    if report is not None and report.failed is not None:
        code = report.failed.exit_code
        detail = (
            f"Ray reports success, but the driver's last report says exit code {describe_code(code)}: {report.failed.message}"
        )
        return Failure("DriverFailed", detail, code, logs=quote(message))
    if _within(world, world.ended_since, _LAST_REPORT_SECONDS):
        return None
    total = report.total_steps if report else world.job.status.total_steps
    detail = f"the driver ended with exit code 0 at step {step_reached(world)} of {total} and left no report that it finished"
    return Failure("DriverFailed", detail, 0, logs=quote(message))


def describe_end(code: int | None) -> str:
    """How a driver ended, to follow the word "ended". What its pods took with them left no code."""
    return " without a known exit code" if code is None else f" with exit code {describe_code(code)}"


def describe_code(code: int) -> str:
    """The code with the name of what it stands for: one of ours, or a signal as shells write it. 0 needs no name."""
    if code == ExitCode.OK:
        return "0"
    if code > _SIGNALLED:
        try:
            return f"{code} ({signal.Signals(code - _SIGNALLED).name})"
        except ValueError:
            return str(code)
    return exitcodes.describe(code)


def quote(message: str) -> str:
    """The driver's last log lines with a heading, for messages; empty where there are none."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip() and not any(word in line for word in _NOT_OURS)]
    text = "\n".join(lines[-_LOG_LINES:])[-_LOG_CHARACTERS:]
    return f"\nlast log lines:\n{text}" if text else ""


def _cluster_refused(world: World, cluster: Cluster) -> Failure | None:
    """KubeRay refuses a cluster by a Warning event alone: no status, no pods, no second try."""
    if not cluster.observed and world.warning.startswith(("InvalidRayClusterSpec", "InvalidRayClusterMetadata")):
        return Failure("ClusterRejected", f"RayCluster {cluster.name} is refused: {world.warning}", final=True)
    return None
