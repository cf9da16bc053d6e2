"""Kubernetes' objects as the parts of a World. Pure; what an object lacks is read as absent, never as an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rljob_api import names
from rljob_api.preflight import PreflightReport
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus

from .times import parse_time
from .world import Claim, Cluster, Job, Pod


def read_status(raw: Mapping[str, Any]) -> RLJobStatus:
    """The status as a model. What this version can't read (written by another version) is left out, never fatal."""
    rest = dict(raw)
    while True:
        try:
            return RLJobStatus.model_validate(rest)
        except ValidationError as error:
            unreadable = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
            if not unreadable & rest.keys():
                return RLJobStatus()
            rest = {key: value for key, value in rest.items() if key not in unreadable}


def read_job(obj: Mapping[str, Any]) -> Job:
    """An RLJob object."""
    metadata = obj["metadata"]
    raw_status = obj.get("status") or {}
    return Job(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        resource_version=metadata["resourceVersion"],
        deleting="deletionTimestamp" in metadata,
        spec=obj.get("spec") or {},
        status=read_status(raw_status),
        raw_status=raw_status,
    )


def read_cluster(obj: Mapping[str, Any]) -> Cluster:
    """A RayCluster object."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    provisioned = None
    for condition in status.get("conditions") or []:
        if condition["type"] == "RayClusterProvisioned" and condition["status"] == "True":
            provisioned = parse_time(condition["lastTransitionTime"])
    return Cluster(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=next((ref["uid"] for ref in metadata.get("ownerReferences") or [] if ref.get("controller")), ""),
        created=parse_time(metadata["creationTimestamp"]),
        deleting="deletionTimestamp" in metadata,
        workers=sum(group.get("replicas") or 0 for group in spec.get("workerGroupSpecs") or []),
        provisioned=provisioned,
        observed=bool(status),
        suspended=spec.get("suspend") is True,
        spec=_attempt_spec((metadata.get("annotations") or {}).get(names.ANNOTATION_SPEC)),
        preflight=_preflight_report((metadata.get("annotations") or {}).get(names.ANNOTATION_PREFLIGHT)),
    )


def _preflight_report(text: str | None) -> PreflightReport | None:
    try:
        return None if text is None else PreflightReport.model_validate_json(text)
    except ValueError:  # somebody edited it: the driver looks at the volume itself
        return None


def _attempt_spec(text: str | None) -> RLJobSpec | None:
    try:
        return None if text is None else RLJobSpec.model_validate(json.loads(text))
    except (ValueError, RecursionError):  # somebody edited it, or another version wrote it: the job's own spec is used
        return None


def read_pod(obj: Mapping[str, Any]) -> Pod:
    """A pod with our label."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    labels = metadata.get("labels") or {}
    preflight = labels.get(names.LABEL_COMPONENT) == names.COMPONENT_PREFLIGHT
    container = names.PREFLIGHT_CONTAINER if preflight else names.CONTAINER
    ours: Mapping[str, Any] = next((one for one in status.get("containerStatuses") or [] if one.get("name") == container), {})
    terminated: Mapping[str, Any] | None = (ours.get("state") or {}).get("terminated")
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    disrupted = conditions.get("DisruptionTarget", {})
    return Pod(
        name=metadata["name"],
        cluster=labels.get(names.LABEL_RAY_CLUSTER, ""),
        job_uid=labels.get(names.LABEL_UID, ""),
        head=labels.get(names.LABEL_RAY_NODE_TYPE) == "head",
        created=parse_time(metadata["creationTimestamp"]),
        ready=conditions.get("Ready", {}).get("status") == "True",
        ended=status.get("phase") in {"Failed", "Succeeded"} or terminated is not None,
        deleting="deletionTimestamp" in metadata,
        due_gone=parse_time(metadata["deletionTimestamp"]) if "deletionTimestamp" in metadata else None,
        trouble=_trouble(status, conditions),
        last_words=_last_words(status, terminated),
        uid=metadata.get("uid", ""),
        attempt=labels.get(names.LABEL_ATTEMPT, ""),
        preflight=preflight,
        disruption=disrupted.get("reason", "Unknown") if disrupted.get("status") == "True" else "",
        spec_text=(metadata.get("annotations") or {}).get(names.ANNOTATION_SPEC, "") if preflight else "",
        **_end(terminated),
    )


def _end(terminated: Mapping[str, Any] | None) -> dict[str, Any]:
    if terminated is None:
        return {}
    finished = terminated.get("finishedAt")
    return {
        "exit_code": terminated.get("exitCode"),
        "end_reason": terminated.get("reason", ""),
        "message": terminated.get("message", ""),
        "ended_at": parse_time(finished) if finished else None,
    }


def read_claim(obj: Mapping[str, Any]) -> Claim:
    """A PersistentVolumeClaim."""
    status = obj.get("status") or {}
    given = status.get("accessModes") or (obj.get("spec") or {}).get("accessModes") or []
    return Claim(tuple(str(mode) for mode in given), status.get("phase") == "Bound", obj["metadata"].get("uid", ""))


_QUIET = frozenset({"ContainerCreating", "PodInitializing"})


def _trouble(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    for one in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "ContainerCreating") not in _QUIET:
            return _join(waiting["reason"], waiting.get("message"))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _join(scheduled.get("reason", "Unschedulable"), scheduled.get("message"))
    return ""


def _last_words(status: Mapping[str, Any], terminated: Mapping[str, Any] | None) -> str:
    words = _join(status.get("reason", ""), status.get("message"))
    if terminated is not None:
        code = f"{terminated.get('reason', 'Terminated')}, exit code {terminated.get('exitCode')}"
        words = _join(words, _join(code, terminated.get("message"))) if words else _join(code, terminated.get("message"))
    return words


def _join(first: str, second: str | None) -> str:
    if not second:
        return first
    return f"{first}: {' '.join(second.split())}" if first else " ".join(second.split())
