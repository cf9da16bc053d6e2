"""The embedded cluster and a tiny image for pods; skipped, with the reason, where there is none."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev.kube import ROOT, Kubectl, cluster_environment, run

APPLETS = ("sh", "cat", "httpd", "id", "mkdir", "nslookup", "stat")
IMAGE = "localhost/rljob-busybox:dev"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The embedded cluster's environment."""
    if os.getuid() != 0:
        pytest.skip("the embedded cluster needs root")
    environment = cluster_environment()
    if environment.get("KUBECONFIG") != "/run/rljob/kubeconfig":
        pytest.skip("KUBECONFIG names another cluster; these tests are about the embedded one")
    if subprocess.run([str(ROOT / "dev/cluster.sh"), "status"], check=False, capture_output=True).returncode != 0:
        pytest.skip("the embedded cluster is not up (make cluster-up)")
    return environment


def copy_with_libraries(program: str, folder: Path) -> None:
    """Put a program and the libraries that it loads where its loader looks for them, below a folder."""
    path = shutil.which(program)
    assert path is not None, f"{program} is not on PATH"
    shutil.copy(path, folder / "bin")
    for library in re.findall(r"(/\S+) \(0x", run("ldd", path)):
        loader = Path(library).name.startswith("ld-")
        target = folder / Path(library).parent.relative_to("/") if loader else folder / "lib"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)


@pytest.fixture(scope="session")
def image(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with a shell, a web server and curl, made from what Debian packages brought to this machine."""
    run(str(ROOT / "dev/packages.sh"), "ensure", "busybox-static", "curl", timeout=300)
    folder = tmp_path_factory.mktemp("image") / "root"
    (folder / "bin").mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, folder / "bin")
    for applet in APPLETS:
        (folder / "bin" / applet).symlink_to("busybox")
    copy_with_libraries("curl", folder)  # a static busybox cannot look up names for its own wget
    archive = folder.parent / "image.tar"
    layers = [f"{part}=/{part.name}" for part in sorted(folder.iterdir())]
    run("python3", str(ROOT / "dev/mkimage.py"), str(archive), IMAGE, "--cmd", "/bin/sh", *layers)
    run(str(ROOT / "dev/cluster.sh"), "load", str(archive), environment=environment)
    return IMAGE


@pytest.fixture(scope="module")
def kubectl(environment: dict[str, str]) -> Iterator[Kubectl]:
    """kubectl in a namespace of its own, which goes with everything in it."""
    name = f"cluster-test-{secrets.token_hex(3)}"
    run("kubectl", "create", "namespace", name, environment=environment)
    yield Kubectl(environment, name)
    run("kubectl", "delete", "namespace", name, "--wait=false", environment=environment)


@pytest.fixture
def other_checkout(tmp_path: Path) -> Path:
    """A second copy of the scripts; its dev/cluster.sh."""
    shutil.copytree(ROOT / "dev", tmp_path / "checkout/dev")
    return tmp_path / "checkout/dev/cluster.sh"
