"""Tokens of attempts and the objects that guard a run."""

from __future__ import annotations

import base64

from rljob_operator.access import Access
from rljob_operator.api import ApiError

from .builders import job, running
from .fakes import FakeCluster, FakeRay, later
from .life import ACCESS, Operator, state


def test_a_token_is_the_same_after_a_restart_and_differs_by_attempt_job_and_key() -> None:
    first = job(running(1))
    assert Access(b"a key of the tests, long enough to be one").token(first) == ACCESS.token(first)
    other_key = Access(b"another key of the tests, long enough as well")
    assert len({ACCESS.token(first), ACCESS.token(job(running(2))), other_key.token(first)}) == 3


def test_the_network_policy_lets_in_the_run_itself_and_the_operator_only() -> None:
    policy = Access(b"k" * 32, "rljob-system").network_policy(job(running()))["spec"]
    run, operator = policy["ingress"]
    assert run == {"from": [{"podSelector": policy["podSelector"]}]}
    assert {one["port"] for one in operator["ports"]} == {8265, 8090}
    (where,) = operator["from"]
    assert where["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "rljob-system"}
    assert where["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "operator"}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"][1]["ports"] == [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]


def test_an_operator_outside_the_pods_is_let_in_by_port() -> None:
    _, operator = Access(b"k" * 32).network_policy(job(running()))["spec"]["ingress"]
    assert "from" not in operator


async def test_a_secret_of_a_pass_that_was_cut_off_is_made_anew(kube: FakeCluster, operator: Operator) -> None:
    await operator.count()
    name = ACCESS.secret(job(running()))["metadata"]["name"]
    kube.secrets[name] = {"data": {"auth_token": "of another key"}}
    await operator.step()
    assert list(kube.clusters) == ["copy-1"]
    assert base64.b64decode(kube.secrets[name]["data"]["auth_token"]).decode() == ACCESS.token(job(running()))


async def test_a_secret_goes_with_its_attempt(kube: FakeCluster, ray: FakeRay, operator: Operator) -> None:
    await operator.until_training()
    (before,) = kube.secrets
    ray.end("copy-1", "FAILED", 76)
    await operator.step()
    assert kube.secrets == {}
    kube.pods_without_cluster_go()
    later(kube, 100)
    for _ in range(3):
        await operator.step()
    (after,) = kube.secrets
    assert after != before
    assert len(kube.policies) == 1


async def test_a_right_that_is_missing_is_in_the_status_and_no_cluster_is_made(kube: FakeCluster, operator: Operator) -> None:
    forbidden = ApiError(403, "Forbidden", "secrets is forbidden", "POST")

    async def refuse(_: object) -> None:
        raise forbidden

    kube.create_secret = refuse  # type: ignore[method-assign,assignment]
    for _ in range(4):
        await operator.step()
    assert kube.clusters == {}
    assert state(kube) == "Provisioning"
    assert "secrets is forbidden" in kube.condition("ClusterReady")["message"]
