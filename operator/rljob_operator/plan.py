"""What `decide` answers: actions, the whole new status, events, and when to look again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.reasons import EventType


@dataclass(frozen=True)
class PersistAttempt:
    """Write the attempt's number before anything of it exists, bound to the version of the job that was decided upon."""

    attempt: int


@dataclass(frozen=True)
class CreatePreflight:
    """Create the pod that looks at the checkpoint volume; an existing one of the same owner is success."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod, and only the one with this uid: a preflight's, or one whose RayCluster is gone; others are KubeRay's."""

    name: str
    uid: str


@dataclass(frozen=True)
class AskSave:
    """Ask the driver for a save, and wait that long for it. Asked again, it waits for the same save."""

    cluster: str
    wait_seconds: float


@dataclass(frozen=True)
class ReleaseWorkers:
    """Let a finished attempt's workers go and keep its head: GPUs are dear, and logs are on the head."""

    name: str
    uid: str


@dataclass(frozen=True)
class CreateCluster:
    """Create the attempt's RayCluster; an existing one of the same owner is success."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class SubmitDriver:
    """Submit the driver through Ray's jobs API; an existing submission of that id is success."""

    cluster: str
    submission_id: str
    entrypoint: str
    environment: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class DeleteCluster:
    """Delete a RayCluster; its pods go with it. Only the object with this uid."""

    name: str
    uid: str


@dataclass(frozen=True)
class DropSecret:
    """Delete the token's Secret of an attempt whose RayCluster somebody else deleted, or never was."""

    cluster: str


Action = (
    PersistAttempt
    | CreatePreflight
    | DeletePod
    | CreateCluster
    | SubmitDriver
    | AskSave
    | ReleaseWorkers
    | DropSecret
    | DeleteCluster
)


@dataclass(frozen=True)
class EventNote:
    """A Kubernetes event about the RLJob; sent after the status was written."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """The answer to one World.

    The status goes first, the actions after it: evidence is kept before what it came from is deleted, and an attempt is
    counted before it exists. A refused status write (somebody else changed the job) cancels the actions.
    """

    actions: tuple[Action, ...] = ()
    status_patch: Mapping[str, Any] | None = None
    """A merge patch of the status; None where nothing has to be written."""
    events: tuple[EventNote, ...] = ()
    requeue_after: float | None = None
    """Seconds until the next look; None waits for an event of the watches."""
