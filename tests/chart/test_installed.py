"""The chart as it stands in the cluster: what its account may do, and that it runs from its image."""

from __future__ import annotations

import subprocess

import pytest
from dev.kube import Kubectl

from rljob_operator.service import NEEDED

pytestmark = pytest.mark.cluster

NAMESPACE = "rljob-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:rljob"
FORBIDDEN = (
    ("get", "secrets"),
    ("list", "secrets"),
    ("get", "pods"),
    ("patch", "pods"),
    ("create", "pods/exec"),
    ("get", "nodes"),
    ("update", "rljobs.rljob.dev"),
    ("patch", "rljobs.rljob.dev"),
    ("delete", "rljobs.rljob.dev"),
    ("create", "rljobs.rljob.dev"),
    ("update", "rayclusters.ray.io"),
    ("delete", "persistentvolumeclaims"),
    ("create", "deployments.apps"),
    ("get", "configmaps"),
    ("create", "services/proxy"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("impersonate", "users"),
)


@pytest.fixture(scope="module")
def kubectl(environment: dict[str, str]) -> Kubectl:
    kubectl = Kubectl(environment, NAMESPACE)
    if kubectl.find("deployment", "rljob") is None:
        pytest.skip("the operator is not installed (dev/deploy.sh up)")
    return kubectl


def may(kubectl: Kubectl, verb: str, resource: str) -> bool:
    """The API server's own answer, for any namespace. `resource` is NAME[.GROUP][/SUBRESOURCE]."""
    name, _, sub = resource.partition("/")
    done = subprocess.run(
        ("kubectl", "auth", "can-i", verb, name, f"--subresource={sub}", "--as", ACCOUNT, "--all-namespaces", "--quiet"),
        env=kubectl.environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


@pytest.mark.parametrize(("verb", "group", "resource"), NEEDED)
def test_account_may_do_what_the_operator_needs(kubectl: Kubectl, verb: str, group: str, resource: str) -> None:
    kind, _, sub = resource.partition("/")
    assert may(kubectl, verb, f"{kind}{'.' + group if group else ''}{'/' + sub if sub else ''}")


@pytest.mark.parametrize(("verb", "resource"), FORBIDDEN)
def test_account_may_not_do_anything_else(kubectl: Kubectl, verb: str, resource: str) -> None:
    assert not may(kubectl, verb, resource)


def test_operator_runs_hardened_from_its_image(kubectl: Kubectl) -> None:
    (pod,) = kubectl.pods("app.kubernetes.io/name=rljob,app.kubernetes.io/component=operator")
    name = pod["metadata"]["name"]
    assert pod["status"]["containerStatuses"][0]["ready"]
    assert kubectl("exec", name, "--", "id", "-u").strip() == "65532"
    with pytest.raises(Exception, match="Read-only file system"):
        kubectl("exec", name, "--", "touch", "/opt/rljob/app/x")
