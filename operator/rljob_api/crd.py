"""The CustomResourceDefinition, generated from the pydantic models.

pydantic's JSON schema is not what Kubernetes calls structural: references, `anyOf` with null, `const`, titles and
`additionalProperties: false` are rewritten or dropped, and objects whose fields all have defaults get `default: {}`, so that
the defaults inside them apply when the object is absent.
"""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel

from . import names
from .cel import root_validations, spec_validations
from .spec import RLJobSpec
from .status import RLJobStatus

_DROPPED = frozenset({"title", "$defs", "examples", "deprecated", "discriminator"})
_FREE_FORM = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_QUANTITY_FIELDS = frozenset({"cpu", "memory", "gpuMemory", "size"})

PRINTER_COLUMNS = (
    {"name": "Step", "type": "integer", "jsonPath": ".status.step", "description": "Training steps done."},
    {"name": "Reward", "type": "string", "jsonPath": ".status.reward", "description": "Mean reward of the last step."},
    {
        "name": "Skipped",
        "type": "integer",
        "jsonPath": ".status.prompts.skipped",
        "description": "Prompts never trained.",
    },
    {"name": "Restarts", "type": "integer", "jsonPath": ".status.restarts", "description": "Restarts after failures."},
    {
        "name": "State",
        "type": "string",
        "jsonPath": '.status.conditions[?(@.type=="Succeeded")].reason',
        "description": "Reason of the Succeeded condition.",
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {
        "name": "Attempt",
        "type": "integer",
        "jsonPath": ".status.attempt",
        "description": "Attempts started.",
        "priority": 1,
    },
    {
        "name": "Validation",
        "type": "string",
        "jsonPath": ".status.validation.reward",
        "description": "Reward of the last validation.",
        "priority": 1,
    },
    {
        "name": "Checkpoint",
        "type": "integer",
        "jsonPath": ".status.checkpoint.step",
        "description": "Step of the newest checkpoint.",
        "priority": 1,
    },
)


def structural(schema: dict[str, Any], definitions: dict[str, Any], path: str = "$") -> dict[str, Any]:
    """Rewrite one JSON schema as a structural one. Raises TypeError, naming the path, for what has no such form."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        return structural({**target, **{k: v for k, v in schema.items() if k != "$ref"}}, definitions, path)
    if len(schema.get("allOf", ())) == 1:
        rest = {k: v for k, v in schema.items() if k != "allOf"}
        return structural({**schema["allOf"][0], **rest}, definitions, path)
    if "anyOf" in schema:
        arms = [arm for arm in schema["anyOf"] if arm.get("type") != "null"]
        if len(arms) != 1:
            raise TypeError(f"{path}: a union is not structural; flatten it")
        rest = {k: v for k, v in schema.items() if k != "anyOf" and not (k == "default" and v is None)}
        return structural({**arms[0], **rest}, definitions, path)
    out: dict[str, Any] = {}
    for key, value in schema.items():
        _rewrite(out, key, value, definitions, path)
    if "type" not in out:
        raise TypeError(f"{path}: no type in {schema}")
    if out["type"] == "number":
        raise TypeError(f"{path}: Kubernetes objects hold no floats; use a decimal string")
    return out


def _rewrite(out: dict[str, Any], key: str, value: Any, definitions: dict[str, Any], path: str) -> None:
    match key:
        case _ if key in _DROPPED:
            pass
        case "const":
            out["enum"] = [value]
        case "properties":
            out[key] = {name: _field(name, field, definitions, f"{path}.{name}") for name, field in value.items()}
        case "items":
            out[key] = structural(value, definitions, f"{path}[]")
        case "additionalProperties":
            if value is True:
                out.update(_FREE_FORM)
            elif value:  # false is forbidden by Kubernetes: pruning and strict field validation do that job
                out[key] = structural(value, definitions, f"{path}{{}}")
        case "exclusiveMinimum" | "exclusiveMaximum":
            raise TypeError(f"{path}: {key} is a number here and a boolean in Kubernetes; use ge or le")
        case _:
            out[key] = copy.deepcopy(value)


def _field(name: str, schema: dict[str, Any], definitions: dict[str, Any], path: str) -> dict[str, Any]:
    field = structural(schema, definitions, path)
    if name in _QUANTITY_FIELDS and field["type"] == "string":
        del field["type"]
        field.pop("maxLength", None)
        field["x-kubernetes-int-or-string"] = True
        field["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if field.get("type") == "object" and field.get("default") is not None:
        # The inner defaults say the same; only what differs from them belongs here.
        inner = {key: prop.get("default") for key, prop in field.get("properties", {}).items()}
        field["default"] = _differences(field["default"], inner, field.get("properties", {}))
    return field


def _differences(value: dict[str, Any], inner: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for key, part in value.items():
        if part is None or part in ([], {}):
            continue
        if isinstance(part, dict):
            nested = properties[key].get("properties", {})
            part = _differences(part, {name: prop.get("default") for name, prop in nested.items()}, nested)
            if part and part != inner.get(key):
                out[key] = part
        elif part != inner.get(key):
            out[key] = part
    return out


def model_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of one model."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return structural(raw, raw.get("$defs", {}))


def custom_resource_definition() -> dict[str, Any]:
    """The whole CRD object."""
    spec = model_schema(RLJobSpec)
    spec["x-kubernetes-validations"] = spec_validations(spec)
    schema = {
        "type": "object",
        "description": "RLJob is one async RL post-training run of a language model.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{names.API_VERSION}"},
            "kind": {"type": "string", "description": names.KIND},
            # Any name that Kubernetes takes: the length bounds the estimated cost of the rule on it.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": spec,
            "status": model_schema(RLJobStatus),
        },
        "x-kubernetes-validations": root_validations(),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": names.RESOURCE,
            "labels": {"app.kubernetes.io/name": "rljob"},
        },
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT],
                "categories": ["rl"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": list(PRINTER_COLUMNS),
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
