"""Saves of a run: one at a time, a checkpoint only when published, and every way to fail ends the attempt with its code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.exitcodes import ExitCode
from rljob_workload.core.checkpoint import Checkpoint, Owner, RunDirectory
from rljob_workload.core.weight_digest import Staged, WeightDigest
from rljob_workload.runtime import saves as saves_module
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.saves import Saves

from .test_beginnings import attempt_in

STATE: dict[str, Any] = {"collector": {"source": {"fingerprint": {"rows": 5}}}}


class Ranks:
    """Two ranks that write one file each; `during` happens while they write."""

    def __init__(self) -> None:
        self.actors = SimpleNamespace(
            ranks=[SimpleNamespace(written=0, finish_save=0), SimpleNamespace(written=1, finish_save=1)]
        )
        self.digest = WeightDigest(1, 2, 3)
        self.during: Callable[[], None] = lambda: None
        self.tmp = Path()

    def ranks(self, method: str, seconds: float, code: ExitCode, directory: str) -> list[Staged]:
        self.tmp = Path(directory)
        return [Staged(self.digest, 4), Staged(self.digest, 4)]

    def background(self, calls: Any, work: list[Any], seconds: float, what: str) -> list[bytes]:
        self.during()
        self.during = lambda: None
        for number in range(len(work)):
            (self.tmp / f"shard-{number}").write_bytes(b"w")
        return [b"report"] * len(work)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks()
    monkeypatch.setattr(saves_module, "_in_background", made.background)
    return made


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    token = RunDirectory(tmp_path).take_token(Owner(namespace="default", name="copy", uid="u", attempt=2), None).token
    return Saves(attempt_in(tmp_path, checkpoint__keepLast=2), token, RunDirectory(tmp_path))


def published(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step-"))


def test_the_engines_go_on_before_there_is_a_checkpoint(saves: Saves, ranks: Ranks, tmp_path: Path) -> None:
    written, told = threading.Event(), list[Checkpoint]()
    ranks.during = lambda: written.wait(30) and None
    saves.begin(ranks, 10, STATE, told.append)  # type: ignore[arg-type]
    assert published(tmp_path) == []
    assert told == []
    written.set()
    saves.wait()
    assert [checkpoint.name for checkpoint in told] == published(tmp_path) == ["step-000010-t000001"]
    manifest = told[0].manifest
    assert manifest is not None
    assert manifest.weight_digest == str(ranks.digest + ranks.digest)
    assert manifest.fingerprint == {"rows": 5}
    assert manifest.facts["spec.algorithm.grpo.promptsPerStep"] == 16


def test_the_next_save_waits_for_the_one_that_is_being_written_and_descends_from_it(saves: Saves, ranks: Ranks) -> None:
    told: list[Checkpoint] = []
    for step in (10, 20, 30):
        saves.begin(ranks, step, STATE, told.append)  # type: ignore[arg-type]
        assert len(told) >= step // 10 - 1
    saves.wait()
    assert [checkpoint.manifest.parent for checkpoint in told if checkpoint.manifest] == [
        None,
        "step-000010-t000001",
        "step-000020-t000001",
    ]


def test_a_write_that_fails_ends_the_attempt_at_its_next_step(saves: Saves, ranks: Ranks, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "shard")

    ranks.during = fail
    saves.begin(ranks, 10, STATE, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="cannot write shard: No space left on device") as caught:
        saves.wait()
    assert caught.value.code is ExitCode.SAVE_FAILED
    assert published(tmp_path) == []


def unfinished(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".tmp-")]


def test_a_write_that_fails_gives_back_the_room_that_it_took(saves: Saves, ranks: Ranks, tmp_path: Path) -> None:
    """A rank's half-written file on a full volume would leave the next attempt no room to take its token."""

    def fail() -> None:
        (ranks.tmp / "shard-0").write_bytes(b"half")
        raise RunError(ExitCode.SAVE_FAILED, "cannot write the weights: No space left on device")

    ranks.during = fail
    saves.begin(ranks, 10, STATE, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="No space left"):
        saves.wait()
    assert unfinished(tmp_path) == []


def test_an_overtaken_attempt_leaves_even_what_it_has_not_finished(saves: Saves, ranks: Ranks, tmp_path: Path) -> None:
    newer = Owner(namespace="default", name="copy", uid="u", attempt=3)
    ranks.during = lambda: RunDirectory(tmp_path).take_token(newer, None) and None
    saves.begin(ranks, 10, STATE, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="token 1 is overtaken"):
        saves.wait()
    assert unfinished(tmp_path) == [".tmp-step-000010-t000001"]


def test_an_overtaken_attempt_publishes_nothing_and_is_fenced(saves: Saves, ranks: Ranks, tmp_path: Path) -> None:
    newer = Owner(namespace="default", name="copy", uid="u", attempt=3)
    ranks.during = lambda: RunDirectory(tmp_path).take_token(newer, None) and None
    saves.begin(ranks, 10, STATE, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="token 1 is overtaken") as caught:
        saves.wait()
    assert caught.value.code is ExitCode.FENCED
    with pytest.raises(RunError, match="token 1 is overtaken"):
        saves.begin(ranks, 20, STATE, lambda _: None)  # type: ignore[arg-type]
    assert published(tmp_path) == []


def test_weights_that_stood_still_are_not_saved(saves: Saves, ranks: Ranks, tmp_path: Path) -> None:
    saves.begin(ranks, 10, STATE, lambda _: None)  # type: ignore[arg-type]
    saves.stepped(0.7)
    with pytest.raises(RunError, match="the weights of step 20 are those of step 10, bit for bit") as caught:
        saves.begin(ranks, 20, STATE, lambda _: None)  # type: ignore[arg-type]
    assert caught.value.code is ExitCode.SAVE_FAILED
    assert published(tmp_path) == ["step-000010-t000001"]
    assert unfinished(tmp_path) == []


def test_a_failure_at_the_end_of_a_failed_attempt_is_only_logged(
    saves: Saves, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error", "shard")

    ranks.during = fail
    saves.begin(ranks, 10, STATE, lambda _: None)  # type: ignore[arg-type]
    saves.settle()
    assert "the checkpoint of step 10 was not published" in caplog.text
