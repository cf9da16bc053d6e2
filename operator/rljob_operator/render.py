"""The RayCluster of one attempt, as a plain object. Pure: same job and attempt, same manifest.

`spec.trainer.template` is laid under ours, for head and workers alike:

- mappings are merged key by key; where both give a value, ours wins;
- lists whose items have a key (volumes, env, ports: `name`; volumeMounts: `mountPath`) are joined by that key, our item in
  place of the template's; other lists are joined, the template's first;
- user and group ids, `imagePullPolicy` and `readinessProbe` are defaults of ours: there the template wins;
- a container named `trainer` is merged with ours, any other becomes a sidecar; ours always comes first, because KubeRay
  takes the first container as Ray's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api import names
from rljob_api.base import quantity
from rljob_api.layout import layout_of
from rljob_api.preflight import PreflightReport
from rljob_api.spec import HeadResources, Resources, RLJobSpec

from .world import Job

_GRACE_SECONDS = 15
"""Beyond deadlines.saveSeconds: for what comes after the save, and for the processes to end."""
_MEBI = 2**20
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}


# Below the template: what an image or a cluster may need otherwise.
_POD_DEFAULTS: dict[str, Any] = {
    "spec": {
        # A container's first process takes no SIGTERM that it has no handler for, and the shell in which KubeRay has workers
        # wait for their head has none: a worker that goes before that would hold its node for the whole grace period.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
    }
}
_CONTAINER_DEFAULTS: dict[str, Any] = {"imagePullPolicy": "IfNotPresent"}
# KubeRay's own asks nothing before ten seconds are over; each attempt waits for it twice, for the head and for its workers.
# A pod may be silent as long as with KubeRay's (50 s) before it counts as not ready.
_READINESS: dict[str, Any] = {
    "httpGet": {"path": names.RAY_HEALTH_PATH, "port": names.RAY_AGENT_PORT},
    "initialDelaySeconds": 2,
    "periodSeconds": 2,
    "timeoutSeconds": 5,
    "failureThreshold": 25,
}
# KubeRay's head Service has exactly the ports named here.
_HEAD_PORTS = (
    ("gcs-server", names.GCS_PORT),
    ("dashboard", names.DASHBOARD_PORT),
    ("client", names.CLIENT_PORT),
    (names.PROGRESS_PORT_NAME, names.PROGRESS_PORT),
)


class TemplateError(ValueError):
    """`spec.trainer.template` has no form that a pod template could have; the message names the place."""


@dataclass(frozen=True)
class _Belongs:
    """Whose pods they are."""

    cluster: str
    secret: str
    labels: Mapping[str, str]


def ray_cluster(job: Job, spec: RLJobSpec, attempt: int, preflight: PreflightReport | None = None) -> dict[str, Any]:
    """The manifest, with what was found on the volume before. Raises TemplateError."""
    cluster = names.cluster_name(job.name, attempt)
    belongs = _Belongs(cluster, names.access_secret(cluster, job.uid), attempt_labels(job, attempt))
    annotations = {names.ANNOTATION_NO_HEAD_RESTART: "true", names.ANNOTATION_SPEC: spec_text(spec)}
    if preflight is not None:
        annotations[names.ANNOTATION_PREFLIGHT] = preflight.model_dump_json(by_alias=True, exclude_none=True)
    trainer, ranks = spec.trainer, layout_of(spec).ranks_per_node
    gpus = trainer.gpus_per_node
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": cluster,
            "namespace": job.namespace,
            "labels": dict(belongs.labels),
            "annotations": annotations,
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "rayVersion": names.RAY_VERSION,
            "authOptions": {"mode": "token", "secretName": belongs.secret},
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": {
                    "dashboard-host": "0.0.0.0",  # noqa: S104  the pod's own network; KubeRay's Service needs it
                    "num-cpus": "0",
                    "num-gpus": "0",
                    "object-store-memory": str(_object_store(trainer.head.resources)),
                    "resources": _custom(names.RESOURCE_HEAD),
                },
                "template": _pod(belongs, spec, trainer.head.resources, gpus=0, head=True),
            },
            "workerGroupSpecs": [
                {
                    "groupName": names.WORKER_GROUP,
                    "replicas": trainer.nodes,
                    "minReplicas": trainer.nodes,
                    "maxReplicas": trainer.nodes,
                    "numOfHosts": 1,
                    "rayStartParams": {
                        "num-cpus": str(ranks),
                        "num-gpus": str(gpus),
                        "object-store-memory": str(_object_store(trainer.resources)),
                        "resources": _custom(names.RESOURCE_NODE),
                    },
                    "template": _pod(belongs, spec, trainer.resources, gpus=gpus, head=False),
                }
            ],
        },
    }


def attempt_labels(job: Job, attempt: int) -> dict[str, str]:
    """Labels of everything that belongs to an attempt."""
    return {
        names.LABEL_JOB: job.name,
        names.LABEL_ATTEMPT: str(attempt),
        names.LABEL_UID: job.uid,
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }


def owner(job: Job) -> dict[str, Any]:
    """The owner reference: what carries it goes with the job."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def spec_text(spec: RLJobSpec) -> str:
    """The spec as one line of JSON; equal specs give equal texts."""
    return json.dumps(spec.to_wire(), separators=(",", ":"), sort_keys=True)


def driver_environment(job: Job, spec: RLJobSpec) -> dict[str, str]:
    """Whose run it is and what is wanted: for the driver and for the preflight alike."""
    environment = {
        names.ENV_SPEC: spec_text(spec),
        names.ENV_NAME: job.name,
        names.ENV_NAMESPACE: job.namespace,
        names.ENV_UID: job.uid,
        names.ENV_ATTEMPT: str(job.status.attempt),
        names.ENV_VOLUME: names.VOLUME_MOUNT_PATH,
    }
    source = spec.checkpoint.from_
    if source is not None:
        same = source.claim_name == spec.checkpoint.volume.claim_name
        environment[names.ENV_SOURCE] = names.VOLUME_MOUNT_PATH if same else names.SOURCE_MOUNT_PATH
    return environment


def claim_volumes(spec: RLJobSpec) -> list[dict[str, Any]]:
    """The checkpoint volume, and that of checkpoint.from where it is another."""
    claim, source = spec.checkpoint.volume.claim_name, spec.checkpoint.from_
    volumes: list[dict[str, Any]] = [{"name": names.VOLUME_NAME, "persistentVolumeClaim": {"claimName": claim}}]
    if source is not None and source.claim_name != claim:
        other = {"claimName": source.claim_name, "readOnly": True}
        volumes.append({"name": names.SOURCE_VOLUME_NAME, "persistentVolumeClaim": other})
    return volumes


def source_mounts(spec: RLJobSpec) -> list[dict[str, Any]]:
    """The mount of that other volume, if there is one."""
    name = names.SOURCE_VOLUME_NAME
    there = any(one["name"] == name for one in claim_volumes(spec))
    return [{"name": name, "mountPath": names.SOURCE_MOUNT_PATH, "readOnly": True}] if there else []


def _custom(name: str) -> str:
    # Single quotes: KubeRay pastes the value into a shell line as it stands.
    return "'" + json.dumps({name: names.RESOURCE_AMOUNT}, separators=(",", ":")) + "'"


def _object_store(resources: Resources | HeadResources) -> int:
    """A tenth of the pod's memory: prompts and answers are small, weights never go through Ray's store."""
    return int(min(max(quantity(resources.memory) / 10, 100 * _MEBI), 4096 * _MEBI)) // _MEBI * _MEBI


def _pod(belongs: _Belongs, spec: RLJobSpec, resources: Resources | HeadResources, *, gpus: int, head: bool) -> dict[str, Any]:
    volumes = [
        *claim_volumes(spec),
        # Readable by the pod's group (fsGroup), whatever user the image has.
        {"name": names.ACCESS_VOLUME_NAME, "secret": {"secretName": belongs.secret, "defaultMode": 0o440}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{_object_store(resources) // _MEBI + 64}Mi"},
        },
    ]
    ours = {
        "metadata": {"labels": dict(belongs.labels)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": spec.deadlines.save_seconds + _GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": volumes,
        },
    }
    path = "spec.trainer.template"
    template = _checked(spec.trainer.template, path, Mapping)
    merged = pod_base(template, ours)
    container = _container(belongs, spec, resources, gpus, head, trainer_container(template))
    others = [dict(one) for one in _containers(template) if one.get("name") != names.CONTAINER]
    merged["spec"]["containers"] = [container, *others]
    return merged


def pod_base(template: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults, the template and our part of a pod, in this order, without containers. Raises TemplateError."""
    path = "spec.trainer.template"
    inner = dict(_inner(template))
    inner.pop("containers", None)
    if inner.get("hostPID") or _has_sidecars(template):  # no pod may have both; sidecars are to see nothing of the trainer
        inner.setdefault("shareProcessNamespace", False)
    return lay_under(lay_under(_POD_DEFAULTS, {**template, "spec": inner}, path), ours, path)


def trainer_container(template: Mapping[str, Any]) -> dict[str, Any]:
    """The template's container that is merged with ours; empty where it has none. Raises TemplateError."""
    return next((dict(one) for one in _containers(template) if one.get("name") == names.CONTAINER), {})


def _has_sidecars(template: Mapping[str, Any]) -> bool:
    """Whether other containers run beside the trainer's: named ones, or init containers that stay."""
    path = "spec.trainer.template.spec.initContainers"
    inits = [
        _checked(one, f"{path}[{index}]", Mapping)
        for index, one in enumerate(_checked(_inner(template).get("initContainers", []), path, list))
    ]
    return any(one.get("restartPolicy") == "Always" for one in inits) or any(
        one.get("name") != names.CONTAINER for one in _containers(template)
    )


def _inner(template: Mapping[str, Any]) -> Mapping[str, Any]:
    inner: Mapping[str, Any] = _checked(template.get("spec", {}), "spec.trainer.template.spec", Mapping)
    return inner


def _containers(template: Mapping[str, Any]) -> list[Any]:
    path = "spec.trainer.template.spec.containers"
    found = _checked(_inner(template).get("containers", []), path, list)
    for index, one in enumerate(found):
        _checked(one, f"{path}[{index}]", Mapping)
        _checked(one.get("name", ""), f"{path}[{index}].name", str)
    return list(found)


def _container(
    belongs: _Belongs, spec: RLJobSpec, resources: Resources | HeadResources, gpus: int, head: bool, under: Mapping[str, Any]
) -> dict[str, Any]:
    path = f"spec.trainer.template.spec.containers[{names.CONTAINER}]"
    theirs = [_checked(one, f"{path}.env", Mapping) for one in _checked(under.get("env", []), f"{path}.env", list)]
    environment = _environment(belongs, spec, head=head)
    if gpus == 0 and all(one.get("name") != "OMP_NUM_THREADS" for one in theirs):
        # Several ranks share the cores; each thread pool would take all of them.
        environment["OMP_NUM_THREADS"] = "1"
    container: dict[str, Any] = {
        "name": names.CONTAINER,
        "image": spec.trainer.image,
        "env": [
            *({"name": name, "value": value} for name, value in environment.items()),
            # KubeRay would add it, but not over one of the template.
            {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": belongs.secret, "key": names.ACCESS_KEY}}},
        ],
        "resources": _amounts(resources, gpus),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": names.VOLUME_NAME, "mountPath": names.VOLUME_MOUNT_PATH},
            *source_mounts(spec),
            {"name": names.ACCESS_VOLUME_NAME, "mountPath": names.ACCESS_MOUNT_PATH, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  Ray's object store lives there
        ],
        # Whoever ends the pod (a drain, a deletion, the operator) waits for the driver to save and end first.
        "lifecycle": {"preStop": {"exec": {"command": list(names.PRESTOP_COMMAND)}}},
    }
    if head:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in _HEAD_PORTS]
    # As a whole: two kinds of probe in one would be refused.
    defaults = _CONTAINER_DEFAULTS if "readinessProbe" in under else {**_CONTAINER_DEFAULTS, "readinessProbe": _READINESS}
    return lay_under(lay_under(defaults, under, path), container, path)


def _environment(belongs: _Belongs, spec: RLJobSpec, *, head: bool) -> dict[str, str]:
    """What Ray and the preStop hook read."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would wait half a minute for Serve's proxies; what has to be done before the end, preStop has done by then.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        names.ENV_CONTROL_TOKEN_FILE: names.ACCESS_TOKEN_FILE,
        names.ENV_DRIVER_HOST: "127.0.0.1" if head else names.head_service(belongs.cluster),
        names.ENV_SAVE_SECONDS: str(spec.deadlines.save_seconds),
    }


def _amounts(resources: Resources | HeadResources, gpus: int) -> dict[str, Any]:
    """Requests and limits. No limit on CPU: a rank that is held up holds up all."""
    amounts: dict[str, Any] = {
        "requests": {"cpu": resources.cpu, "memory": resources.memory},
        "limits": {"memory": resources.memory},
    }
    if gpus:
        for kind in amounts.values():
            kind["nvidia.com/gpu"] = str(gpus)
    return amounts


def lay_under(under: Mapping[str, Any], over: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Both merged, `over` winning; the rules stand in this module's docstring."""
    merged = dict(under)
    for key, value in over.items():
        if key not in under:
            merged[key] = value
        elif isinstance(value, Mapping):
            merged[key] = lay_under(_checked(under[key], f"{path}.{key}", Mapping), value, f"{path}.{key}")
        elif isinstance(value, list):
            below = _checked(under[key], f"{path}.{key}", list)
            merged[key] = _join(below, value, _MERGE_KEYS.get(key), f"{path}.{key}")
        else:
            merged[key] = value
    return merged


def _join(under: list[Any], over: list[Any], key: str | None, path: str) -> list[Any]:
    if key is None:
        return [*under, *(item for item in over if item not in under)]
    ours = {item[key]: item for item in over}
    below = [_checked(item, f"{path}[{index}]", Mapping) for index, item in enumerate(under)]
    for index, item in enumerate(below):
        _checked(item.get(key, ""), f"{path}[{index}].{key}", str)
    merged = [ours.pop(item.get(key), item) for item in below]
    return [*merged, *(item for item in over if item[key] in ours)]


def _checked(value: Any, path: str, kind: type) -> Any:
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "a string" if kind is str else "a mapping"
        raise TemplateError(f"{path}: must be {wanted}; found {value!r:.80}")
    return value
