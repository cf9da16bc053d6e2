"""What the chart renders: rights, hardening, values that it refuses."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import yaml
from dev.kube import ROOT

from rljob_api.crd import custom_resource_definition
from rljob_operator.access import LEAST_KEY_BYTES
from rljob_operator.service import NEEDED, NEEDED_BY_PROXY
from rljob_operator.settings import Settings, from_environment

from .conftest import Render

# To own a RayCluster with blockOwnerDeletion where the API server asks for that right; nothing that the operator calls.
OWNING = ("update", "rljob.dev", "rljobs/finalizers")


def of_kind(objects: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [found for found in objects if found["kind"] == kind]


def rights(roles: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """(verb, group, resource) of all rules."""
    return {
        (verb, group, resource)
        for role in roles
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def operator_role(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(found for found in of_kind(objects, "ClusterRole") if found["metadata"]["name"] == "rljob")


def deployment(objects: list[dict[str, Any]], name: str = "rljob") -> dict[str, Any]:
    return next(found for found in of_kind(objects, "Deployment") if found["metadata"]["name"] == name)


def container(objects: list[dict[str, Any]], name: str = "rljob") -> dict[str, Any]:
    (found,) = deployment(objects, name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def values_of(box: dict[str, Any]) -> dict[str, str]:
    """The environment variables that have their value in the manifest."""
    return {variable["name"]: variable["value"] for variable in box["env"] if "value" in variable}


def test_operator_may_do_exactly_what_its_code_asks_for(render: Render) -> None:
    assert rights([operator_role(render())]) == {*NEEDED, OWNING}


def test_proxy_access_adds_the_right_on_the_service_proxy_alone(render: Render) -> None:
    assert rights([operator_role(render("operator.rayAccess=ApiServerProxy"))]) == {*NEEDED, *NEEDED_BY_PROXY, OWNING}


def test_no_role_reads_secrets_or_holds_exec_or_wildcards(render: Render) -> None:
    objects = render()
    for verb, group, resource in rights(of_kind(objects, "ClusterRole") + of_kind(objects, "Role")):
        assert "*" not in (verb, group, resource)
        assert resource != "secrets" or verb in {"create", "delete"}
        assert resource not in {"pods/exec", "pods/attach", "nodes", "serviceaccounts/token"}
        assert verb not in {"impersonate", "escalate", "bind", "deletecollection"}


def test_watched_namespaces_get_a_role_each_and_no_cluster_role(render: Render) -> None:
    objects = render("watchNamespaces={team-a,team-b}")
    roles = of_kind(objects, "Role")
    assert {role["metadata"]["namespace"] for role in roles} == {"team-a", "team-b"}
    assert all(rights([role]) == {*NEEDED, OWNING} for role in roles)
    assert of_kind(objects, "ClusterRoleBinding") == []
    assert {role["metadata"]["name"] for role in of_kind(objects, "ClusterRole")} == {"rljob-viewer", "rljob-editor"}
    account = {"kind": "ServiceAccount", "name": "rljob", "namespace": "rljob-system"}
    assert [binding["subjects"] for binding in of_kind(objects, "RoleBinding")] == [[account], [account]]


def test_people_get_their_rights_through_the_standard_roles(render: Render) -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind(render(), "ClusterRole")}
    assert roles["rljob-viewer"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {verb for verb, _, _ in rights([roles["rljob-viewer"]])} == {"get", "list", "watch"}
    editor = roles["rljob-editor"]
    assert editor["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert ("delete", "rljob.dev", "rljobs") in rights([editor])
    assert ("patch", "rljob.dev", "rljobs/status") not in rights([editor])


@pytest.mark.parametrize("name", ["rljob", "rljob-webhook"])
def test_pods_satisfy_the_restricted_standard(render: Render, name: str) -> None:
    objects = render()
    pod, box = deployment(objects, name)["spec"]["template"]["spec"], container(objects, name)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert box["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not any("hostPath" in volume for volume in pod["volumes"])
    assert not pod.get("hostNetwork")
    assert box["resources"]["limits"]["memory"]
    assert box["resources"]["requests"].keys() == {"cpu", "memory"}


def test_two_operators_never_run_at_once(render: Render) -> None:
    spec = deployment(render())["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_probes_ask_the_health_port(render: Render) -> None:
    box = container(render())
    assert {"name": "health", "containerPort": 8080} in box["ports"]
    for probe in ("startupProbe", "livenessProbe"):
        assert box[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert box["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}


def services(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "Service")}


def test_a_service_leads_to_the_metrics_of_the_operator_also_while_it_is_not_ready(render: Render) -> None:
    objects = render()
    service, pod = services(objects)["rljob-metrics"], deployment(objects)["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["publishNotReadyAddresses"] is True
    (port,) = service["ports"]
    ports = {one["name"]: one["containerPort"] for one in container(objects)["ports"]}
    assert port["port"] == ports[port["targetPort"]] == Settings().health_port
    assert "rljob-metrics" not in services(render("metrics.service.enabled=false"))


def test_scrape_annotations_join_those_of_the_pod_and_are_off_by_default(render: Render) -> None:
    assert "annotations" not in deployment(render())["spec"]["template"]["metadata"]
    objects = render("metrics.scrapeAnnotations=true", "podAnnotations.team=x")
    wanted = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080", "prometheus.io/path": "/metrics", "team": "x"}
    assert deployment(objects)["spec"]["template"]["metadata"]["annotations"] == wanted


def test_a_monitor_finds_the_service_and_keeps_the_jobs_namespaces(render: Render) -> None:
    assert of_kind(render(), "ServiceMonitor") == []
    objects = render("metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=main")
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (found,) = (one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "rljob-metrics")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= found["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "main"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": found["spec"]["ports"][0]["name"], "path": "/metrics", "interval": "30s", "honorLabels": True}


def test_settings_of_the_chart_are_settings_of_the_operator(render: Render) -> None:
    values = ("operator.logLevel=DEBUG", "operator.rayAccess=ApiServerProxy", "operator.statusSeconds=7")
    box = container(render(*values, "operator.resyncSeconds=60", "watchNamespaces={a,b}"))
    settings = from_environment(values_of(box))
    assert settings.log_level == "DEBUG"
    assert settings.ray_access == "ApiServerProxy"
    assert settings.status_seconds == 7
    assert settings.resync_seconds == 60
    assert settings.namespaces == ("a", "b")


def test_defaults_of_the_chart_are_the_operators(render: Render) -> None:
    settings = from_environment(values_of(container(render())))
    # Two settings have no default of their own: where the chart mounts the key, and the image of this very deployment.
    assert settings == Settings(key_file=settings.key_file, preflight_image=container(render())["image"])


def test_the_key_of_the_runs_is_made_once_mounted_and_kept(render: Render) -> None:
    objects = render()
    (secret,) = (one for one in of_kind(objects, "Secret") if "key" in one.get("data", {}))
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert len(base64.b64decode(secret["data"]["key"])) >= LEAST_KEY_BYTES
    box, spec = container(objects), deployment(objects)["spec"]["template"]["spec"]
    (mount,) = (one for one in box["volumeMounts"] if one["name"] == "key")
    assert values_of(box)["RLJOB_KEY_FILE"] == f"{mount['mountPath']}/key"
    assert {"name": "key", "secret": {"secretName": secret["metadata"]["name"]}} in spec["volumes"]
    given = render("operator.existingKeySecret=mine")
    assert [one for one in of_kind(given, "Secret") if "key" in one.get("data", {})] == []
    volumes = deployment(given)["spec"]["template"]["spec"]["volumes"]
    assert {"name": "key", "secret": {"secretName": "mine"}} in volumes


def test_image_is_named_by_tag_or_digest(render: Render) -> None:
    assert container(render("image.repository=r/op", "image.tag=v1"))["image"] == "r/op:v1"
    digest = "sha256:" + "0" * 64
    assert container(render("image.repository=r/op", "image.tag=v1", f"image.digest={digest}"))["image"] == f"r/op@{digest}"


def test_chart_brings_the_generated_definition_and_keeps_it(render: Render) -> None:
    (definition,) = of_kind(render(), "CustomResourceDefinition")
    assert definition["spec"] == custom_resource_definition()["spec"]
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_definition_can_be_left_out_or_not_kept(render: Render) -> None:
    assert of_kind(render("crds.install=false"), "CustomResourceDefinition") == []
    (definition,) = of_kind(render("crds.keep=false"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in definition["metadata"]["annotations"]


def test_chart_of_the_definition_stands_alone(render: Render) -> None:
    (definition,) = render("annotations.team=x", chart="charts/rljob-crds")
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep", "team": "x"}


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replicas=2", "replicas"),
        ("image.repo=x", "repo"),
        ("operator.rayAccess=Sideways", "rayAccess"),
        ("operator.statusSeconds=0", "statusSeconds"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("image.digest=latest", "digest"),
        ("crds.instal=true", "instal"),
        ("serviceAccount.create=maybe", "create"),
        ("webhook.failurePolicy=Maybe", "failurePolicy"),
        ("webhook.replicas=0", "replicas"),
        ("metrics.scrape=true", "scrape"),
        ("metrics.serviceMonitor.interval=often", "interval"),
        ("webhook.certificate.existingSecret=mine", "caBundle"),
    ],
)
def test_schema_refuses_what_the_chart_does_not_know(
    helm: Callable[..., subprocess.CompletedProcess[str]], setting: str, named: str
) -> None:
    done = helm("template", "rljob", "charts/rljob", "--kube-version", "1.35.4", "--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


def test_every_value_has_a_comment_and_a_place_in_the_schema() -> None:
    text = (ROOT / "charts/rljob/values.yaml").read_text(encoding="utf-8")
    schema = yaml.safe_load((ROOT / "charts/rljob/values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load(text)
    assert values.keys() <= schema["properties"].keys()
    for name, value in values.items():
        inner = schema["properties"][name].get("properties")
        if isinstance(value, dict) and inner:
            assert value.keys() <= inner.keys(), name


def test_lint_finds_nothing(helm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = helm("lint", "--strict", "charts/rljob", "charts/rljob-crds", "--kube-version", "1.35.4")
    assert done.returncode == 0, done.stdout
