"""The API server and Python read one rule table: the same verdict and the same words for random specs, by dry-run.

RLJOB_PARITY_SPECS sets how many (`make test-slow`: thousands), RLJOB_PARITY_SEED which.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections.abc import Awaitable
from typing import Any

import pytest
from dev.layouts import whole

from rljob_api import names
from rljob_api.crd import custom_resource_definition
from rljob_api.manifest import judge
from rljob_api.rules import RULES, check_spec
from rljob_api.transitions import check_update
from rljob_operator.api import ApiError, NotFoundError

from .conftest import Space, eventually

pytestmark = pytest.mark.cluster

SPECS = int(os.environ.get("RLJOB_PARITY_SPECS", "200"))
SEED = int(os.environ.get("RLJOB_PARITY_SEED", "7"))
AT_ONCE = 8
IN_CRD = {rule.id for rule in RULES if rule.in_crd}
DRY = {"dryRun": "All", "fieldValidation": "Strict"}


async def refusal(space: Space, spec: dict[str, Any], name: str = "parity") -> str:
    """What the API server says of a new job; empty when it would take it."""
    manifest = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
    return await words(space.kube.request("POST", space.path("rljobs"), manifest, query=DRY))


async def words(request: Awaitable[Any]) -> str:
    """The API server's own words when it finds an object invalid; empty when it takes it.

    An installed webhook is asked after it, and only about objects that it takes itself.
    """
    try:
        await request
    except ApiError as error:
        if error.status != 422:
            raise
        return "" if error.message.startswith("admission webhook") else error.message
    return ""


def difference(said: str, expected: list[tuple[str, str]]) -> str:
    """What one judge says and the other does not; empty when they agree."""
    missing = [f"{path}: {message}" for path, message in expected if f"{path}: Invalid value: {message}" not in said]
    surplus = said.count(": Invalid value: ") != len(set(expected)) or bool(said) != bool(expected)
    return f"the API server says {said or 'nothing'}; Python says {expected or 'nothing'}" if missing or surplus else ""


@pytest.mark.timeout(60 + SPECS)
async def test_the_api_server_and_python_give_the_same_verdict_in_the_same_words(space: Space) -> None:
    rng = random.Random(SEED)
    specs = [whole(rng) for _ in range(SPECS)]
    gate = asyncio.Semaphore(AT_ONCE)

    async def compare(number: int, spec: dict[str, Any]) -> tuple[str, set[str]]:
        verdict = judge("parity", spec)
        assert verdict.spec is not None, verdict.findings
        findings = [finding for finding in verdict.findings if finding.rule in IN_CRD]
        async with gate:
            said = await refusal(space, spec)
        wrong = difference(said, [(finding.path, finding.message) for finding in findings])
        return (f"spec {number} of seed {SEED}: {wrong}\n{spec}" if wrong else ""), {finding.rule for finding in findings}

    results = await asyncio.gather(*(compare(number, spec) for number, spec in enumerate(specs)))
    differences = [text for text, _ in results if text]
    assert differences == []
    accepted = sum(not rules for _, rules in results)
    assert SPECS / 20 < accepted < SPECS * 0.9, f"{accepted} of {SPECS} accepted: the specs say little"
    if SPECS >= 1000:
        reached = set().union(*(rules for _, rules in results))
        assert sorted(IN_CRD - reached) == []


@pytest.mark.parametrize("name", ["c" * 60, "c" * 41, "4copy", "copy.v2", "c" * 40, "copy"])
async def test_a_name_is_judged_alike(space: Space, spec: dict[str, Any], name: str) -> None:
    refused = any(finding.rule == "name" for finding in judge(name, spec).findings)
    said = await refusal(space, spec, name)
    assert bool(said) == refused
    if refused:
        assert f"metadata.name: Invalid value: {name} has" in said
        assert f"has {len(name)} characters" in said


async def test_a_refused_job_leaves_no_object(space: Space, spec: dict[str, Any]) -> None:
    spec["trainer"] |= {"gpusPerNode": 8}
    spec["parallelism"] = {"tensor": 2, "pipeline": 8}
    with pytest.raises(ApiError, match=r"world size 8 .* = 16") as refused:
        await space.apply(spec)
    assert "model.shape.layers 2 are not divisible by pipeline 8" in refused.value.message
    assert await space.items("rljobs") == []


async def test_a_rule_is_asked_only_where_something_that_it_reads_changed(space: Space) -> None:
    rng = random.Random(SEED)
    old = next(spec for spec in (whole(rng) for _ in range(1000)) if not judge("parity", spec).findings)
    stored = await space.apply(old, "parity")
    judged = 0
    for _ in range(SPECS // 4):
        other = whole(rng)
        new = copy.deepcopy(old)
        for part in rng.sample(("trainer", "parallelism", "generation", "algorithm", "deadlines"), 2):
            if part in other:
                new[part] = other[part]
        spec = judge("parity", new).spec
        assert spec is not None
        findings = [finding for finding in check_spec(spec, stored["spec"]) if finding.rule in IN_CRD]
        said = await change(space, stored, new)
        assert difference(said, [(finding.path, finding.message) for finding in findings]) == "", new
        judged += bool(findings)
    assert judged > SPECS // 20


CHANGES: list[tuple[dict[str, Any], bool]] = [
    ({"trainer.nodes": 2}, True),
    ({"trainer.ranksPerNode": 2, "algorithm.grpo.microBatchSize": 32}, True),
    ({"parallelism.sequence": False}, False),
    ({"generation.parallelism": {"tensor": 1}}, True),
    ({"data.seed": 7}, True),
    ({"data.onChange": "Restart"}, True),
    ({"algorithm.grpo.promptsPerStep": 32}, True),
    ({"algorithm.grpo.steps": 900}, False),
    ({"algorithm.grpo.learningRate": "0.1"}, False),
    ({"suspend": True}, False),
    ({"suspend": True, "data.seed": 7}, True),
    ({"prompts.maxSkipped": 9, "failurePolicy.maxRestarts": 9, "ttlSecondsAfterFinished": 5}, False),
    ({"model.shape.layers": 4}, True),
    ({"model.shape": None}, True),
    ({"model.dtype": "bfloat16"}, False),
]


@pytest.mark.parametrize("path", ["algorithm.grpo.learningRate", "generation.temperature", "validation.stopAtReward"])
async def test_a_number_that_is_none_is_refused_by_the_schema_alone(space: Space, spec: dict[str, Any], path: str) -> None:
    said = await refusal(space, bend(spec, {path: "abc"}))
    assert f'spec.{path}: Invalid value: "abc"' in said
    assert said.count("Invalid value") == 1


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("attempt", [0, 2])
async def test_a_change_is_judged_alike(space: Space, spec: dict[str, Any], attempt: int, suspended: bool) -> None:
    spec["algorithm"]["grpo"]["microBatchSize"] = 8
    spec["suspend"] = suspended
    old = await space.apply(spec)
    if attempt:
        await space.kube.patch_status(space.name, "copy", old["metadata"]["resourceVersion"], {"attempt": attempt})
    old = await space.job()
    for changes, _ in CHANGES:
        new = bend(spec, changes)
        parsed = judge("copy", new).spec
        assert parsed is not None
        expected = check_update(old["spec"], parsed.to_wire(), attempt)
        said = await change(space, old, new)
        assert bool(said) == bool(expected), (changes, said)
        for finding in expected:
            assert f"{finding.path}: Forbidden: {finding.message}" in said
        assert said.count(": Forbidden: ") == len(expected)


async def test_sizes_change_only_where_the_table_says(space: Space, spec: dict[str, Any]) -> None:
    spec["algorithm"]["grpo"]["microBatchSize"] = 8
    old = await space.apply(spec)
    await space.kube.patch_status(space.name, "copy", old["metadata"]["resourceVersion"], {"attempt": 1})
    old = await space.job()
    for changes, refused in CHANGES:
        assert bool(await change(space, old, bend(spec, changes))) == refused, changes


async def test_an_object_that_older_rules_let_in_can_still_be_written_and_deleted(space: Space, spec: dict[str, Any]) -> None:
    """In a group of its own, whose CRD first knows no rules at all."""
    group = f"{space.name}.rljob.dev"
    crd = custom_resource_definition()
    crd["metadata"]["name"] = f"{names.PLURAL}.{group}"
    crd["spec"] |= {"group": group, "names": {"kind": names.KIND, "plural": names.PLURAL, "singular": names.SINGULAR}}
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = {
        "root": schema.pop("x-kubernetes-validations"),
        "spec": schema["properties"]["spec"].pop("x-kubernetes-validations"),
    }
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await space.kube.request("POST", crds, crd)
    try:
        path = f"/apis/{group}/v1alpha1/namespaces/{space.name}/{names.PLURAL}"
        spec["parallelism"] = {"tensor": 5}
        old = {"apiVersion": f"{group}/v1alpha1", "kind": names.KIND, "metadata": {"name": "old"}, "spec": spec}
        await eventually(lambda: served(space, path, old), lambda: "the CRD is not served")
        schema["x-kubernetes-validations"] = rules["root"]
        schema["properties"]["spec"]["x-kubernetes-validations"] = rules["spec"]
        patch = ("PATCH", f"{crds}/{crd['metadata']['name']}", crd, "application/merge-patch+json")
        await space.kube.request(*patch)

        async def enforced() -> bool:
            fresh = {**old, "metadata": {"name": "fresh"}}
            return "world size 1" in await words(space.kube.request("POST", path, fresh, query=DRY))

        await eventually(enforced, lambda: "the rules are not enforced")
        merge = "application/merge-patch+json"
        for step in (1, 2):
            status = {"status": {"attempt": 1, "step": step}}
            await space.kube.request("PATCH", f"{path}/old/status", status, merge)
        await space.kube.request("PATCH", f"{path}/old", {"metadata": {"labels": {"a": "b"}}}, merge)
        await space.kube.request("PATCH", f"{path}/old", {"spec": {"prompts": {"maxSkipped": 9}}}, merge)
        still = {"spec": {"parallelism": {"tensor": 3}, "suspend": True}}
        assert "tensor 3 x" in await words(space.kube.request("PATCH", f"{path}/old", still, merge))
        await space.kube.request("DELETE", f"{path}/old")
    finally:
        await space.kube.request("DELETE", f"{crds}/{crd['metadata']['name']}")


async def served(space: Space, path: str, manifest: dict[str, Any]) -> bool:
    """Create the object as soon as its kind is served."""
    try:
        await space.kube.request("POST", path, manifest)
    except NotFoundError:
        return False
    return True


async def change(space: Space, old: dict[str, Any], spec: dict[str, Any]) -> str:
    """What the API server says of replacing the spec; empty when it would."""
    manifest = {**old, "spec": spec}
    return await words(space.kube.request("PUT", space.path("rljobs", old["metadata"]["name"]), manifest, query=DRY))


def bend(spec: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with values at dotted paths."""
    bent = copy.deepcopy(spec)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = bent
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return bent
