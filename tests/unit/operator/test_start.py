"""Starting without what is needed: one line that says what to do, never a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rljob_operator.health import Health
from rljob_operator.workqueue import WorkQueue

REFUSED = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "u", "user": {}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("k" * 48)
    return str(path)


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    values = {name: value for name, value in os.environ.items() if not name.startswith(("RLJOB_", "KUBE"))}
    return subprocess.run(
        [sys.executable, "-m", "rljob_operator"],
        env=values | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_an_unreachable_api_server_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(REFUSED))
    done = start(KUBECONFIG=str(path), RLJOB_KEY_FILE=key)
    assert done.returncode == 1
    assert "the API server at http://127.0.0.1:9 does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_kubeconfig_is_named(tmp_path: Path, key: str) -> None:
    done = start(KUBECONFIG=str(tmp_path / "nowhere"), RLJOB_KEY_FILE=key)
    assert done.returncode == 1
    assert done.stderr == f"rljob-operator: no kubeconfig at {tmp_path / 'nowhere'}; set KUBECONFIG to one, or run in a pod\n"


@pytest.mark.parametrize("text", ["just words", "{}", "clusters: [", "apiVersion: v1\nkind: Config\n"])
def test_an_unusable_kubeconfig_is_named(tmp_path: Path, key: str, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    done = start(KUBECONFIG=str(path), RLJOB_KEY_FILE=key)
    assert done.returncode == 1
    assert f"cannot use {path}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_setting_is_named() -> None:
    done = start(RLJOB_WORKERS="many")
    assert done.returncode == 2
    assert done.stderr == "rljob-operator: RLJOB_WORKERS='many'; an integer from 1 to 65535 would do\n"


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("short", "the key has 5 bytes")])
def test_an_unusable_key_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    done = start(RLJOB_KEY_FILE=str(path))
    assert done.returncode == 2
    assert f"RLJOB_KEY_FILE='{path}'" in done.stderr
    assert words in done.stderr
    assert "random bytes would do" in done.stderr


def test_help_tells_the_settings() -> None:
    values = dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "rljob_operator", "--help"], env=values, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0
    assert "RLJOB_RAY_ACCESS" in done.stdout


async def test_a_taken_health_port_is_an_error_that_names_itself() -> None:
    from rljob_operator.health import serve

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        await serve(Health(WorkQueue(), 300), taken.getsockname()[1])


def test_health_tells_a_stuck_resync_and_a_stuck_queue() -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    health = Health(queue, 100, lambda: now[0])
    assert health.problems() == []
    now[0] = 361.0
    assert health.problems() == ["no complete listing has succeeded for 361 s"]
    health.resynced()
    queue.add(("a", "b"))
    now[0] = 600.0
    assert health.problems() == ["a job has been waiting in the queue for 239 s"]
