"""What was observed, frozen: the whole input of `decide`. Nothing here does I/O or reads a clock."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rljob_api import names
from rljob_api.exitcodes import ExitCode
from rljob_api.preflight import PreflightReport
from rljob_api.progress import CheckpointInfo, ProgressReport
from rljob_api.spec import RLJobSpec, Volume
from rljob_api.status import RLJobStatus

Key = tuple[str, str]
"""Namespace and name of an RLJob."""


class Stage(Enum):
    """Where a job stands, read from what its status holds for good (attempt, its end, finishTime), not from conditions."""

    BETWEEN = "no attempt is under way: the first one or the next one is due"
    ATTEMPT = "an attempt is under way"
    FINISHED = "the job has ended"


@dataclass(frozen=True)
class Job:
    """An RLJob as the API server holds it."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    deleting: bool
    spec: Any
    status: RLJobStatus
    raw_status: Mapping[str, Any]

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def stage(self) -> Stage:
        """Where the job stands."""
        status = self.status
        if status.finish_time is not None:
            return Stage.FINISHED
        return Stage.BETWEEN if self.between_attempts else Stage.ATTEMPT

    @property
    def between_attempts(self) -> bool:
        """Whether the newest attempt is over, or there was none."""
        status = self.status
        failed = status.last_failure is not None and status.last_failure.attempt == status.attempt
        return status.attempt == 0 or failed or status.attempt_end_time is not None

    @property
    def wants_suspension(self) -> bool:
        """Whether spec.suspend is true, however unreadable the rest may be."""
        return isinstance(self.spec, Mapping) and self.spec.get("suspend") is True

    @property
    def cluster_name(self) -> str:
        """The RayCluster of the current attempt."""
        return names.cluster_name(self.name, self.status.attempt)

    @property
    def submission_id(self) -> str:
        """Ray's submission id of the current attempt."""
        return names.submission_id(self.name, self.status.attempt)


@dataclass(frozen=True)
class Cluster:
    """A RayCluster that carries this job's label or its attempt's name."""

    name: str
    uid: str
    owner_uid: str
    created: datetime.datetime
    deleting: bool
    workers: int
    provisioned: datetime.datetime | None
    """When KubeRay first saw all pods ready; it never takes that back, so this is history, not liveness."""
    observed: bool
    """Whether KubeRay has written any status: a cluster that it refuses never gets one."""
    spec: RLJobSpec | None
    """The job's spec as this attempt was started with."""
    preflight: PreflightReport | None = None
    """What was found on the volume before it was made."""
    suspended: bool = False
    """Whether its own spec.suspend is true, which we never set: a queue, or somebody's hand."""

    @property
    def wanted(self) -> int:
        """Pods that the run needs, the head included, whatever somebody may have scaled its cluster to."""
        return (self.spec.trainer.nodes if self.spec is not None else self.workers) + 1


@dataclass(frozen=True)
class Claim:
    """The PersistentVolumeClaim that checkpoints go to."""

    modes: tuple[str, ...]
    bound: bool = True
    uid: str = ""


@dataclass(frozen=True)
class SaveAnswer:
    """What the driver answered to a save request."""

    accepted: bool
    saved: bool
    """Whether the save that was asked for is complete."""
    step: int | None = None
    """The step that the driver stood at when it first accepted."""
    checkpoint: CheckpointInfo | None = None
    """The run's newest checkpoint once the save is complete."""


@dataclass(frozen=True)
class Pod:
    """A pod with this job's label."""

    name: str
    cluster: str
    job_uid: str
    head: bool
    created: datetime.datetime
    ready: bool
    ended: bool
    """Its phase is Failed or Succeeded, or its Ray container has terminated (which is never restarted)."""
    deleting: bool
    trouble: str = ""
    """Why it does not start, in the kubelet's or the scheduler's words."""
    last_words: str = ""
    """How its main container ended, or why it was evicted."""
    uid: str = ""
    attempt: str = ""
    preflight: bool = False
    """Whether it is a preflight's pod; then the fields below speak of its container, else of Ray's."""
    exit_code: int | None = None
    end_reason: str = ""
    """The runtime's word for the end of the container: OOMKilled, Error, Completed."""
    message: str = ""
    """The container's termination message, as it wrote it."""
    ended_at: datetime.datetime | None = None
    disruption: str = ""
    """Why Kubernetes itself ends it (reason of its DisruptionTarget condition); empty where it does not."""
    due_gone: datetime.datetime | None = None
    """When a pod that is being deleted should have ended, by its grace period."""
    spec_text: str = ""
    """Of a preflight's pod: the job's spec that it was made for, as JSON."""

    @property
    def runs(self) -> bool:
        """Neither ended nor on its way out."""
        return not self.ended and not self.deleting

    @property
    def serves(self) -> bool:
        """Runs, and is ready."""
        return self.ready and self.runs


@dataclass(frozen=True)
class Driver:
    """What Ray's jobs API says of the attempt's submission."""

    status: str
    """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    exit_code: int | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether Ray calls it over."""
        return self.status in {"STOPPED", "SUCCEEDED", "FAILED"}


@dataclass(frozen=True)
class DriverUnknown:
    """Ray answered that it knows no such submission."""


@dataclass(frozen=True)
class Unreachable:
    """The question could not be answered; never a failure by itself."""

    detail: str


DriverAnswer = Driver | DriverUnknown | Unreachable


@dataclass(frozen=True)
class World:
    """One moment: the job, what belongs to it, what the driver says, and the clock."""

    now: datetime.datetime
    job: Job
    clusters: tuple[Cluster, ...] = ()
    pods: tuple[Pod, ...] = ()
    departed: tuple[Pod, ...] = ()
    """Pods of the attempt that are gone, as they were last seen."""
    members: frozenset[str] = frozenset()
    """Names of the attempt's pods when this process first saw all of them ready; empty before."""
    incomplete_since: datetime.datetime | None = None
    """Since when this process has seen that pods of the complete cluster are missing or ended."""
    stranger: str = ""
    """Owner of an object that bears the attempt's cluster name and is not ours."""
    claim_exists: bool | None = None
    """None where this pass had no need to ask; likewise the two below."""
    claim_modes: tuple[str, ...] = ()
    """Access modes of the claim; empty where this pass had no need to ask."""
    claim_wait: str = ""
    """Why the claim is not bound yet, where this pass asked and its first pod will not bind it."""
    claim_unused: bool = False
    """Whether the claim waits for its first pod: then nothing can be on it."""
    kuberay_present: bool | None = None
    preflight_image: str = ""
    """Image of preflight pods; empty where the driver looks at the volume itself."""
    save: SaveAnswer | Unreachable | None = None
    """The answer to the last save request of this attempt."""
    driver: DriverAnswer | None = None
    report: ProgressReport | None = None
    """The newest report of this attempt, possibly from an earlier pass."""
    driver_seen: bool = False
    """Whether Ray has known the attempt's submission in an earlier pass."""
    watched_since: datetime.datetime | None = None
    """Since when this process has looked at the attempt without a gap: what it did not watch proves nothing."""
    heard: datetime.datetime | None = None
    """When this process read `report`."""
    ended_since: datetime.datetime | None = None
    """Since when this process has seen that the driver ended; None where that is long enough."""
    submit_error: str = ""
    """How the last try to submit the driver went wrong."""
    warning: str = ""
    """The newest Kubernetes event about the attempt's cluster that tells of trouble."""
    refusal: Refusal | None = None
    """How the last try to create the attempt's cluster was refused."""
    written: datetime.datetime | None = None
    """When this process last wrote the status."""
    status_seconds: float = 15.0
    poll_seconds: float = 2.0

    @property
    def cluster(self) -> Cluster | None:
        """The current attempt's cluster."""
        name = self.job.cluster_name
        return next((one for one in self.clusters if one.name == name and one.owner_uid == self.job.uid), None)

    @property
    def preflight(self) -> Pod | None:
        """The current attempt's preflight pod."""
        name = names.preflight_pod(self.job.name, self.job.status.attempt)
        return next((one for one in self.pods if one.preflight and one.name == name and one.job_uid == self.job.uid), None)

    @property
    def used_volume(self) -> Volume | None:
        """Where the job's attempts write: each cluster carries the spec that it was made with, and the status says it once
        there has been one. Until then nothing was written, and the volume may still be chosen."""
        status = self.job.status
        ours = (one.spec for one in self.clusters if one.owner_uid == self.job.uid)
        known = status.checkpoint_volume if status.attempt > 1 or status.ray_cluster_name is not None else None
        return known or next((one.checkpoint.volume for one in ours if one is not None), None)

    @property
    def refused(self) -> Refusal | None:
        """The refusal of what is still missing: a preflight's pod that is there by now is no longer in the way."""
        known = self.refusal
        return None if known is not None and known.what and self.preflight is not None else known

    @property
    def has_bare_secret(self) -> bool:
        """Whether the attempt's Secret may be there without its RayCluster, with which it goes otherwise."""
        known = self.job.status.ray_cluster_name == self.job.cluster_name  # and somebody else deleted it
        refused = self.refusal is not None and not self.refusal.what
        return self.cluster is None and self.job.status.attempt > 0 and (known or refused)

    @property
    def begun(self) -> bool:
        """Whether all pods of the attempt were once there, as far as is known: seen, or shown by the driver that came after.

        KubeRay's word is not enough: it calls a cluster provisioned whose worker a quota refuses.
        """
        return bool(self.members) or isinstance(self.driver, Driver) or self.driver_was_there

    @property
    def driver_was_there(self) -> bool:
        """Whether Ray has known the attempt's driver, or a step of it was reported."""
        status = self.job.status
        start, step = status.attempt_start_time, status.last_step_time
        return self.driver_seen or bool(start and step and step >= start)

    @property
    def remains(self) -> str:
        """What still exists of the job's attempts, by name: pods, then RayClusters; empty where nothing does."""
        return listed(*self.strays())

    def strays(self, but: str = "") -> tuple[list[Pod], list[Cluster]]:
        """Pods and RayClusters of the job's attempts, without those of the attempt whose RayCluster has that name."""
        ours = [one for one in self.pods if one.job_uid == self.job.uid]
        mine = names.preflight_pod(self.job.name, self.job.status.attempt) if but else ""
        pods = [one for one in ours if (one.name != mine if one.preflight else not but or one.cluster != but)]
        return pods, [one for one in self.clusters if one.owner_uid == self.job.uid and one.name != but]

    def pods_of(self, cluster: str) -> list[Pod]:
        """Pods of this job that belong to one cluster; those of a deleted namesake may bear the same names."""
        return [pod for pod in self.pods if pod.cluster == cluster and pod.job_uid == self.job.uid]


@dataclass(frozen=True)
class Refusal:
    """The API server's answer to a create; `final` when trying again can't help."""

    detail: str
    final: bool
    what: str = ""
    """What is refused: a pod by its name; the attempt's RayCluster where empty."""


def listed(pods: Iterable[Pod], clusters: Iterable[Cluster]) -> str:
    """Their names, for messages: pods, then RayClusters."""
    return ", ".join([*sorted(one.name for one in pods), *sorted(f"RayCluster {one.name}" for one in clusters)])


def is_restartable(exit_code: int | None) -> bool:
    """Whether another attempt may end differently. Codes that are not ours (signals, the shell's) count as transient."""
    try:
        return exit_code is None or ExitCode(exit_code).transient
    except ValueError:
        return True
