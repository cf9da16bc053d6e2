"""The RayCluster of one attempt, as a plain object. Pure: same job and attempt, same manifest.

`spec.trainer.template` is laid under ours, for head and workers alike:

- mappings are merged key by key; where both give a value, ours wins;
- lists whose items have a key (volumes, env, ports: `name`; volumeMounts: `mountPath`) are joined by that key, our item in
  place of the template's; other lists are joined, the template's first;
- user and group ids and `imagePullPolicy` are defaults of ours: there the template wins;
- a container named `trainer` is merged with ours, any other becomes a sidecar; ours always comes first, because KubeRay
  takes the first container as Ray's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rljob_api import names
from rljob_api.base import quantity
from rljob_api.layout import layout_of
from rljob_api.spec import HeadResources, Resources, RLJobSpec

from .world import Job

_GRACE_SECONDS = 10
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
        "securityContext": {
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    }
}
_CONTAINER_DEFAULTS: dict[str, Any] = {"imagePullPolicy": "IfNotPresent"}


class TemplateError(ValueError):
    """`spec.trainer.template` has no form that a pod template could have; the message names the place."""


def ray_cluster(job: Job, spec: RLJobSpec, attempt: int) -> dict[str, Any]:
    """The manifest. Raises TemplateError."""
    labels = {
        names.LABEL_JOB: job.name,
        names.LABEL_ATTEMPT: str(attempt),
        names.LABEL_UID: job.uid,
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }
    trainer, ranks = spec.trainer, layout_of(spec).ranks_per_node
    gpus = trainer.gpus_per_node
    secret = names.access_secret(names.cluster_name(job.name, attempt), job.uid)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": names.cluster_name(job.name, attempt),
            "namespace": job.namespace,
            "labels": labels,
            "annotations": {
                names.ANNOTATION_NO_HEAD_RESTART: "true",
                names.ANNOTATION_SPEC: json.dumps(spec.to_wire(), separators=(",", ":"), sort_keys=True),
            },
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": names.KIND,
                    "name": job.name,
                    "uid": job.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "rayVersion": names.RAY_VERSION,
            "authOptions": {"mode": "token", "secretName": secret},
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": {
                    "dashboard-host": "0.0.0.0",  # noqa: S104  the pod's own network; KubeRay's Service needs it
                    "num-cpus": "0",
                    "num-gpus": "0",
                    "object-store-memory": str(_object_store(trainer.head.resources)),
                    "resources": _custom(names.RESOURCE_HEAD),
                },
                "template": _pod(spec, labels, secret, trainer.head.resources, gpus=0, head=True),
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
                    "template": _pod(spec, labels, secret, trainer.resources, gpus=gpus, head=False),
                }
            ],
        },
    }


def _custom(name: str) -> str:
    # Single quotes: KubeRay pastes the value into a shell line as it stands.
    return "'" + json.dumps({name: names.RESOURCE_AMOUNT}, separators=(",", ":")) + "'"


def _object_store(resources: Resources | HeadResources) -> int:
    """A tenth of the pod's memory: prompts and answers are small, weights never go through Ray's store."""
    return int(min(max(quantity(resources.memory) / 10, 100 * _MEBI), 4096 * _MEBI)) // _MEBI * _MEBI


def _pod(
    spec: RLJobSpec, labels: Mapping[str, str], secret: str, resources: Resources | HeadResources, *, gpus: int, head: bool
) -> dict[str, Any]:
    volumes = [
        {
            "name": names.VOLUME_NAME,
            "persistentVolumeClaim": {"claimName": spec.checkpoint.volume.claim_name},
        },
        # Readable by the pod's group (fsGroup), whatever user the image has.
        {"name": names.ACCESS_VOLUME_NAME, "secret": {"secretName": secret, "defaultMode": 0o440}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{_object_store(resources) // _MEBI + 64}Mi"},
        },
    ]
    ours = {
        "metadata": {"labels": dict(labels)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": volumes,
        },
    }
    path = "spec.trainer.template"
    template = dict(_checked(spec.trainer.template, path, Mapping))
    inner = dict(_checked(template.get("spec", {}), f"{path}.spec", Mapping))
    theirs = _checked(inner.pop("containers", []), f"{path}.spec.containers", list)
    based = lay_under(_POD_DEFAULTS, {**template, "spec": inner}, path)
    merged: dict[str, Any] = lay_under(based, ours, path)
    named = [_checked(one, f"{path}.spec.containers[{index}]", Mapping) for index, one in enumerate(theirs)]
    for index, one in enumerate(named):
        _checked(one.get("name", ""), f"{path}.spec.containers[{index}].name", str)
    under = next((dict(one) for one in named if one.get("name") == names.CONTAINER), {})
    container = _container(spec, secret, resources, gpus, head, under)
    merged["spec"]["containers"] = [container, *(dict(one) for one in named if one.get("name") != names.CONTAINER)]
    return merged


def _container(
    spec: RLJobSpec, secret: str, resources: Resources | HeadResources, gpus: int, head: bool, under: Mapping[str, Any]
) -> dict[str, Any]:
    path = f"spec.trainer.template.spec.containers[{names.CONTAINER}]"
    theirs = [_checked(one, f"{path}.env", Mapping) for one in _checked(under.get("env", []), f"{path}.env", list)]
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        names.ENV_CONTROL_TOKEN_FILE: names.ACCESS_TOKEN_FILE,
    }
    if gpus == 0 and all(one.get("name") != "OMP_NUM_THREADS" for one in theirs):
        # Several ranks share the cores; each thread pool would take all of them.
        environment["OMP_NUM_THREADS"] = "1"
    amounts: dict[str, Any] = {
        "requests": {"cpu": resources.cpu, "memory": resources.memory},
        "limits": {"memory": resources.memory},
    }
    if gpus:
        for kind in amounts.values():
            kind["nvidia.com/gpu"] = str(gpus)
    container: dict[str, Any] = {
        "name": names.CONTAINER,
        "image": spec.trainer.image,
        "env": [
            *({"name": name, "value": value} for name, value in environment.items()),
            # KubeRay would add it, but not over one of the template.
            {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": names.ACCESS_KEY}}},
        ],
        "resources": amounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": names.VOLUME_NAME, "mountPath": names.VOLUME_MOUNT_PATH},
            {"name": names.ACCESS_VOLUME_NAME, "mountPath": names.ACCESS_MOUNT_PATH, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  Ray's object store lives there
        ],
    }
    if head:
        # KubeRay's head Service has exactly the ports named here.
        container["ports"] = [
            {"name": name, "containerPort": port}
            for name, port in (
                ("gcs-server", 6379),
                ("dashboard", names.DASHBOARD_PORT),
                ("client", 10001),
                (names.PROGRESS_PORT_NAME, names.PROGRESS_PORT),
            )
        ]
    return lay_under(lay_under(_CONTAINER_DEFAULTS, under, path), container, path)


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
