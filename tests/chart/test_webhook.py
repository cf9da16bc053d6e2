"""The webhook's part of the chart: where the API server asks, whom it trusts, and what it asks about."""

from __future__ import annotations

import base64
import ssl
from typing import Any

import pytest
from dev.kube import CommandError, Kubectl

from rljob_operator.webhook import PATH

from .conftest import Render
from .test_render import deployment, of_kind

# No Secret of the runs' key among those that are looked at.
OTHER_KEY = "operator.existingKeySecret=other"
NAME = "rljob-webhook"
NAMESPACE = "rljob-system"


def the(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (one for one in of_kind(objects, kind) if one["metadata"]["name"].startswith(NAME))
    return found


def test_it_is_asked_at_the_path_that_it_serves(render: Render) -> None:
    objects = render()
    (hook,) = the(objects, "ValidatingWebhookConfiguration")["webhooks"]
    service, pods = the(objects, "Service"), deployment(objects, NAME)["spec"]["template"]
    asked = hook["clientConfig"]["service"]
    assert asked == {"name": NAME, "namespace": NAMESPACE, "path": PATH, "port": 443}
    assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] == pods["spec"]["containers"][0]["ports"][0]["name"]


def test_it_is_asked_about_writes_of_jobs_only_and_never_stands_in_the_way(render: Render) -> None:
    (hook,) = the(render(), "ValidatingWebhookConfiguration")["webhooks"]
    assert hook["failurePolicy"] == "Ignore"
    assert hook["sideEffects"] == "None"
    assert hook["timeoutSeconds"] <= 5
    assert hook["rules"] == [
        {
            "apiGroups": ["rljob.dev"],
            "apiVersions": ["v1alpha1"],
            "operations": ["CREATE", "UPDATE"],
            "resources": ["rljobs"],
            "scope": "Namespaced",
        }
    ]
    assert "namespaceSelector" not in hook


def test_a_restricted_installation_asks_about_its_namespaces(render: Render) -> None:
    configuration = the(render("watchNamespaces={a,b}"), "ValidatingWebhookConfiguration")
    assert configuration["metadata"]["name"] == f"{NAME}-{NAMESPACE}"
    (expression,) = configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"]
    assert expression == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}


def test_the_generated_certificate_is_for_the_service_and_trusted(render: Render) -> None:
    objects = render()
    (hook,) = the(objects, "ValidatingWebhookConfiguration")["webhooks"]
    secret = next(one for one in of_kind(objects, "Secret") if one["type"] == "kubernetes.io/tls")
    authority = base64.b64decode(hook["clientConfig"]["caBundle"]).decode()
    assert authority == base64.b64decode(secret["data"]["ca.crt"]).decode()
    assert ssl.create_default_context(cadata=authority).get_ca_certs()
    assert base64.b64decode(secret["data"]["tls.key"]).startswith(b"-----BEGIN RSA PRIVATE KEY-----")


def test_cert_manager_takes_over_when_asked(render: Render) -> None:
    objects = render("webhook.certificate.certManager.enabled=true", OTHER_KEY)
    configuration = the(objects, "ValidatingWebhookConfiguration")
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{NAME}"}
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]
    certificate = the(objects, "Certificate")
    assert certificate["spec"]["issuerRef"] == {"kind": "Issuer", "name": NAME}
    volume = deployment(objects, NAME)["spec"]["template"]["spec"]["volumes"][0]
    assert volume["secret"]["secretName"] == certificate["spec"]["secretName"]
    assert of_kind(objects, "Secret") == []
    issuer = "webhook.certificate.certManager.issuerRef"
    named = render("webhook.certificate.certManager.enabled=true", f"{issuer}.kind=ClusterIssuer", f"{issuer}.name=ours")
    assert the(named, "Certificate")["spec"]["issuerRef"] == {"kind": "ClusterIssuer", "name": "ours"}
    assert of_kind(named, "Issuer") == []


def test_a_certificate_of_ones_own_is_mounted_and_its_authority_trusted(render: Render) -> None:
    objects = render("webhook.certificate.existingSecret=mine", "webhook.certificate.caBundle=Q0E=", OTHER_KEY)
    assert of_kind(objects, "Secret") == []
    assert deployment(objects, NAME)["spec"]["template"]["spec"]["volumes"][0]["secret"] == {"secretName": "mine"}
    assert the(objects, "ValidatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["caBundle"] == "Q0E="


def test_two_replicas_get_a_disruption_budget_and_none_is_left_when_it_is_off(render: Render) -> None:
    assert of_kind(render(), "PodDisruptionBudget") == []
    assert the(render("webhook.replicas=2"), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    left = render("webhook.enabled=false", OTHER_KEY)
    assert [found["metadata"]["name"] for found in left if found["metadata"]["name"].startswith(NAME)] == []
    assert not {found["kind"] for found in left} & {"ValidatingWebhookConfiguration", "Secret", "Issuer", "Certificate"}


def test_its_pods_have_no_token_and_are_no_operators(render: Render) -> None:
    objects = render()
    pods = deployment(objects, NAME)["spec"]["template"]
    assert pods["spec"]["automountServiceAccountToken"] is False
    selector = deployment(objects)["spec"]["selector"]["matchLabels"]
    assert pods["metadata"]["labels"]["app.kubernetes.io/name"] != selector["app.kubernetes.io/name"]


@pytest.fixture
def installed(environment: dict[str, str]) -> Kubectl:
    """kubectl where the release is."""
    kubectl = Kubectl(environment, NAMESPACE)
    if kubectl.find("deployment", NAME) is None:
        pytest.skip("the operator is not installed (dev/deploy.sh up)")
    kubectl("rollout", "status", f"deployment/{NAME}", "--timeout=60s")
    return kubectl


JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: asked}
spec:
  trainer: {image: x, nodes: 1, gpusPerNode: 8}
  model:
    preset: tiny
    shape: {layers: 4, hiddenSize: 256, attentionHeads: 4, ffnHiddenSize: 64, vocabSize: 64, hybridPattern: "PATTERN"}
  parallelism: {pipeline: 2}
  generation: {maxNewTokens: 4, maxSequenceLength: 16, parallelism: {context: 2}}
  data: {builtin: copy3}
  environment: {builtin: exactMatch}
  algorithm: {grpo: {promptsPerStep: 8, generationsPerPrompt: 8, microBatchSize: 1, steps: 500}}
  checkpoint: {volume: {claimName: c}}
"""


@pytest.mark.cluster
def test_the_installed_webhook_refuses_what_the_definition_cannot(installed: Kubectl) -> None:
    with pytest.raises(CommandError, match=r"validate.rljob.dev.* denied the request: .*stage 2 of 2 gets the layers M-"):
        installed("apply", "--dry-run=server", "-f", "-", given=JOB.replace("PATTERN", "M*M-"))


@pytest.mark.cluster
def test_the_installed_webhook_warns(installed: Kubectl) -> None:
    manifest = JOB.replace("PATTERN", "M*M*")
    said = installed("apply", "--dry-run=server", "-f", "-", "-o", "name", "--warnings-as-errors=false", given=manifest)
    assert said.strip() == "rljob.rljob.dev/asked"
    with pytest.raises(CommandError, match=r"context: 2 has no effect"):
        installed("apply", "--dry-run=server", "-f", "-", "--warnings-as-errors", given=manifest)
