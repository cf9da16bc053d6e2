"""The preflight's pod, as a plain object: the operator's image where the trainer will run, with the trainer's volumes.

It takes of `spec.trainer.template` what decides where a pod may run and what it may read, and nothing that runs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_api import names
from rljob_api.spec import RLJobSpec

from .render import (
    attempt_labels,
    claim_volumes,
    driver_environment,
    owner,
    pod_base,
    source_mounts,
    spec_text,
    trainer_container,
)
from .world import Job

# Of the template's pod spec: where it runs, as whom, and with which images.
_TAKEN = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
)
_TEMPORARY = "rljob-tmp"


def preflight_pod(job: Job, spec: RLJobSpec, image: str) -> dict[str, Any]:
    """The manifest, for the job's current attempt. Raises TemplateError."""
    attempt = job.status.attempt
    template = spec.trainer.template
    inner = template.get("spec", {})
    taken = {key: inner[key] for key in _TAKEN if key in inner}
    ours: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [*claim_volumes(spec), {"name": _TEMPORARY, "emptyDir": {"sizeLimit": "16Mi"}}],
    }
    merged = pod_base({"spec": taken}, {"spec": ours})
    merged["spec"]["containers"] = [_container(job, spec, image, trainer_container(template))]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.preflight_pod(job.name, attempt),
            "namespace": job.namespace,
            "labels": attempt_labels(job, attempt) | {names.LABEL_COMPONENT: names.COMPONENT_PREFLIGHT},
            "annotations": {names.ANNOTATION_SPEC: spec_text(spec)},
            "ownerReferences": [owner(job)],
        },
        "spec": merged["spec"],
    }


def _container(job: Job, spec: RLJobSpec, image: str, trainer: Mapping[str, Any]) -> dict[str, Any]:
    environment = driver_environment(job, spec) | {names.ENV_TERMINATION_LOG: names.TERMINATION_LOG, "HOME": "/tmp"}  # noqa: S108
    if job.status.unloadable:
        environment[names.ENV_UNLOADABLE] = ",".join(job.status.unloadable)
    mine = [
        {"name": names.VOLUME_NAME, "mountPath": names.VOLUME_MOUNT_PATH},
        *source_mounts(spec),
        {"name": _TEMPORARY, "mountPath": "/tmp"},  # noqa: S108  the container's own
    ]
    places = {one["mountPath"] for one in mine}
    theirs = [{**one, "readOnly": True} for one in trainer.get("volumeMounts", []) if one.get("mountPath") not in places]
    return {
        "name": names.PREFLIGHT_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(names.PREFLIGHT_COMMAND),
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        # Both limits: a quota on limits refuses pods without them, and nothing in the spec could give them.
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "volumeMounts": [*mine, *theirs],
    }
