"""What the project needs from the embedded cluster, on the running one: pods, volumes, services, names, no way out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from dev.kube import ROOT, CommandError, Kubectl, run

CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
"""


def pod(name: str, image: str, script: str, claims: tuple[str, ...] = (), **spec: Any) -> str:
    """A pod of a user that is not root, as JSON; it runs one script to its end. A claim lies at /CLAIM."""
    container: dict[str, Any] = {
        "name": "c",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-ec", script],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": claim, "mountPath": f"/{claim}"} for claim in claims],
    }
    body: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 12345, "runAsGroup": 12345},
        "containers": [container],
        "volumes": [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims],
        **spec,
    }
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": body})


def output_of(kubectl: Kubectl, name: str) -> str:
    """What a pod printed, when it has ended well."""
    try:
        kubectl("wait", "--for=jsonpath={.status.containerStatuses[0].state.terminated}", f"pod/{name}", "--timeout=60s")
    except CommandError as error:
        raise AssertionError(f"{error}; {kubectl('describe', 'pod', name)}") from error
    said = kubectl("logs", name)
    state = kubectl.json("get", "pod", name)["status"]["containerStatuses"][0]["state"]["terminated"]
    assert state["exitCode"] == 0, f"pod {name} ended with {state}; it said: {said}"
    return said


def test_every_new_volume_is_writable_at_once_by_a_pod_that_is_not_root(kubectl: Kubectl, image: str) -> None:
    claims = [f"fresh-{number}" for number in range(20)]
    script = "id -u; for v in /fresh-*; do mkdir $v/runs; echo kept > $v/runs/file; stat -c %a $v; cat $v/runs/file; done"
    pods = {f"user-{first}": tuple(claims[first::4]) for first in range(4)}
    objects = [CLAIM % claim for claim in claims] + [pod(name, image, script, some) for name, some in pods.items()]
    kubectl("apply", "-f", "-", given="\n---\n".join(objects))
    for name, some in pods.items():
        assert output_of(kubectl, name).split() == ["12345"] + ["777", "kept"] * len(some)


def test_a_volume_outlives_its_pod_and_goes_with_its_claim(kubectl: Kubectl, image: str) -> None:
    kubectl("apply", "-f", "-", given=CLAIM % "v" + "\n---\n" + pod("writer", image, "echo 1 > /v/x", ("v",)))
    output_of(kubectl, "writer")
    kubectl("delete", "pod", "writer")
    kubectl("apply", "-f", "-", given=pod("reader", image, "cat /v/x", ("v",)))
    assert output_of(kubectl, "reader") == "1\n"
    volume = kubectl.json("get", "pvc", "v")["spec"]["volumeName"]
    path = kubectl.json("get", "pv", volume)["spec"]["local"]["path"]
    kubectl("delete", "pod/reader", "pvc/v")
    kubectl("wait", "--for=delete", f"pv/{volume}", "--timeout=30s")
    with pytest.raises(CommandError, match="No such file"):
        run("stat", path)


def test_fs_group_owns_the_volume(kubectl: Kubectl, image: str) -> None:
    security = {"runAsNonRoot": True, "runAsUser": 12345, "runAsGroup": 12345, "fsGroup": 4242}
    grouped = pod("grouped", image, "stat -c %g /grouped", ("grouped",), securityContext=security)
    kubectl("apply", "-f", "-", given=CLAIM % "grouped" + "\n---\n" + grouped)
    assert output_of(kubectl, "grouped") == "4242\n"


def test_a_claim_that_cannot_be_served_says_why(kubectl: Kubectl) -> None:
    claim = CLAIM.replace("spec: {", "spec: {volumeMode: Block, ") % "block"
    kubectl("apply", "-f", "-", given=claim)
    event = f"event/block.provisioning-failed.{kubectl.json('get', 'pvc', 'block')['metadata']['uid']}"
    kubectl("wait", "--for=create", event, "--timeout=20s")
    assert kubectl.json("get", event)["message"] == "volumeMode Block is not supported here; use Filesystem"


def test_a_deployment_answers_under_its_services_name_in_the_cluster_and_by_exec(kubectl: Kubectl, image: str) -> None:
    script = "mkdir /tmp/www && echo hello > /tmp/www/index.html && exec httpd -f -p 8080 -h /tmp/www"
    template = json.loads(pod("web", image, script))["spec"] | {"restartPolicy": "Always"}
    template["containers"][0]["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    template["containers"][0]["readinessProbe"] = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    template["volumes"] = [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": template},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    kubectl("apply", "-f", "-", given=json.dumps(deployment) + "\n---\n" + json.dumps(service))
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    kubectl("apply", "-f", "-", given=pod("client", image, "curl -sSf --max-time 5 http://web/"))
    assert output_of(kubectl, "client") == "hello\n"
    url = f"http://web.{kubectl.namespace}.svc.cluster.local"
    assert run(str(ROOT / "dev/cluster.sh"), "exec", "curl", "-sf", "--max-time", "5", url) == "hello\n"
    proxy = f"/api/v1/namespaces/{kubectl.namespace}/services/web:80/proxy/"  # the way of everything that runs outside
    assert kubectl("get", "--raw", proxy) == "hello\n"
    assert kubectl("exec", "deployment/web", "--", "cat", "/tmp/www/index.html") == "hello\n"


def test_names_outside_the_cluster_fail_at_once_and_there_is_no_way_out(kubectl: Kubectl, image: str) -> None:
    script = """
        seconds() { read -r up _ < /proc/uptime; echo "${up%%.*}"; }
        began=$(seconds)
        code=0; curl -sS --max-time 20 http://example.com/ 2>&1 || code=$?
        echo "code $code after $(($(seconds) - began))"
        code=0; curl -sS --max-time 20 http://192.0.2.1/ 2>&1 || code=$?
        echo "code $code after $(($(seconds) - began))"
    """
    kubectl("apply", "-f", "-", given=pod("outside", image, script))
    said = output_of(kubectl, "outside")
    name, address = re.findall(r"code (\d+) after (\d+)", said)
    assert (name[0], int(name[1]) <= 1) == ("6", True), said  # 6: the name does not exist
    assert (address[0], int(address[1]) <= 2) == ("7", True), said  # 7: no connection
    routes = run(str(ROOT / "dev/cluster.sh"), "exec", "ip", "route")
    assert "default" not in routes


def test_kuberay_and_a_default_storage_class_are_there(kubectl: Kubectl) -> None:
    operator = kubectl.json("-n", "ray-system", "get", "deployment", "kuberay-operator")
    assert operator["status"]["availableReplicas"] == 1
    assert kubectl("get", "crd", "rayclusters.ray.io", "rayjobs.ray.io", "-o", "name").count("ray.io") == 2
    [storage] = kubectl.json("get", "storageclass")["items"]
    assert storage["metadata"]["annotations"]["storageclass.kubernetes.io/is-default-class"] == "true"
