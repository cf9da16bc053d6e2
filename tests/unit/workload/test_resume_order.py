"""Where an attempt goes on: exactly what its preflight said, and one code for every reason not to begin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rljob_api.exitcodes import ExitCode
from rljob_api.preflight import Chosen, PreflightReport
from rljob_workload.core.checkpoint import Origin, Owner, RunDirectory
from rljob_workload.core.ledger import Ledger
from rljob_workload.core.ledger_file import ledger_to_json
from rljob_workload.core.store.facts import facts_of
from rljob_workload.core.weight_digest import WEIGHTS, WeightDigest
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.resume import beginning, check_loaded, shard_digests

from .test_beginnings import attempt_in

DIGEST = WeightDigest(3, 4, 5)


def written(root: Path, *steps: int, uid: str = "u", attempt: int = 1, name: str = "copy", **changes: Any) -> None:
    """A run of this attempt with these checkpoints."""
    run = RunDirectory(root)
    run.create()
    owner = Owner(namespace="default", name=name, uid=uid, attempt=attempt)
    newest = run.choose().name
    token = run.take_token(owner, newest).token
    for step in steps:
        tmp = run.begin(step, token)
        (tmp / WEIGHTS).mkdir()
        (tmp / WEIGHTS / "shard").write_bytes(b"w" * 100)
        state = {"collector": {"ledger": ledger_to_json(Ledger()), "source": {}, "buffer": []}}
        facts = facts_of(attempt_in(root, **changes).spec)
        run.publish(tmp, step, token, state, Origin(writer=owner, facts=facts, weight_digest=str(DIGEST)))


def ends(attempt: Any) -> tuple[ExitCode, str]:
    with pytest.raises(RunError) as caught:
        beginning(attempt)
    return caught.value.code, str(caught.value)


def test_without_an_order_the_newest_checkpoint_is_taken_with_a_token_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, 10, 20)
    begin = beginning(attempt_in(tmp_path))
    assert begin.checkpoint is not None
    assert (begin.token, begin.checkpoint.name) == (2, "step-000020-t000001")
    assert beginning(attempt_in(tmp_path)).token == 2, "the same attempt is given the same token again"


def test_an_order_is_obeyed_though_a_newer_checkpoint_is_there(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "default" / "copy"
    written(root, 10, 20)
    chosen = Chosen(path="runs/default/copy/step-000010-t000001", step=10, token=1, verified="Sizes")
    order = PreflightReport(outcome="Resume", token=1, checkpoint=chosen)
    begin = beginning(dataclasses.replace(attempt_in(root), volume=tmp_path, preflight=order))
    assert begin.checkpoint is not None
    assert (begin.token, begin.checkpoint.step) == (1, 10)


def test_an_attempt_whose_order_is_older_than_the_newest_token_never_begins(tmp_path: Path) -> None:
    written(tmp_path, 10)
    written(tmp_path, attempt=2)
    attempt = dataclasses.replace(attempt_in(tmp_path), preflight=PreflightReport(outcome="Fresh", token=1))
    code, message = ends(attempt)
    assert code is ExitCode.FENCED
    assert "token 1 is overtaken: attempt 2 of default/copy" in message


def test_an_ordered_checkpoint_that_is_damaged_by_now_is_named_with_its_file(tmp_path: Path) -> None:
    written(tmp_path, 10, 20)
    (tmp_path / "step-000020-t000001" / WEIGHTS / "shard").write_bytes(b"w")
    chosen = Chosen(path="step-000020-t000001", step=20, token=1, verified="Sizes")
    attempt = dataclasses.replace(attempt_in(tmp_path), preflight=PreflightReport(outcome="Resume", token=1, checkpoint=chosen))
    code, message = ends(attempt)
    assert code is ExitCode.CHECKPOINT_UNLOADABLE
    assert "step-000020-t000001: weights/shard has 1 bytes, the manifest says 100" in message


@pytest.mark.parametrize(
    ("there", "spec", "code", "message"),
    [
        ({}, {"model__shape__layers": 3}, ExitCode.REFUSED, "spec.model.shape.layers: checkpoint has 2, spec says 3"),
        ({}, {"data__seed": 7}, ExitCode.REFUSED, "spec.data.seed: checkpoint has 0, spec says 7"),
        ({"uid": "other"}, {"checkpoint__onExisting": "Refuse"}, ExitCode.REFUSED, "spec.checkpoint.onExisting is Refuse"),
        ({"name": "theirs"}, {}, ExitCode.REFUSED, "belongs to the job default/theirs, not to default/copy"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    tmp_path: Path, there: dict[str, Any], spec: dict[str, Any], code: ExitCode, message: str
) -> None:
    written(tmp_path, 10, **there)
    found, said = ends(attempt_in(tmp_path, **spec))
    assert found is code
    assert message in said


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__grpo__promptsPerStep": 32},
        {"algorithm__grpo__generationsPerPrompt": 4, "algorithm__grpo__microBatchSize": 64},
        {"algorithm__grpo__learningRate": "0.01"},
        {"checkpoint__loadReplayBuffer": False},
        {"data__seed": 7, "data__onChange": "Restart"},
    ],
)
def test_what_can_be_gone_on_from_is(tmp_path: Path, changes: dict[str, Any]) -> None:
    written(tmp_path, 10)
    begin = beginning(attempt_in(tmp_path, **changes))
    assert begin.checkpoint is not None
    assert begin.checkpoint.step == 10
    assert ("buffer" in begin.checkpoint.state["collector"]) is changes.get("checkpoint__loadReplayBuffer", True)


def test_another_runs_checkpoint_is_found_beside_the_directory(tmp_path: Path) -> None:
    """Under `rljob local` the parent of DIR stands for the claim of checkpoint.from."""
    written(tmp_path / "theirs", 10, 20, name="theirs")
    begin = beginning(attempt_in(tmp_path / "mine", checkpoint__from={"claimName": "any", "path": "theirs"}))
    assert begin.checkpoint is not None
    assert (begin.token, begin.checkpoint.path) == (1, tmp_path / "theirs" / "step-000020-t000001")


def test_the_loaded_weights_must_be_the_saved_ones_whatever_rank_has_which(tmp_path: Path) -> None:
    written(tmp_path, 10)
    checkpoint = beginning(attempt_in(tmp_path)).checkpoint
    assert checkpoint is not None
    check_loaded(checkpoint, [WeightDigest(1, 4, 2), WeightDigest(2, 0, 3)])
    with pytest.raises(ValueError, match=r"the loaded weights have the digest .*, the manifest says "):
        check_loaded(checkpoint, [WeightDigest(3, 4, 2)])
    check_loaded(checkpoint, [WeightDigest(4, 4, 2)])  # another padding of the vocabulary: nothing can be said
    assert list(shard_digests(checkpoint)) == ["weights/shard"]
