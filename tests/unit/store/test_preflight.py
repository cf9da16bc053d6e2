"""What an attempt begins with, and what is refused before a pod that costs something exists."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_api import names
from rljob_api.preflight import MAX_BYTES, Chosen, PassedOver, PreflightReport
from rljob_workload.core.checkpoint import MANIFEST, Owner, RunDirectory
from rljob_workload.preflight import Order, checkpoint_path, preflight
from rljob_workload.preflight.__main__ import main
from rljob_workload.preflight.report import encode, fitted
from tests.unit.workload import hf_models

from .builders import COLLECTOR, LEDGER, owner, raw_spec, save, spec_with

RUN = "runs/default/copy"


def order_for(volume: Path, attempt: int = 1, *, uid: str = "u1", name: str = "copy", **changes: Any) -> Order:
    unloadable = changes.pop("unloadable", frozenset())
    source = changes.pop("source_volume", None)
    return Order(
        spec=spec_with(**changes),
        name=name,
        namespace="default",
        uid=uid,
        attempt=attempt,
        directory=volume / RUN,
        volume=volume,
        source_volume=source,
        unloadable=unloadable,
    )


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Steps 10 and 20 of attempt 1, which holds token 1."""
    first = preflight(order_for(tmp_path))
    assert (first.outcome, first.token) == ("Fresh", 1)
    run = RunDirectory(tmp_path / RUN)
    for step in (10, 20):
        save(run, step)
    return tmp_path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_next_attempt_goes_on_from_the_newest_checkpoint(volume: Path) -> None:
    order = order_for(volume, 2)
    report = preflight(order)
    assert report.outcome == "Resume"
    assert report.token == 2
    assert report.checkpoint == Chosen(
        path=f"{RUN}/step-000020-t000001", step=20, token=1, verified="Sizes", handed_out=12, at_risk=3
    )
    assert checkpoint_path(report.checkpoint, order) == volume / RUN / "step-000020-t000001"
    assert preflight(order) == report  # the same attempt, the same token


def test_an_attempt_that_has_saved_since_gets_another_token_when_it_asks_again(volume: Path) -> None:
    assert preflight(order_for(volume, 2)).token == 2
    save(RunDirectory(volume / RUN), 30, token=2)
    report = preflight(order_for(volume, 2))
    assert (report.token, report.checkpoint and report.checkpoint.step) == (3, 30)


def test_an_overtaken_attempt_gets_no_token(volume: Path) -> None:
    assert preflight(order_for(volume, 3)).token == 2
    report = preflight(order_for(volume, 2))
    assert (report.outcome, report.token) == ("Unusable", 0)
    assert "attempt 3 of default/copy (uid u1) holds token 2" in report.message


def test_a_checkpoint_that_an_overtaken_writer_publishes_late_is_not_read(volume: Path) -> None:
    assert preflight(order_for(volume, 2)).token == 2
    late = RunDirectory(volume / RUN)
    # What a writer does that was stopped between its last look at the fence and its rename.
    shutil.copytree(late.root / "step-000020-t000001", late.root / "step-000030-t000001")
    report = preflight(order_for(volume, 3))
    assert (report.token, report.checkpoint and report.checkpoint.step) == (3, 20)
    assert [(one.name, one.why) for one in report.passed_over] == [
        (
            "step-000030-t000001",
            "not on the lineage of token 2: its writer was overtaken, the run went on from step-000020-t000001",
        )
    ]


def test_damage_is_named_and_the_one_before_is_taken(volume: Path) -> None:
    flip(volume / RUN / "step-000020-t000001" / "random.json")
    report = preflight(order_for(volume, 2))
    assert report.checkpoint is not None
    assert report.checkpoint.step == 10
    assert "random.json has SHA-256" in report.passed_over[0].why


def test_what_could_not_be_loaded_is_read_wholly_and_passed_over(volume: Path) -> None:
    name = "step-000020-t000001"
    report = preflight(order_for(volume, 2, unloadable=frozenset({name})))
    assert (report.checkpoint and report.checkpoint.step, report.passed_over[0].name) == (10, name)
    assert "could not load it, though every byte is as it was written" in report.passed_over[0].why
    both = frozenset({name, "step-000010-t000001"})
    assert preflight(order_for(volume, 3, unloadable=both)).outcome == "Corrupt"


def test_no_valid_checkpoint_never_starts_over(volume: Path) -> None:
    for path in (volume / RUN).glob("step-*"):
        (path / MANIFEST).unlink()
    report = preflight(order_for(volume, 2))
    assert (report.outcome, report.token, len(report.passed_over)) == ("Corrupt", 0, 2)
    assert "none of the 2 checkpoints" in report.message
    assert "move them away to start from scratch" in report.message
    for path in (volume / RUN).glob("step-*"):
        path.rename(volume / path.name)
    assert preflight(order_for(volume, 2)).outcome == "Fresh"


@pytest.mark.parametrize(("policy", "outcome"), [("Resume", "Resume"), ("Refuse", "OnExisting")])
def test_a_new_job_of_the_same_name_does_what_on_existing_says(volume: Path, policy: str, outcome: str) -> None:
    report = preflight(order_for(volume, uid="u2", checkpoint__onExisting=policy))
    assert report.outcome == outcome
    if policy == "Refuse":
        assert "uid u1" in report.message
        assert "step-000020-t000001" in report.message
        own = preflight(order_for(volume, 2, checkpoint__onExisting=policy))
        assert own.outcome == "Resume"  # a restart of the job that was there first


def test_another_job_s_directory_is_left_alone(volume: Path) -> None:
    report = preflight(order_for(volume, name="other"))
    assert (report.outcome, report.token) == ("Foreign", 0)
    assert "belongs to the job default/copy, not to default/other" in report.message


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model__shape__layers": 4}, "spec.model.shape.layers: checkpoint has 2, spec says 4; set it back"),
        ({"model__dtype": "bfloat16"}, "spec.model.dtype: checkpoint has float32, spec says bfloat16; set it back"),
        ({"data__seed": 5}, "spec.data.seed: checkpoint has 0, spec says 5; set it back, or spec.data.onChange to Restart"),
        ({"data__builtin": "copyv"}, "spec.data: checkpoint has builtin copy3, spec says builtin copyv"),
        ({"algorithm__grpo__steps": 15}, "steps: checkpoint is at step 20, spec says 15; set it to 20 or more"),
    ],
)
def test_what_does_not_fit_is_named_and_takes_no_token(volume: Path, changes: dict[str, Any], line: str) -> None:
    report = preflight(order_for(volume, 2, **changes))
    assert (report.outcome, report.token) == ("Incompatible", 0)
    assert line in report.differs[0]
    assert report.message == "step-000020-t000001 does not fit the spec"  # the lines say in what, once
    assert report.checkpoint is not None
    assert (report.checkpoint.step, report.checkpoint.path) == (20, f"{RUN}/step-000020-t000001")
    assert RunDirectory(volume / RUN).fence().lineage.token == 1


@pytest.mark.parametrize(
    ("changes", "reshard"),
    [
        ({"algorithm__grpo__promptsPerStep": 8, "algorithm__grpo__learningRate": "0.1"}, False),
        ({"data__seed": 5, "data__onChange": "Restart"}, False),
        ({"trainer__nodes": 2}, True),
        ({"trainer__nodes": 2, "parallelism__tensor": 2}, True),
    ],
)
def test_what_fits_is_gone_on_from(volume: Path, changes: dict[str, Any], reshard: bool) -> None:
    report = preflight(order_for(volume, 2, **changes))
    assert report.checkpoint is not None
    assert report.checkpoint.reshard == reshard


def test_the_model_s_own_config_and_weights_are_asked_where_they_are_mounted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    hf_models.make("qwen2", model)
    sizes = {"layers": 3, "hiddenSize": 64, "attentionHeads": 4, "queryGroups": 2, "ffnHiddenSize": 96, "vocabSize": 65}
    changes = {"model__preset": None, "model__huggingFace": {"path": str(model)}, "model__shape": sizes}
    report = preflight(order_for(tmp_path, **changes))
    assert report.outcome == "Incompatible"
    assert report.differs == ["spec.model.shape.layers: 3 differs from 2 in the model's config.json"]
    changes["model__shape"] = sizes | {"layers": 2}
    assert preflight(order_for(tmp_path, **changes)).outcome == "Fresh"
    (model / "model.safetensors").unlink()
    report = preflight(order_for(tmp_path, **changes))
    assert (report.outcome, report.token) == ("Incompatible", 0)
    assert report.message.startswith("spec.model.huggingFace.path: ")
    assert report.message.endswith("/model has no *.safetensors")
    (model / "config.json").write_text("[]")
    assert "config.json: not a JSON object" in preflight(order_for(tmp_path, **changes)).message
    assert preflight(order_for(tmp_path, **changes | {"model__huggingFace": {"path": "/elsewhere"}})).outcome == "Fresh"


# ---- another job's checkpoint ------------------------------------------------------------------


@pytest.mark.parametrize("path", [f"{RUN}/step-000010-t000001", RUN])
def test_a_run_begins_with_another_job_s_checkpoint_until_it_has_its_own(volume: Path, tmp_path: Path, path: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    origin = {"claimName": "theirs", "path": path}
    order = order_for(own, checkpoint__from=origin, source_volume=volume)
    report = preflight(order)
    step = 10 if path.endswith("t000001") else 20
    assert report.checkpoint is not None
    assert (report.token, report.checkpoint.step, report.checkpoint.path) == (1, step, f"{RUN}/step-0000{step}-t000001")
    assert checkpoint_path(report.checkpoint, order) == volume / RUN / f"step-0000{step}-t000001"
    save(RunDirectory(own / RUN), 30, token=1)
    later = order_for(own, 2, checkpoint__from=origin, source_volume=volume)
    report = preflight(later)
    assert report.checkpoint is not None
    assert checkpoint_path(report.checkpoint, later) == own / RUN / "step-000030-t000001"


@pytest.mark.parametrize(
    ("path", "outcome", "words"),
    [
        ("runs/default/copy/step-000099-t000001", "Unusable", "No such file or directory"),
        ("runs/default/copy/fence.json", "Unusable", "is not a directory; name a checkpoint or a run's directory"),
        ("runs/../../etc", "Unusable", "not a path below"),
        ("outside/step-000010-t000001", "Unusable", "leads out of the volume"),
        ("runs", "Corrupt", "no checkpoint is in it"),
        ("runs/default/copy/step-000020-t000001", "Corrupt", "random.json is missing"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(volume: Path, tmp_path: Path, path: str, outcome: str, words: str) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    for made in (own, elsewhere / "step-000010-t000001"):
        made.mkdir(parents=True)
    theirs = volume / "theirs"
    shutil.copytree(volume / "runs", theirs / "runs")
    (theirs / "outside").symlink_to(elsewhere)
    (theirs / RUN / "step-000020-t000001" / "random.json").unlink()
    report = preflight(order_for(own, checkpoint__from={"claimName": "theirs", "path": path}, source_volume=theirs))
    assert report.outcome == outcome
    assert words in report.message
    assert f"spec.checkpoint.from.path {path}" in report.message


def test_a_source_claim_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    report = preflight(order_for(tmp_path, checkpoint__from={"claimName": "theirs", "path": "x"}))
    assert "'theirs' of spec.checkpoint.from is not mounted" in report.message


# ---- old and broken ----------------------------------------------------------------------------


def test_a_checkpoint_without_a_ledger_says_what_may_have_been_lost(volume: Path) -> None:
    save(RunDirectory(volume / RUN), 30, collector=None)
    chosen = preflight(order_for(volume, 2)).checkpoint
    assert chosen is not None
    assert (chosen.step, chosen.ledger, chosen.handed_out, chosen.at_risk) == (30, False, 0, 2 * 16)


def test_a_checkpoint_whose_books_are_broken_is_passed_over(volume: Path) -> None:
    save(RunDirectory(volume / RUN), 30, collector=COLLECTOR | {"ledger": LEDGER | {"trained": 9}})
    report = preflight(order_for(volume, 2))
    assert (report.checkpoint and report.checkpoint.step, report.passed_over[0].name) == (20, "step-000030-t000001")
    assert "field 'window'" in report.passed_over[0].why


def test_a_directory_from_before_there_were_tokens_is_gone_on_from(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / RUN)
    for step, token in ((10, 1), (30, 1), (20, 2)):
        path = run.root / f"step-{step:06d}-t{token:06d}"
        path.mkdir(parents=True)
        state = {"collector": COLLECTOR, "name": "copy", "namespace": "default", "uid": "u1", "attempt": token}
        manifest = {"version": 1, "step": step, "token": token, "files": {"shard": 3}, "state": state}
        (path / "shard").write_bytes(b"xyz")
        (path / MANIFEST).write_text(json.dumps(manifest))
    report = preflight(order_for(tmp_path, 3, checkpoint__verify="Full"))
    assert report.checkpoint is not None
    assert (report.token, report.checkpoint.step, report.checkpoint.token, report.checkpoint.verified) == (3, 20, 2, "Sizes")
    assert report.checkpoint.handed_out == 12
    assert preflight(order_for(tmp_path, name="other")).outcome == "Foreign"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "fence.json").write_text('{"ver'), "fence.json is malformed"),
        (lambda run: (run / "fence.json").write_text('{"version": 2, "entries": []}'), "fence.json: field 'version': 2"),
        (lambda run: ((run / "fence.json").unlink(), (run / "fence.json").mkdir()), "fence.json: a directory, expected a file"),
        (
            lambda run: (run / "fence" / "t000001" / "entry.json").write_text("{}"),
            "t000001/entry.json is malformed: field 'token'",
        ),
        (lambda run: (shutil.rmtree(run), run.write_text("")), "cannot create the run directory"),
    ],
)
def test_a_volume_that_cannot_be_used_is_unusable(volume: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(volume / RUN)
    report = preflight(order_for(volume, 2))
    assert (report.outcome, report.token) == ("Unusable", 0)
    assert words in report.message


# ---- the report and the program ----------------------------------------------------------------


@pytest.mark.parametrize("letter", ["x", "ü", '"', "\n"])
@pytest.mark.parametrize("count", [0, 1, 8, 300])
def test_a_report_fits_a_termination_message_and_keeps_its_beginnings(letter: str, count: int) -> None:
    report = fitted(
        PreflightReport(outcome="Incompatible"),
        message="message " + letter * 5000,
        passed_over=[PassedOver(name=f"step-{n:06d}-t000001", why="why " + letter * 508) for n in range(count)],
        differs=[f"spec.path{n}: " + letter * 900 for n in range(count)],
    )
    text = encode(report)
    assert len(text.encode()) <= MAX_BYTES
    again = PreflightReport.model_validate_json(text)
    assert again == report
    assert report.message.startswith("message ")
    assert len(report.differs) == min(count, 16)
    assert bool(report.passed_over) == bool(count)
    assert all(one.why.startswith("why ") for one in report.passed_over)


def test_a_path_that_no_report_can_hold_is_an_error_of_its_own() -> None:
    chosen = Chosen(path="€" * 1024 + "x" * 0, step=1, token=1, verified="Sizes")
    report = fitted(PreflightReport(outcome="Resume", token=1, checkpoint=chosen, message="m" * 1000), message="m" * 1000)
    assert len(encode(report).encode()) <= MAX_BYTES


def environment(volume: Path, **more: str) -> dict[str, str]:
    return {
        names.ENV_SPEC: json.dumps(raw_spec()),
        names.ENV_NAME: "copy",
        names.ENV_NAMESPACE: "default",
        names.ENV_UID: "u1",
        names.ENV_ATTEMPT: "2",
        names.ENV_VOLUME: str(volume),
        names.ENV_TERMINATION_LOG: str(volume / "log"),
        **more,
    }


def test_the_program_writes_its_report_without_the_trainer_s_packages(volume: Path) -> None:
    code = (
        "import sys, runpy\n"
        "for name in ('ray', 'torch', 'numpy', 'megatron', 'yaml'): sys.modules[name] = None\n"
        "runpy.run_module('rljob_workload.preflight', run_name='__main__')"
    )
    variables = os.environ | environment(volume, RLJOB_UNLOADABLE=f"{RUN}/step-000020-t000001")
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, capture_output=True, timeout=60)
    report = PreflightReport.model_validate_json((volume / "log").read_text())
    assert (report.outcome, report.token, report.checkpoint and report.checkpoint.step) == ("Resume", 2, 10)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (names.ENV_UID, "", "RLJOB_UID is not set"),
        (names.ENV_ATTEMPT, "0", "RLJOB_ATTEMPT='0' is not a number from 1"),
        (names.ENV_SPEC, "{", "RLJOB_SPEC is not JSON"),
        (names.ENV_SPEC, "{}", "the spec is refused"),
        (names.ENV_VOLUME, "/nowhere", "RLJOB_VOLUME=/nowhere is no directory"),
        (names.ENV_SOURCE, "/nowhere", "RLJOB_SOURCE=/nowhere is no directory"),
    ],
)
def test_a_pod_that_was_made_wrongly_is_reported_too(tmp_path: Path, variable: str, value: str, words: str) -> None:
    variables = environment(tmp_path) | {variable: value}
    assert main(variables) == 0
    report = PreflightReport.model_validate_json((tmp_path / "log").read_text())
    assert report.outcome == "Unusable"
    assert words in report.message


def test_a_report_that_cannot_be_written_is_an_exit_code(tmp_path: Path) -> None:
    assert main(environment(tmp_path, **{names.ENV_TERMINATION_LOG: str(tmp_path / "no" / "log")})) == 66


def test_an_owner_is_named_in_full() -> None:
    assert str(owner(3)) == "attempt 3 of default/copy (uid u1)"
    assert Owner() == Owner.model_validate_json("{}")
