"""The whole path in one command: cluster, images, `helm install`, `kubectl apply -f examples/copy.yaml`, until it has trained.

    python -m dev.demo [--timeout SECONDS]      (what `make demo` runs)

With KUBECONFIG set it uses that cluster; then name images that the cluster can pull:
RLJOB_OPERATOR_IMAGE and RLJOB_WORKLOAD_IMAGE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import yaml

from rljob_api import names

from .kube import ROOT, CommandError, Kubectl, cluster_environment

JOB = "copy"
CLAIM = "copy-checkpoints"
TARGET = 0.95
LEAST_STEPS = 100


def step(number: int, text: str) -> None:
    """A heading on the terminal."""
    print(f"\n[{number}/6] {text}", flush=True)


def passthrough(*command: str, environment: dict[str, str] | None = None) -> int:
    """Run a command on this terminal; its exit status."""
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def must(*command: str, environment: dict[str, str] | None = None) -> None:
    """Run a command on this terminal; end here, with its status, when it fails (it has said why)."""
    status = passthrough(*command, environment=environment)
    if status:
        sys.exit(status)


def remove_earlier(kubectl: Kubectl) -> None:
    """Delete this demo's own job and claim of an earlier run, and wait until its pods are gone."""
    if kubectl.find("crd", names.RESOURCE):
        kubectl("delete", names.RESOURCE, JOB, "--ignore-not-found", "--wait=true")
    deadline = time.monotonic() + 90
    while pods := kubectl.pods(f"{names.LABEL_JOB}={JOB}"):
        if time.monotonic() > deadline:
            raise CommandError(f"pods of the earlier run do not end: {', '.join(p['metadata']['name'] for p in pods)}")
        time.sleep(0.5)
    kubectl("delete", "pvc", CLAIM, "--ignore-not-found", "--wait=true")


def job_manifest() -> str:
    """examples/copy.yaml, with the image of RLJOB_WORKLOAD_IMAGE when that is set."""
    text = (ROOT / "examples/copy.yaml").read_text(encoding="utf-8")
    image = os.environ.get("RLJOB_WORKLOAD_IMAGE")
    if not image:
        return text
    manifest = yaml.safe_load(text)
    manifest["spec"]["trainer"]["image"] = image
    return str(yaml.safe_dump(manifest))


def metrics(kubectl: Kubectl) -> list[dict[str, Any]]:
    """The run's metrics, read off the volume through the head pod, which is kept for ttlSecondsAfterFinished."""
    heads = kubectl.pods(f"{names.LABEL_JOB}={JOB},{names.LABEL_RAY_NODE_TYPE}=head")
    if not heads:
        raise CommandError("the head pod is gone, so the metrics on the volume can't be read")
    path = f"{names.VOLUME_MOUNT_PATH}/{names.run_directory(kubectl.namespace, JOB)}/metrics.jsonl"
    text = kubectl("exec", heads[0]["metadata"]["name"], "--", "cat", path)
    return [json.loads(line) for line in text.splitlines()]


def problems(job: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What keeps this run from being a success; empty when it is one."""
    status = job.get("status", {})
    found = []
    summary: dict[str, Any] = next((c for c in status.get("conditions", []) if c["type"] == "Succeeded"), {})
    if summary.get("status") != "True":
        found.append(f"Succeeded is {summary.get('status', 'missing')}: {summary.get('reason')}: {summary.get('message')}")
    reward = float(status.get("validation", {}).get("reward", "nan"))
    if not reward >= TARGET:
        found.append(f"status.validation.reward is {reward}, below {TARGET}")
    skipped = status.get("prompts", {}).get("skipped")
    if skipped != 0:
        found.append(f"status.prompts.skipped is {skipped}, not 0")
    if not rows or (rows[0]["attempt"], rows[0]["step"]) != (1, 1):
        found.append("the metrics do not begin with attempt 1, step 1")
    if len(rows) < LEAST_STEPS:
        found.append(f"the metrics show {len(rows)} steps, fewer than {LEAST_STEPS}")
    return found


def conditions(job: dict[str, Any]) -> str:
    """The conditions as a table."""
    rows = [(c["type"], c["status"], c["reason"], c["message"][:90]) for c in job.get("status", {}).get("conditions", [])]
    rows.insert(0, ("CONDITION", "STATUS", "REASON", "MESSAGE"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows)


def demo(timeout: float) -> int:
    """All steps; 0 only when everything holds that `problems` asks for."""
    began = time.monotonic()
    step(1, "cluster: one-node Kubernetes and KubeRay")
    must("dev/cluster.sh", "up")
    environment = cluster_environment()
    kubectl = Kubectl(environment)
    step(2, "images: operator and workload")
    must("dev/images.sh", "all", environment=environment)
    step(3, "operator: helm install rljob charts/rljob")
    must("dev/deploy.sh", "up", environment=environment)
    step(4, "job: kubectl apply -f examples/copy-claim.yaml -f examples/copy.yaml")
    remove_earlier(kubectl)
    print(kubectl("apply", "-f", "examples/copy-claim.yaml"), end="")
    print(kubectl("apply", "-f", "-", given=job_manifest()), end="")
    applied = time.monotonic()
    step(5, f"training: rljob watch {JOB}")
    watched = passthrough("rljob", "watch", JOB, "-n", "default", "--timeout", str(timeout), environment=environment)
    step(6, f"the end, {time.monotonic() - applied:.0f} s after kubectl apply: kubectl get rlj")
    print(kubectl("get", "rlj", JOB))
    job = kubectl.json("get", names.RESOURCE, JOB)
    print(conditions(job), flush=True)
    rows = metrics(kubectl) if watched == 0 else []
    if found := problems(job, rows):
        print("\nthe demo did not succeed:", *(f"- {problem}" for problem in found), sep="\n", file=sys.stderr)
        return 1
    last = rows[-1]
    print(
        f"\ntrained {len(rows)} steps, {last['consumed_samples']} answers, in {last['elapsed_seconds']:.1f} s of trainer "
        f"wall clock; the whole command took {time.monotonic() - began:.0f} s.\n{how_to_go_on(environment)}"
    )
    return 0


def how_to_go_on(environment: dict[str, str]) -> str:
    """What works from here."""
    path = environment["PATH"].split(":")[1]
    return (
        "The cluster stays up. To look around:\n"
        f"  export KUBECONFIG={environment.get('KUBECONFIG', '')} PATH={path}:$PATH\n"
        f"  kubectl get rlj; kubectl describe rlj {JOB}; .venv/bin/rljob watch {JOB}\n"
        f"before another job, where CPUs are few (the head is kept for its logs, with half a core): kubectl delete rlj {JOB}\n"
        "and to stop it: make cluster-down"
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m dev.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the job to end (default 900)")
    options = parser.parse_args()
    try:
        return demo(options.timeout)
    except CommandError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped watching; what was started stays up.", file=sys.stderr)
        try:
            print(how_to_go_on(cluster_environment()), file=sys.stderr)
        except CommandError:
            print("run `make demo` again to go on, `make cluster-down` to stop", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
