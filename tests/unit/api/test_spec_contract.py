"""The spec as a contract: the example is whole, every field is accounted for, the CRD says what the models say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.crd import PRINTER_COLUMNS, custom_resource_definition, model_schema
from rljob_api.generate import files
from rljob_api.reasons import INVALID, REASONS
from rljob_api.rules import ACCESS_RULE, NAME_RULE, RULES
from rljob_api.spec import RLJobSpec
from rljob_api.status import RLJobStatus
from rljob_api.supported import HONOURED, PARTLY

ROOT = Path(__file__).resolve().parents[3]


def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from walk(field, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")


def leaves(schema: dict[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties")
    if not properties:
        yield path
        return
    for name, field in properties.items():
        yield from leaves(field, f"{path}.{name}")


def test_every_field_of_the_spec_is_either_honoured_or_in_the_table_of_what_is_not_supported_yet() -> None:
    found = set(leaves(model_schema(RLJobSpec), "spec"))
    assert found == HONOURED | PARTLY.keys()
    assert not HONOURED & PARTLY.keys()


def test_every_field_has_a_description_for_kubectl_explain() -> None:
    for model, root in ((RLJobSpec, "spec"), (RLJobStatus, "status")):
        nameless = [
            path for path, schema in walk(model_schema(model), root) if not schema.get("description") and "[]" not in path
        ]
        assert nameless == []


def test_the_schema_is_structural_and_holds_no_floats() -> None:
    forbidden = {"$ref", "const", "title", "allOf", "oneOf", "not", "exclusiveMinimum", "exclusiveMaximum", "nullable"}
    for model in (RLJobSpec, RLJobStatus):
        for path, schema in walk(model_schema(model), "$"):
            assert not forbidden & schema.keys(), path
            assert schema.get("type") != "number", path
            assert not ("properties" in schema and "additionalProperties" in schema), path


def test_every_integer_and_string_a_user_writes_is_bounded() -> None:
    for path, schema in walk(model_schema(RLJobSpec), "spec"):
        if schema.get("type") == "integer":
            assert {"minimum", "maximum"} <= schema.keys(), path
        if schema.get("type") == "string" and "enum" not in schema:
            assert "maxLength" in schema, path
        if schema.get("type") == "array":
            assert "maxItems" in schema, path


def test_an_absent_object_gets_the_defaults_inside_it() -> None:
    """The API server applies inner defaults only where the object itself has a default."""
    spec = model_schema(RLJobSpec)
    for name in ("parallelism", "prompts", "failurePolicy", "deadlines"):
        assert spec["properties"][name]["default"] == {}
    head = spec["properties"]["trainer"]["properties"]["head"]
    assert head["default"] == {}
    assert head["properties"]["resources"]["properties"]["memory"]["default"] == "2Gi"


def test_the_example_is_complete_and_shows_the_defaults() -> None:
    manifest = yaml.safe_load((ROOT / "examples/copy.yaml").read_text())
    spec = RLJobSpec.model_validate({k: v for k, v in manifest["spec"].items() if v is not None})
    shown = set(manifest["spec"])
    assert shown == {info.alias for info in RLJobSpec.model_fields.values()}
    assert spec.algorithm.grpo.prompts_per_step == 16
    assert spec.model.allow_inference_optimized_training is False


def test_printer_columns_are_the_promised_ones() -> None:
    shown = [column["name"] for column in PRINTER_COLUMNS if not column.get("priority")]
    assert shown == ["Step", "Reward", "Skipped", "Restarts", "State", "Age"]
    crd = custom_resource_definition()
    assert crd["spec"]["names"]["shortNames"] == ["rlj"]
    assert crd["spec"]["versions"][0]["subresources"] == {"status": {}}


@pytest.mark.parametrize("name", files())
def test_generated_files_are_as_the_contract_gives_them(name: str) -> None:
    assert (ROOT / name).read_text() == files()[name]


def test_every_rule_that_refuses_a_job_has_a_reason_that_conditions_can_tell() -> None:
    refusing = {rule.reason for rule in (*RULES, NAME_RULE, ACCESS_RULE) if rule.severity == "error"}
    assert refusing <= INVALID.keys(), refusing - INVALID.keys()


def test_reasons_are_stable_camel_case_words_with_a_meaning() -> None:
    for (_, name), reason in REASONS.items():
        assert re.fullmatch(r"[A-Z][A-Za-z]+", name)
        assert reason.meaning.endswith(".")
        assert reason.status in {"True", "False", "Unknown"}


@pytest.mark.parametrize("name", [name for name in files() if name.endswith(".md")])
def test_every_row_of_a_generated_table_is_whole(name: str) -> None:
    lines = files()[name].splitlines()
    for before, line in pairwise(lines):
        if before.startswith("|") and line:
            assert line.startswith("|"), line
            assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", before)), line


def test_the_page_of_the_spec_has_a_row_for_every_field_that_a_user_writes_also_inside_lists() -> None:
    rows = set(re.findall(r"^\| `([^`]+)` \|", files()["docs/spec.md"], re.MULTILINE))
    wanted = {path for path, schema in walk(model_schema(RLJobSpec), "spec") if "properties" not in schema and path[-1] != "]"}
    assert "spec.failurePolicy.rules[].action" in wanted
    assert wanted <= rows
