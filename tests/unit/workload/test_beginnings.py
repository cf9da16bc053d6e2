"""What is refused before anything starts: settings, directories, checkpoints that cannot be gone on from."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rljob_api.exitcodes import ExitCode
from rljob_api.manifest import judge
from rljob_api.progress import ProgressReport
from rljob_cli.main import main
from rljob_workload.core.checkpoint import MANIFEST, Owner, RunDirectory
from rljob_workload.core.rollouts import RestoreReport
from rljob_workload.runtime import driver as driver_module
from rljob_workload.runtime import local, preflight
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.control import Access, Control
from rljob_workload.runtime.driver import Driver
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.progress import Progress
from rljob_workload.runtime.run import execute
from rljob_workload.runtime.settings import Attempt
from rljob_workload.runtime.stop import StopSignal

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "copy.yaml"


def spec_with(**changes: Any) -> Any:
    """The example's spec; `generation__temperature="0"` sets one field."""
    raw = yaml.safe_load(EXAMPLE.read_text())["spec"]
    for path, value in changes.items():
        node = raw
        *above, last = path.split("__")
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value
    spec = judge("copy", raw).spec
    assert spec is not None
    return spec


def attempt_in(directory: Path, **changes: Any) -> Attempt:
    return Attempt("copy", "default", "u", 2, spec_with(**changes), directory)


def run(attempt: Attempt, start_ray: Callable[[], dict[str, int]] = dict, port: int = 0) -> int:
    return execute(
        attempt,
        start_ray=start_ray,
        mirror=attempt.directory / "progress.json",
        host="127.0.0.1",
        port=port,
        spread=False,
        show_log=True,
        show_bar=False,
        linger_seconds=0.0,
        access=Access(None),
    )


def failed(directory: Path) -> tuple[int, str]:
    report = ProgressReport.model_validate_json((directory / "progress.json").read_text())
    assert report.failed is not None
    return report.failed.exit_code, report.failed.message


def save(root: Path, step: int) -> Path:
    directory = RunDirectory(root)
    tmp = directory.begin(step, 1)
    (tmp / "weights").mkdir()
    (tmp / "weights" / "shard").write_bytes(b"x" * 100)
    return directory.publish(tmp, step, 1, {}).path


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / MANIFEST).write_text('{"ver'),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / "weights" / "shard").write_bytes(b"x"),
    ],
)
def test_a_run_whose_checkpoints_are_all_damaged_never_starts_over(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [save(tmp_path, step) for step in (10, 20)]
    for path in paths:
        damage(path)
    assert run(attempt_in(tmp_path)) == ExitCode.CHECKPOINT_UNLOADABLE
    code, message = failed(tmp_path)
    assert code == ExitCode.CHECKPOINT_UNLOADABLE
    assert "none of the 2 checkpoints" in message
    assert all(path.name in message for path in paths)
    assert "move them away to start from scratch" in message
    assert "Traceback" not in capsys.readouterr().err
    assert all(path.is_dir() for path in paths)


def no_ray() -> dict[str, int]:
    raise AssertionError("Ray was started")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("runs/none", "spec.checkpoint.from.path runs/none: No such file or directory"),
        (".", "spec.checkpoint.from.path .: "),
        ("file", "is not a directory; name a checkpoint or a run's directory"),
        ("away", "it leads out of the volume"),
    ],
)
def test_another_runs_checkpoint_that_is_not_there_is_refused_before_ray_starts(tmp_path: Path, path: str, words: str) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").touch()
    (volume / "away").symlink_to(tmp_path)
    attempt = attempt_in(volume / "run", checkpoint__from={"claimName": "other", "path": path})
    assert run(attempt, no_ray) == ExitCode.ENVIRONMENT_MISSING
    assert words in failed(volume / "run")[1]


def test_each_local_command_is_a_new_job_to_on_existing_refuse(tmp_path: Path) -> None:
    def command(on_existing: str, ends: Callable[[], dict[str, int]]) -> tuple[int, str]:
        attempt = local._next_attempt(spec_with(checkpoint__onExisting=on_existing), "copy", "default", tmp_path)
        run(attempt, ends)
        return failed(tmp_path)

    def gone() -> dict[str, int]:
        raise RunError(ExitCode.RANKS_UNAVAILABLE, "Ray was started")

    assert command("Refuse", gone)[0] == ExitCode.RANKS_UNAVAILABLE, "there is nothing yet"
    save(tmp_path, 10)
    for _ in range(2):
        code, message = command("Refuse", no_ray)
        assert code == ExitCode.REFUSED
        assert "(newest: step-000010-t000001) and spec.checkpoint.onExisting is Refuse; set it to Resume to go on" in message
    assert command("Resume", gone)[0] == ExitCode.RANKS_UNAVAILABLE
    assert command("Refuse", no_ray)[0] == ExitCode.REFUSED


def test_steps_below_the_checkpoints_step_are_refused_with_both_numbers(tmp_path: Path) -> None:
    save(tmp_path, 30)
    assert run(attempt_in(tmp_path, algorithm__grpo__steps=10)) == ExitCode.REFUSED
    _, message = failed(tmp_path)
    assert "spec.algorithm.grpo.steps: checkpoint is at step 30, spec says 10; set it to 30 or more" in message


def test_a_report_that_names_its_resume_has_the_prompts_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero prompts beside a resume would read as if nothing had ever been skipped."""
    path = save(tmp_path, 30)
    reports: list[ProgressReport] = []

    class Recorded(Progress):
        def update(self, **fields: Any) -> None:
            super().update(**fields)
            reports.append(self.report)

    class Actor:
        answers: dict[str, Any] = {  # noqa: RUF012
            "restore": RestoreReport(480, 0, []),
            "status": {
                "counts": {"handed_out": 480, "trained": 477, "skipped": 3, "skipped_by": {}},
                "skipped_names": {"RetryBudgetExhausted": [1, 2, 3]},
                "cap": {"configured": 16, "effective": 16, "reason": "", "warning": ""},
            },
        }

        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_: self.answers.get(method))

    actors = SimpleNamespace(ranks=[Actor()], replicas=[], collector=Actor(), kill=lambda: None)
    monkeypatch.setattr(driver_module.launch, "launch", lambda *_, **__: actors)
    monkeypatch.setattr(Calls, "get", lambda self, refs, *_: refs)
    monkeypatch.setattr(Calls, "ranks", lambda self, *_: [])
    attempt = attempt_in(tmp_path)
    progress = Recorded(
        ProgressReport(
            name="copy",
            namespace="default",
            uid="u",
            attempt=2,
            phase="Starting",
            updated_time="2026-01-01T00:00:00Z",
            total_steps=attempt.spec.algorithm.grpo.steps,
        )
    )
    Driver(attempt, progress, StopSignal(), Control(StopSignal()), spread=False)._start()
    resumed = [report for report in reports if report.resume is not None]
    assert resumed
    assert resumed[0].checkpoint is not None
    assert resumed[0].checkpoint.path.endswith(path.name)
    assert [(r.step, r.prompts.handed_out, r.prompts.skipped) for r in resumed] == [(30, 480, 3)] * len(resumed)


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"generation__temperature": "0"}, "spec.generation.temperature: 0 is too low"),
        (
            {"generation__temperature": "1e-39"},
            "spec.generation.temperature: 1e-39 is too low: training samples its answers",
        ),
        ({"algorithm__grpo__learningRate": "1e99"}, "spec.algorithm.grpo.learningRate: 1e99 is"),
        ({"algorithm__grpo__clipHigh": "1e99"}, "spec.algorithm.grpo.clipHigh: 1e99 is"),
        (
            {"model__shape__hiddenSize": 66, "model__shape__attentionHeads": 6, "model__shape__queryGroups": 6},
            "hiddenSize 66 over 6 attentionHeads gives heads of 11",
        ),
    ],
)
def test_settings_that_no_model_can_be_trained_with_are_named_at_once(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words) as caught:
        preflight.check_settings(spec_with(**changes))
    assert caught.value.code is ExitCode.INVALID_SPEC


def test_the_example_passes() -> None:
    preflight.check_settings(spec_with())


# ---- directories --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: (root / "trained").write_text(""), "trained must be a directory"),
        (lambda root: (root / "tensorboard").write_text(""), "tensorboard must be a directory"),
        (lambda root: (root / "metrics.jsonl").mkdir(), "metrics.jsonl must be a file"),
        (lambda root: (root / "metrics.jsonl").symlink_to(root / "no" / "such" / "place"), "metrics.jsonl: No such file"),
    ],
)
def test_a_misplaced_file_in_the_run_directory_is_named(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    make(tmp_path)
    assert run(attempt_in(tmp_path)) == ExitCode.ENVIRONMENT_MISSING
    assert words in failed(tmp_path)[1]


@pytest.mark.parametrize("name", ["local.json", "local.lock"])
def test_a_directory_in_the_place_of_a_file_of_rljob_local_is_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert local.run_local(spec_with(), name="copy", namespace="default", directory=tmp_path) == ExitCode.ENVIRONMENT_MISSING
    assert f"{tmp_path / name}: Is a directory" in capsys.readouterr().err


def test_a_directory_in_the_place_of_the_token_leaves_the_run_without_endpoints(tmp_path: Path) -> None:
    (tmp_path / local.TOKEN_FILE).mkdir()
    with local._control_file(tmp_path, tmp_path / local.TOKEN_FILE, 1):
        assert not (tmp_path / local.CONTROL_FILE).exists()


@pytest.mark.parametrize("bar", [True, False], ids=["bar", "log"])
def test_where_the_agents_output_goes_is_said_at_the_start(
    tmp_path: Path, bar: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    agent = {"environment": {"agent": {"command": ["python"]}}, "generation__server": {"enabled": True}}
    with caplog.at_level("INFO", "rljob.local"), local._served(attempt_in(tmp_path, **agent), tmp_path / "t", 1, show_bar=bar):
        text = f"the agent's output is in {tmp_path / 'logs' / 'agent-attempt-000002.log'}"
        assert text in caplog.text
        assert capsys.readouterr().err.count(text) == bar
        caplog.clear()
    with caplog.at_level("INFO", "rljob.local"), local._served(attempt_in(tmp_path), tmp_path / "t", 1, show_bar=bar):
        assert "agent's output" not in caplog.text + capsys.readouterr().err


def test_what_could_not_be_loaded_is_passed_over_by_the_next_local_attempt_until_one_ends_otherwise(tmp_path: Path) -> None:
    def ended(code: ExitCode, resumed_from: str | None, source: str | None = None) -> list[str]:
        attempt = local._next_attempt(spec_with(), "copy", "default", tmp_path)
        if resumed_from or source:
            owner = Owner(namespace="default", name="copy", uid=attempt.uid, attempt=attempt.number)
            RunDirectory(tmp_path).take_token(owner, resumed_from, source)
        local._remember(attempt, code)
        return sorted(local._next_attempt(spec_with(), "copy", "default", tmp_path).unloadable)

    newest, before = "step-000030-t000001", "step-000020-t000001"
    assert ended(ExitCode.STOPPED, newest) == []
    assert ended(ExitCode.CHECKPOINT_UNLOADABLE, newest) == [newest]
    assert ended(ExitCode.CHECKPOINT_UNLOADABLE, before) == [before, newest]
    assert ended(ExitCode.CHECKPOINT_UNLOADABLE, None) == [before, newest]  # it took no token: none of them is valid
    assert ended(ExitCode.STOPPED, before) == []
    assert ended(ExitCode.CHECKPOINT_UNLOADABLE, None, source="runs/default/other/step-000030-t000001") == []


def test_a_progress_port_in_use_is_named_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = run(attempt_in(tmp_path), lambda: started.append("ray") or {}, port)
    assert (code, started) == (ExitCode.ENVIRONMENT_MISSING, [])
    said = capsys.readouterr().err
    assert f"cannot serve the progress report on 127.0.0.1:{port}: Address already in use" in said
    assert "end the process that listens on that port" in said
    assert "Traceback" not in said


def test_a_second_run_in_the_same_directory_is_refused_and_names_the_holder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
import sys
from pathlib import Path
from rljob_workload.runtime.local import _alone_in
with _alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        code = local.run_local(spec_with(), name="copy", namespace="default", directory=tmp_path)
        assert code == ExitCode.ENVIRONMENT_MISSING
        assert f"{tmp_path} is in use by process {holder.pid}" in capsys.readouterr().err
        assert not (tmp_path / "local.json").exists()
        holder.communicate()
    with local._alone_in(tmp_path):
        pass


def test_a_run_that_is_refused_leaves_no_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        (tmp_path / "local.json").write_text('{"uid": "u", "attempt": 1, "name": "other"}')
        code = local.run_local(spec_with(), name="copy", namespace="default", directory=tmp_path)
        assert code == ExitCode.ENVIRONMENT_MISSING
        assert "holds the run 'other'" in capsys.readouterr().err
        assert list(Path(parent).iterdir()) == []


def test_a_temporary_directory_too_long_for_rays_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 60)
    code = local.run_local(spec_with(), name="copy", namespace="default", directory=tmp_path)
    assert code == ExitCode.ENVIRONMENT_MISSING
    error = capsys.readouterr().err
    assert "too long for Ray's sockets; set TMPDIR to one of at most" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("namespace", [5, "../../x y", "", "Team", ["a"]])
def test_a_namespace_that_is_none_is_refused_by_local(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], namespace: Any
) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["namespace"] = namespace
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    assert main(["local", str(path), "--dir", str(tmp_path / "run")]) == 1
    assert f"metadata.namespace: {namespace!r} is not a namespace" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
