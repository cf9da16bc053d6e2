"""A namespace on the real cluster for each test, with the operator that Helm installed."""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from dev.kube import ROOT, CommandError, Kubectl, cluster_environment

from rljob_api import names
from rljob_cli.watch import ended, events

SYSTEM = "rljob-system"
EMBEDDED = "/run/rljob/kubeconfig"


@pytest.fixture(scope="session")
def environment() -> Iterator[dict[str, str]]:
    """Environment of the cluster; the whole session runs in it, since clients read KUBECONFIG themselves."""
    try:
        found = cluster_environment()
        deployment = Kubectl(found, SYSTEM).find("deployment", "rljob")
    except CommandError as error:
        pytest.fail(f"no cluster: {error}; `make test` starts one")
    if deployment is None:
        pytest.fail("the operator is not installed; `make test` does it, or dev/deploy.sh up")
    saved = dict(os.environ)
    os.environ.update(found)
    free_the_node(found)
    yield found
    os.environ.clear()
    os.environ.update(saved)


def free_the_node(environment: dict[str, str]) -> None:
    """Delete clusters that finished jobs keep (ttlSecondsAfterFinished): one run fills the embedded cluster's two cores."""
    if environment.get("KUBECONFIG") != EMBEDDED:
        return
    everywhere = Kubectl(environment)
    for job in everywhere.json("get", names.RESOURCE, "--all-namespaces")["items"]:
        metadata, cluster = job["metadata"], job.get("status", {}).get("rayClusterName")
        if not cluster:
            continue
        where = Kubectl(environment, metadata["namespace"])
        selector = f"{names.LABEL_JOB}={metadata['name']}"
        if ended(job) is None and where.pods(selector):
            pytest.fail(
                f"RLJob {metadata['namespace']}/{metadata['name']} is running and fills the cluster; wait for it or delete it"
            )
        where("delete", "raycluster", cluster, "--ignore-not-found", "--wait=true")
        where("wait", "--for=delete", "pod", "-l", selector, "--timeout=60s")


@pytest.fixture
def kubectl(environment: dict[str, str]) -> Iterator[Kubectl]:
    """kubectl in a namespace of its own, deleted afterwards."""
    namespace = f"e2e-{secrets.token_hex(3)}"
    run = Kubectl(environment, namespace)
    run("create", "namespace", namespace)
    run("apply", "-f", "examples/copy-claim.yaml")
    yield run
    # Its pods must go before the next test's need their place; the emptied namespace goes by itself, some ten seconds later.
    run("delete", "namespace", namespace, "--wait=false")
    run("wait", "--for=delete", "pods", "--all", "--timeout=180s", timeout=200)


Manifest = Callable[..., str]


@pytest.fixture
def manifest() -> Manifest:
    """The example with paths of the spec set: `manifest("job", **{"trainer.nodes": 2})`."""
    example = yaml.safe_load((ROOT / "examples/copy.yaml").read_text())
    if image := os.environ.get("RLJOB_WORKLOAD_IMAGE"):
        example["spec"]["trainer"]["image"] = image

    def make(name: str, **changes: Any) -> str:
        job = copy.deepcopy(example)
        job["metadata"]["name"] = name
        for path, value in changes.items():
            node = job["spec"]
            *parents, last = path.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        return str(yaml.safe_dump(job))

    return make


def wait_until(namespace: str, name: str, holds: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
    """The job as soon as the predicate holds; fails with the job's status after so many seconds."""
    last: dict[str, Any] = {}
    try:
        for last in events(namespace, name, seconds):
            if holds(last):
                return last
    except Exception as error:
        error.add_note(f"last status: {yaml.safe_dump(last.get('status', {}))}")
        raise
    raise AssertionError("the stream of events ended")
