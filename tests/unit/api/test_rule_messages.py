"""What each rule says, word for word: every clause of the table is broken once, and its message names the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.manifest import judge
from rljob_api.rules import RULES

from .conftest import Bend, bender

_TABLE = yaml.safe_load(Path(__file__).with_name("rule_messages.yaml").read_text())
# rule, change of the base, path, message
SAID: list[tuple[str, dict[str, Any], str, str]] = [
    (row["rule"], row["changes"], row["path"], row["message"]) for row in _TABLE["said"]
]


@pytest.fixture
def bent() -> Bend:
    """The table's base with paths set: these messages do not follow the example's numbers."""
    return bender(_TABLE["base"])


@pytest.mark.parametrize(("rule", "changes", "path", "message"), SAID)
def test_a_broken_rule_names_the_values_and_what_would_do(
    bent: Bend, rule: str, changes: dict[str, Any], path: str, message: str
) -> None:
    findings = [finding for finding in judge("copy", bent(**changes)).findings if finding.rule == rule]
    assert [(finding.path, finding.message) for finding in findings] == [(path, message)]
    assert findings[0].severity == next(one.severity for one in RULES if one.id == rule)


def test_every_clause_of_the_table_has_its_message_here(bent: Bend) -> None:
    broken = set()
    for rule_id, changes, _, _ in SAID:
        spec = judge("copy", bent(**changes)).spec
        assert spec is not None
        wire = spec.to_wire()
        rule = next(one for one in RULES if one.id == rule_id)
        broken |= {(rule_id, clause.message.template) for clause in rule.clauses if clause.broken(wire)}
        broken |= {(rule_id, "check") for _ in (rule.check(spec) if rule.check else ())}
    wanted = {(rule.id, clause.message.template) for rule in RULES for clause in rule.clauses}
    wanted |= {(rule.id, "check") for rule in RULES if rule.check}
    assert sorted(wanted - broken) == []


@pytest.mark.parametrize(("rule", "changes"), [(rule, changes) for rule, changes, _, _ in SAID])
def test_a_message_is_a_sentence_with_a_value_or_a_name_in_it(bent: Bend, rule: str, changes: dict[str, Any]) -> None:
    (finding, *_) = [finding for finding in judge("copy", bent(**changes)).findings if finding.rule == rule]
    assert "{" not in finding.message
    assert not finding.message.endswith(".")
    assert len(finding.message) < 400
