"""`rljob validate`: places, several documents, standard input, explanations, models; and what it does without."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_api.rules import RULES
from rljob_api.validation_page import EXTRA_RULES
from rljob_cli.main import main

from .models import CONFIGS, Config

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/copy.yaml"

GOOD = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: good}
spec:
  trainer: {image: x}
  model: {preset: tiny}
  generation: {maxNewTokens: 4, maxSequenceLength: 16}
  data: {builtin: copy3}
  environment: {builtin: exactMatch}
  algorithm: {grpo: {promptsPerStep: 8, generationsPerPrompt: 8, microBatchSize: 64, steps: 500}}
  checkpoint: {volume: {claimName: c}}
"""
BAD = GOOD.replace("name: good", "name: bad").replace("  data:", "  parallelism:\n    pipeline: 1\n    tensor: 3\n  data:")
CLAIM = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: c}\n"


def check(tmp_path: Path, text: str, *options: str) -> int:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    return main(["validate", str(file), *options])


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return list(json.loads(capsys.readouterr().out))


def test_each_finding_has_its_line_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, BAD, "-o", "json") == 1
    found = {row["rule"]: row for row in rows(capsys)}
    assert (found["world-size"]["line"], found["world-size"]["column"]) == (8, 3)
    heads = found["model-shape"]
    assert (heads["path"], heads["line"], heads["column"]) == ("spec.parallelism.tensor", 10, 5)


def test_a_finding_on_what_is_not_written_points_at_the_block_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, GOOD.replace("image: x", ""), "-o", "json") == 1
    (row,) = rows(capsys)
    assert (row["path"], row["line"], row["column"]) == ("spec.trainer.image", 5, 3)


def test_the_text_form_is_what_editors_can_jump_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, BAD) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path}/job.yaml:8:3: error: spec.parallelism: world size 1")
    assert lines[0].endswith("[world-size]")
    assert "invalid" in lines[-1]


def test_every_job_of_a_file_is_judged_and_other_kinds_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, f"{CLAIM}---\n{GOOD}---\n---\n{BAD}") == 1
    out = capsys.readouterr().out
    assert "job.yaml: good: valid" in out
    assert "job.yaml: bad: invalid" in out
    assert ":27:5: error: spec.parallelism.tensor" in out


def test_standard_input_is_read_for_a_dash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GOOD.encode())))
    assert main(["validate", "-"]) == 0
    assert capsys.readouterr().out == "-: valid\n"


def test_json_is_read_as_well(tmp_path: Path) -> None:
    assert check(tmp_path, '{"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "a"}, "spec": {}}') == 1


def test_a_key_given_twice_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, GOOD + "  model: {preset: tiny}\n", "-o", "json") == 1
    (row,) = rows(capsys)
    assert (row["rule"], row["path"], row["line"]) == ("schema", "spec.model", 12)
    assert "given twice" in row["message"]


def test_a_worse_file_decides_the_exit_status_and_the_others_are_still_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    assert main(["validate", str(tmp_path / "none.yaml"), str(tmp_path / "good.yaml")]) == 2
    shown = capsys.readouterr()
    assert "good.yaml: valid" in shown.out
    assert "No such file" in shown.err


def test_a_file_without_jobs_beside_others_is_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"claim": CLAIM, "good": GOOD, "notes": "# nothing yet\n"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    files = [str(tmp_path / f"{name}.yaml") for name in ("claim", "good", "notes")]
    assert main(["validate", *files]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{files[1]}: valid\n"
    skipped = "skipped, it holds no RLJob"
    assert shown.err == f"rljob: {files[0]}: {skipped}\nrljob: {files[2]}: {skipped}\n"


def test_files_without_any_job_are_an_error_that_names_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "claim.yaml").write_text(CLAIM)
    (tmp_path / "empty.yaml").write_text("")
    assert main(["validate", str(tmp_path / "claim.yaml"), str(tmp_path / "empty.yaml"), "-o", "json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out) == []
    assert [line.split(": ", 2)[2] for line in shown.err.splitlines()] == ["no object of kind RLJob in it"] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("kind: RLJob", "kind: RLJobs"), ":2: kind is 'RLJobs'; this version reads RLJob"),
        (GOOD.replace("kind: RLJob", "kind: rljob").replace("rljob.dev", "rl.dev"), ":2: kind is 'rljob'; this version reads"),
        (GOOD.replace("kind: RLJob", "knd: RLJob"), ":1: kind is missing"),
        (GOOD.replace("kind: RLJob", "kind: [RLJob]"), ":2: kind is ['RLJob'], not a name"),
        ("apiVersion: v1\nkind: List\nitems: []\n", ":2: kind is 'List'; write its items as documents"),
        ("- kind: RLJob\n", ":1: not an object: [{'kind': 'RLJob'}]"),
    ],
)
def test_what_was_meant_to_be_a_job_is_not_passed_over_as_another_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    assert check(tmp_path, text) == 2
    assert f"job.yaml{words}" in capsys.readouterr().err
    assert check(tmp_path, f"{text}---\n{GOOD}") == 2
    assert main(["validate", str(tmp_path / "good.yaml"), str(tmp_path / "job.yaml")]) == 2


def test_what_only_this_version_cannot_do_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, GOOD + "  queueName: team\n") == 1
    assert "accepted by every rule, but this version does not honour 1 of its fields yet" in capsys.readouterr().out


def test_a_generated_name_is_judged_by_its_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, GOOD.replace("name: good", "generateName: good-")) == 0
    assert check(tmp_path, GOOD.replace("name: good", f"generateName: {'g' * 36}")) == 1


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, GOOD.replace("preset: tiny", '"\\e[31m\\u202e": 1')) == 1
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize("rule", [rule.id for rule in (*RULES, *EXTRA_RULES)])
def test_every_rule_explains_itself(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--explain", rule]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{rule}\n\n")
    assert "Reads spec." in shown or "Reads metadata.name" in shown


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("FailureRulesInvalid", ["failure-rules\n", "failure-rules-idle\n"]),
        ("VolumeChanged", ["Validated=False, reason VolumeChanged: The checkpoint volume was edited"]),
        ("Incompatible", ["CheckpointAvailable=False, reason Incompatible: The checkpoint does not fit"]),
    ],
)
def test_a_condition_s_reason_is_explained_too(reason: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--explain", reason]) == 0
    shown = capsys.readouterr().out
    assert [one for one in words if one not in shown] == []


def test_an_unknown_rule_is_answered_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--explain", "no-such"]) == 2
    assert "world-size" in capsys.readouterr().err


def test_no_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate"]) == 2
    assert "--explain NAME" in capsys.readouterr().err


def test_it_needs_none_of_the_heavy_libraries() -> None:
    """It answers in a fraction of the second that each of them takes to be imported."""
    program = (
        "import sys; from rljob_cli.main import main; status = main(sys.argv[1:]); "
        "sys.exit(9 if {'torch', 'ray', 'kubernetes', 'kopf', 'aiohttp'} & sys.modules.keys() else status)"
    )
    done = subprocess.run((sys.executable, "-c", program, "validate", str(EXAMPLE)), check=False, env=os.environ)
    assert done.returncode == 0


def model_directory(tmp_path: Path, config: Config) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_shape_of_a_models_config_is_accepted(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, shape = CONFIGS[family]
    gpus = "gpusPerNode: 8, " if "hybridPattern" in shape else ""
    text = GOOD.replace("preset: tiny", f"huggingFace: {{path: /m}}, shape: {json.dumps(shape)}")
    text = text.replace("image: x", f"{gpus}image: x").replace("microBatchSize: 64", "microBatchSize: 1")
    check(tmp_path, text, "-o", "json", "--model", model_directory(tmp_path, config))
    assert [row for row in rows(capsys) if row["rule"] != "not-supported-yet"] == []


@pytest.mark.parametrize("family", CONFIGS)
def test_a_shape_that_differs_from_the_models_is_refused_naming_both(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, shape = CONFIGS[family]
    text = GOOD.replace("preset: tiny", f"huggingFace: {{path: /m}}, shape: {json.dumps({**shape, 'vocabSize': 77})}")
    assert check(tmp_path, text, "-o", "json", "--model", model_directory(tmp_path, config)) == 1
    (row,) = [row for row in rows(capsys) if row["rule"] == "model-config"]
    assert row["path"] == "spec.model.shape.vocabSize"
    assert row["message"] == f"77 differs from {shape['vocabSize']} in the model's config.json"


def test_without_a_shape_the_layout_is_judged_by_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD.replace("preset: tiny", "huggingFace: {path: /m}").replace("image: x", "image: x, ranksPerNode: 5")
    text = text.replace("  data:", "  parallelism: {tensor: 5}\n  data:")
    assert check(tmp_path, text, "-o", "json", "--model", model_directory(tmp_path, CONFIGS["llama"][0])) == 1
    assert "model.shape.attentionHeads 32 are not divisible by tensor 5" in {row["message"] for row in rows(capsys)}


@pytest.mark.parametrize(
    ("family", "change", "layout", "words"),
    [
        ("nemotron_h", {"n_groups": 6}, {"tensor": 4}, "6 Mamba groups are not divisible by tensor 4"),
        ("nemotron_h", {"mamba_num_heads": 66}, {"tensor": 4}, "66 Mamba heads are not divisible by tensor 4"),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 3713}, {"tensor": 2}, "3713 is not divisible by tensor 2"),
        ("qwen3", {"head_dim": 1, "num_key_value_heads": 1}, {"tensor": 8}, "is not divisible by tensor 8"),
    ],
)
def test_what_only_the_config_knows_is_judged(
    family: str, change: Config, layout: dict[str, int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GOOD.replace("preset: tiny", "huggingFace: {path: /m}").replace("image: x", "image: x, gpusPerNode: 8")
    text = text.replace("  data:", f"  parallelism: {json.dumps(layout)}\n  data:")
    config = {**CONFIGS[family][0], **change}
    assert check(tmp_path, text, "-o", "json", "--model", model_directory(tmp_path, config)) == 1
    assert any(words in row["message"] for row in rows(capsys) if row["rule"] == "model-config")


def test_the_dual_mode_is_refused_for_models_with_biases_or_gated_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GOOD.replace("preset: tiny", "huggingFace: {path: /m}").replace(
        "maxNewTokens", "inferenceOptimized: true, maxNewTokens"
    )
    for family, words in (("qwen2", "biases of this qwen2"), ("qwen3_moe", "gated experts of this qwen3_moe")):
        assert check(tmp_path, text, "-o", "json", "--model", model_directory(tmp_path, CONFIGS[family][0])) == 1
        assert any(words in row["message"] for row in rows(capsys))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "model_type is None; known are llama"),
        ('{"model_type": "gpt2"}', "model_type is 'gpt2'"),
        ('{"model_type": ["llama"]}', "model_type is ['llama']"),
        ('{"model_type": "llama"}', "num_attention_heads is missing"),
        ('{"model_type": "llama", "num_attention_heads": "8"}', "num_attention_heads is '8'"),
        ('{"model_type": "nemotron_h"}', "hybrid_override_pattern is missing"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["validate", str(EXAMPLE), "--model", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_a_model_directory_without_a_config_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(EXAMPLE), "--model", "/no/such"]) == 2
    assert "/no/such/config.json: No such file" in capsys.readouterr().err
