"""The command line: exit statuses and messages, never a traceback."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from kubernetes.client.exceptions import ApiException

from rljob_cli import watch
from rljob_cli.errors import UserError
from rljob_cli.files import apply_settings
from rljob_cli.main import main
from rljob_cli.watch import Story, describe, ended, events, state

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/copy.yaml"


def test_validate_says_valid_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(EXAMPLE)]) == 0
    assert capsys.readouterr().out.endswith("copy.yaml: valid\n")


def test_validate_lists_findings_as_json_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["generation"]["parallelism"] = {"tensor": 2}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    assert main(["validate", str(path), "-o", "json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["file"] == str(path)
    assert (row["rule"], row["severity"]) == ("generation-layout", "error")
    assert row["path"] == "spec.generation.parallelism.tensor"
    assert row.keys() == {"file", "rule", "severity", "path", "message", "line", "column"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{a: [", "not YAML"),
        ("kind: Pod", "no object of kind RLJob"),
        ("kind: RLJob\napiVersion: rljob.dev/v2", "reads rljob.dev/v1alpha1"),
        ("kind: RLJob\napiVersion: rljob.dev/v1alpha1", "metadata.name is missing"),
        ("\x80\x81", "not"),
        ("", "no object of kind RLJob"),
    ],
)
def test_an_unreadable_file_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert main(["validate", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_missing_file_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "/no/such/file.yaml"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_local_refuses_an_invalid_job_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["local", str(EXAMPLE), "--dir", str(tmp_path), "--set", "spec.generation.parallelism.tensor=2"]
    assert main(arguments) == 1
    assert "2 differs from training's spec.parallelism.tensor 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "value"), [("0.002", "0.002"), ("1e-3", "1e-3"), ("'0.5'", "0.5"), ("7", 7), ("true", True), ("null", None)]
)
def test_a_number_that_is_no_integer_is_set_as_the_string_that_the_spec_wants(setting: str, value: object) -> None:
    manifest: dict[str, Any] = {"spec": {}}
    apply_settings(manifest, [f"spec.algorithm.grpo.learningRate={setting}"])
    assert manifest["spec"]["algorithm"]["grpo"]["learningRate"] == value


@pytest.mark.parametrize(
    "setting",
    [
        "spec.trainer.seed=2020-99-99",
        "spec.trainer.seed={a: [",
        "spec",
        "spec.=1",
        "trainer.nodes=1",
        "spec.trainer.nodes",
        "spec.trainer.image.x=1",
    ],
)
def test_a_malformed_setting_is_explained(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", str(EXAMPLE), "--set", setting]) == 2
    assert f"--set {setting}" in capsys.readouterr().err


def test_watch_without_a_cluster_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/config")
    assert main(["watch", "copy"]) == 2
    assert "set KUBECONFIG" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["junk", "{}", "clusters: 3", "{a: ["])
def test_watch_with_a_malformed_kubeconfig_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert main(["watch", "copy"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rljob: no cluster configured: ")
    assert error.count("\n") == 1


def test_the_line_of_watch_shows_reward_skipped_and_state() -> None:
    conditions = [
        {"type": "Succeeded", "status": "Unknown", "reason": "Running", "message": "step 7 of 500"},
        {"type": "Progressing", "status": "True", "reason": "StepAdvanced", "message": "phase Training"},
    ]
    job = {"status": {"step": 7, "reward": "0.25", "prompts": {"skipped": 2}, "restarts": 1, "conditions": conditions}}
    assert state(job) == "Running (phase Training)"
    assert describe(job) == "reward 0.25  skipped 2  restarts 1"
    assert ended(job) is None
    conditions[0]["status"] = "True"
    assert ended(job) is True


def told(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def watched(*conditions: dict[str, str], **status: object) -> dict[str, Any]:
    spec = {"checkpoint": {"volume": {"claimName": "claim", "subPath": ""}}}
    return {
        "metadata": {"name": "copy", "namespace": "lab"},
        "spec": spec,
        "status": {"attempt": 2, "conditions": list(conditions), **status},
    }


def test_watch_says_once_what_a_job_waits_for_and_again_when_that_changes() -> None:
    story = Story()
    summary = told("Succeeded", "Unknown", "Provisioning", "waiting for pods")
    short = told("ClusterReady", "False", "PodsPending", "1 of 2 pods are ready; Unschedulable: Insufficient cpu")
    assert story.news(watched(summary, short)) == [
        "ClusterReady=False PodsPending: 1 of 2 pods are ready; Unschedulable: Insufficient cpu",
    ]
    assert story.news(watched(summary, short)) == []
    ready = told("ClusterReady", "True", "AllPodsReady", "all 2 pods are ready")
    starting = told("Succeeded", "Unknown", "Starting", "the driver is starting")
    assert story.news(watched(starting, ready)) == [
        "ClusterReady=True AllPodsReady: all 2 pods are ready",
        "Succeeded=Unknown Starting: the driver is starting",
    ]
    assert story.news(watched(summary, short)) == [
        "ClusterReady=False PodsPending: 1 of 2 pods are ready; Unschedulable: Insufficient cpu"
    ]


def test_watch_tells_of_refusals_and_stalls_and_leaves_numbers_and_the_end_to_their_own_lines() -> None:
    story = Story()
    refused = told("Validated", "False", "BatchSizeMismatch", "spec.algorithm.grpo.microBatchSize: too large")
    assert story.news(watched(refused)) == ["Validated=False BatchSizeMismatch: spec.algorithm.grpo.microBatchSize: too large"]
    assert story.news(watched(told("Validated", "True", "Valid", "the spec passes all rules"))) == []
    running = told("Succeeded", "Unknown", "Running", "step 7 of 500")
    assert story.news(watched(running, told("Progressing", "True", "StepAdvanced", "phase Training"))) == []
    stalled = told("Progressing", "False", "Stalled", "no step for 300 s; rank 3 did not arrive")
    assert story.news(watched(running, stalled)) == ["Progressing=False Stalled: no step for 300 s; rank 3 did not arrive"]
    assert story.news(watched(told("Succeeded", "False", "DriverFailed", "attempt 2: exit code 78"))) == []


@pytest.mark.parametrize(("below", "path"), [("", ""), ("a b", "a b/")])
def test_watch_gives_the_command_for_the_log_of_each_attempts_driver(below: str, path: str) -> None:
    story, running = Story(), told("DriverRunning", "True", "Running", "copy-2 is running")
    job = watched(running, rayClusterName="copy-2", checkpointVolume={"claimName": "claim", "subPath": below})
    (line,) = story.news(job)
    words = shlex.split(line)
    assert words[:7] == ["log:", "kubectl", "-n", "lab", "exec", "service/copy-2-head-svc", "--"]
    assert words[-1] == f"/rljob/volume/{path}runs/lab/copy/logs/driver-attempt-000002.log"
    assert story.news(job) == []
    job["status"] |= {"attempt": 3, "rayClusterName": "copy-3"}
    assert "service/copy-3-head-svc" in story.news(job)[0]
    assert Story().news(watched(told("DriverRunning", "False", "Exited", "copy-2 ended"), rayClusterName="copy-2")) == []


def watch_rounds(monkeypatch: pytest.MonkeyPatch, rounds: list[list[int | Exception]]) -> list[bool]:
    """Let `events` see these rounds: versions of the job, and what breaks them. Returns for each whether the job was known."""
    monkeypatch.setattr("kubernetes.config.load_kube_config", lambda _path: None)
    monkeypatch.setattr(watch, "_PAUSE_SECONDS", 0.0)
    asked: list[bool] = []

    def one(_namespace: str, _name: str, _deadline: float | None, *, known: bool) -> Iterator[dict[str, Any]]:
        asked.append(known)
        for step in rounds[len(asked) - 1]:
            if isinstance(step, Exception):
                raise step
            yield {"metadata": {"resourceVersion": str(step)}}

    monkeypatch.setattr(watch, "_round", one)
    return asked


def test_watch_endures_a_cluster_that_drops_its_watch_or_is_away_and_tells_no_change_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = watch_rounds(
        monkeypatch,
        [
            [1, 2, ApiException(status=410, reason="Expired")],
            [urllib3.exceptions.ProtocolError("refused")],
            [ApiException(status=503, reason="starting")],
            [2, 3],
            [3, UserError("RLJob copy was deleted")],
        ],
    )
    following = events("lab", "copy", None)
    assert [next(following)["metadata"]["resourceVersion"] for _ in range(3)] == ["1", "2", "3"]
    with pytest.raises(UserError, match="was deleted"):
        next(following)
    assert asked == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ([[urllib3.exceptions.ProtocolError("refused")]], "the cluster does not answer: refused"),
        ([[1], [ApiException(status=403, reason="Forbidden")]], "not allowed to read RLJob copy"),
        ([[1], [ApiException(status=503, reason="down")]], "the cluster answered 503 down"),
    ],
    ids=["never answered", "not allowed", "away for too long"],
)
def test_watch_ends_where_waiting_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, rounds: list[list[int | Exception]], words: str
) -> None:
    watch_rounds(monkeypatch, rounds)
    monkeypatch.setattr(watch, "_PATIENCE_SECONDS", -1.0)
    with pytest.raises(UserError, match=words):
        list(events("lab", "copy", None))
