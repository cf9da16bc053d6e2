"""What dev/cluster.sh says when it cannot do what was asked: one clear message, and nothing changed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from dev.kube import ROOT

SCRIPT = ROOT / "dev/cluster.sh"


def cluster(*arguments: str, script: Path = SCRIPT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run dev/cluster.sh with these environment variables, without a KUBECONFIG of the caller's."""
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"} | variables
    return subprocess.run(
        [str(script), *arguments],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def dead_kubeconfig(folder: Path) -> str:
    """A kubeconfig whose server does not exist."""
    path = folder / "kubeconfig"
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\n"
        'clusters: [{name: a, cluster: {server: "https://127.0.0.1:9"}}]\n'
        "users: [{name: a, user: {token: x}}]\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n"
    )
    return str(path)


def test_a_second_checkout_is_told_who_holds_the_cluster(environment: dict[str, str], other_checkout: Path) -> None:
    for command in (["up"], ["down"], ["exec", "true"]):
        refused = cluster(*command, script=other_checkout)
        assert refused.returncode == 1
        assert f"held by the checkout {ROOT}" in refused.stderr
        assert "down --force" in refused.stderr
    assert cluster("status").returncode == 0


def test_up_again_starts_nothing_and_says_so(environment: dict[str, str]) -> None:
    def running() -> dict[str, str]:
        return {file.name: file.read_text() for file in Path("/run/rljob/pids").iterdir()}

    before = running()
    again = cluster("up")
    assert again.returncode == 0
    assert "already up" in again.stdout
    assert running() == before != {}


def test_the_embedded_clusters_own_kubeconfig_means_the_embedded_cluster(environment: dict[str, str]) -> None:
    assert "already up" in cluster("up", KUBECONFIG="/run/rljob/kubeconfig").stdout


@pytest.mark.parametrize("command", ["up", "status"])
def test_an_unreachable_cluster_of_the_user_is_named(command: str, tmp_path: Path) -> None:
    kubeconfig = dead_kubeconfig(tmp_path)
    refused = cluster(command, KUBECONFIG=kubeconfig)
    assert refused.returncode == 1
    assert f"the cluster of KUBECONFIG={kubeconfig} does not answer at https://127.0.0.1:9" in refused.stderr
    assert "unset KUBECONFIG" in refused.stderr


def test_a_kubeconfig_that_does_not_exist_is_named() -> None:
    refused = cluster("up", KUBECONFIG="/nowhere/config")
    assert refused.returncode == 1
    assert "KUBECONFIG=/nowhere/config: no such file" in refused.stderr


def test_down_never_touches_a_cluster_of_the_user(tmp_path: Path) -> None:
    done = cluster("down", KUBECONFIG=dead_kubeconfig(tmp_path))
    assert done.returncode == 0
    assert "nothing was stopped or changed" in done.stdout


def test_a_cluster_without_kuberay_is_told_what_to_install(environment: dict[str, str], tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    kubectl = programs / "kubectl"  # answers for a server that has no such definition
    kubectl.write_text('#!/bin/sh\ncase "$*" in *"/version"*) echo \'{"gitVersion": "v1.35.0"}\';; *) exit 1;; esac\n')
    kubectl.chmod(0o755)
    refused = cluster("up", KUBECONFIG=dead_kubeconfig(tmp_path), PATH=f"{programs}:{os.environ['PATH']}")
    assert refused.returncode == 1
    assert "KubeRay is not installed" in refused.stderr
    assert "kuberay-operator" in refused.stderr


def test_a_file_that_is_no_image_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    refused = cluster("load", str(file))
    assert refused.returncode == 1
    assert "cannot be read as an image archive" in refused.stderr
    assert "is not a file" in cluster("load", str(tmp_path / "none.tar")).stderr


def test_check_clean_sees_a_running_cluster(environment: dict[str, str]) -> None:
    seen = subprocess.run([str(ROOT / "dev/check-clean.sh")], check=False, capture_output=True, text=True, timeout=60)
    assert seen.returncode == 1
    for what in ("processes", "cgroups", "network namespaces", "changed since"):
        assert f"left behind: {what}" in seen.stdout
