"""`make proof-kubernetes`: a run whose head, worker and driver are killed again and again, on a real cluster; what it lost.

Writes build/proof-kubernetes.json and, where nothing is wrong and unless --no-publish, docs/proof/kubernetes.json,
docs/proof/kubernetes.md and the README's line about them.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dev.case import Case, Job
from dev.kube import ROOT, CommandError, Kubectl, cluster_environment
from dev.proof.publish import replace_block
from rljob_api import names

KILLS = ("head", "worker", "driver", "head", "worker")
EVERY_STEPS = 10


@dataclass(frozen=True)
class Kill:
    """One kill and what the run made of it."""

    what: str
    attempt: int
    at_step: int
    resumed_from: int
    rolled_back_steps: int
    reason: str
    exit_code: int | None


def main() -> int:
    """0: nothing skipped, nothing trained twice, every roll-back within the save interval."""
    parser = argparse.ArgumentParser(prog="proof-kubernetes", description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--no-publish", action="store_true", help="leave docs/proof as it is")
    options = parser.parse_args()
    try:
        environment = cluster_environment()
        os.environ.update(environment)
        result = prove(Kubectl(environment, f"proof-{secrets.token_hex(3)}"), options.steps)
    except CommandError as error:
        print(f"proof-kubernetes: {error}; `make cluster-up` starts a cluster, dev/deploy.sh up the operator", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=2) + "\n"
    write(ROOT / "build/proof-kubernetes.json", text)
    if not options.no_publish and not result["violations"]:
        write(ROOT / "docs/proof/kubernetes.json", text)
        write(ROOT / "docs/proof/kubernetes.md", page(result))
        replace_block(ROOT / "README.md", line(result), "make proof-kubernetes")
    print(page(result))
    return 0 if not result["violations"] else 1


def write(path: Path, text: str) -> None:
    """Write a file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def prove(kubectl: Kubectl, steps: int) -> dict[str, Any]:
    """Run it and judge it. The namespace goes afterwards."""
    kubectl("create", "namespace", kubectl.namespace)
    case = Case(kubectl, "proof")
    try:
        kubectl("apply", "-f", "examples/copy-claim.yaml")
        # An environment that never fails: whatever is skipped was lost by us.
        case.apply(
            data={"builtin": "copyv", "seed": 0},
            generation__maxNewTokens=7,
            algorithm__grpo__steps=steps,
            algorithm__grpo__maxTrajectoryAgeSteps=2,
            checkpoint__everySteps=EVERY_STEPS,
            checkpoint__volume={"claimName": "copy-checkpoints"},
            failurePolicy={"maxRestarts": len(KILLS), "backoffSeconds": 1},
            ttlSecondsAfterFinished=600,
        )
        kills = [hurt(case, what, attempt, steps) for attempt, what in enumerate(KILLS, 1)]
        job = case.ends(1200)
        rows = metrics(case)
        return judge(job, kills, rows, steps, case)
    finally:
        case.close()
        kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


def hurt(case: Case, what: str, attempt: int, steps: int) -> Kill:
    """Kill a part in the middle of an interval between saves, and wait until the next attempt has done a step."""
    share = steps * attempt // (len(KILLS) + 2)
    before = case.reaches(share // EVERY_STEPS * EVERY_STEPS + EVERY_STEPS // 2, attempt, 900)
    if what == "driver":
        case.signal("head", names.DRIVER_ENTRYPOINT.removeprefix("python -m "), signal.SIGKILL)
    else:
        case.delete_pod(what)
    after = case.reaches(1, attempt + 1, 900)
    failure, status = after["status"]["lastFailure"], after["status"]
    return Kill(
        what,
        attempt,
        before["status"]["step"],
        status["resume"]["fromStep"],
        rolled_back(after),
        failure["reason"],
        failure.get("exitCode"),
    )


def rolled_back(job: Job) -> int:
    """Steps that the newest attempt's resume has undone."""
    return int((job["status"].get("rolledBack") or {}).get("steps", 0))


def metrics(case: Case) -> list[dict[str, Any]]:
    """The rows that the trainer wrote: the lineage of the weights, told by another part than the ledger."""
    path = f"{names.VOLUME_MOUNT_PATH}/{names.run_directory(case.kubectl.namespace, case.name)}/metrics.jsonl"
    return [json.loads(line) for line in case.kubectl("exec", case.pod("head"), "--", "cat", path).splitlines()]


def judge(job: Job, kills: list[Kill], rows: list[dict[str, Any]], steps: int, case: Case) -> dict[str, Any]:
    """All figures, and what is wrong with them."""
    status = job["status"]
    prompts = status["prompts"]
    lineage = {row["step"]: row["attempt"] for row in rows}  # a step that was rolled back is written again later
    attempts = [lineage[step] for step in sorted(lineage)]
    summary = next(one for one in status["conditions"] if one["type"] == "Succeeded")
    expected = {
        "the job succeeds": summary["status"] == "True",
        "no prompt is skipped": prompts.get("skipped", 0) == 0,
        "no prompt is trained twice": prompts.get("trainedTwice", 0) == 0,
        "every prompt is trained or filtered": prompts["handedOut"] == prompts["trained"] + prompts.get("filtered", 0),
        "each kill costs one restart": (status["attempt"], status["restarts"]) == (len(kills) + 1, len(kills)),
        "no roll-back is longer than the save interval": all(kill.rolled_back_steps <= EVERY_STEPS for kill in kills),
        "the lineage has every step": sorted(lineage) == list(range(1, steps + 1)),
        "attempts follow each other on the lineage": attempts == sorted(attempts),
    }
    return {
        "steps": steps,
        "save_every_steps": EVERY_STEPS,
        "kills": [asdict(kill) for kill in kills],
        "attempts": status["attempt"],
        "restarts": status["restarts"],
        "handed_out": prompts["handedOut"],
        "trained": prompts["trained"],
        "filtered": prompts.get("filtered", 0),
        "skipped": prompts.get("skipped", 0),
        "trained_twice": prompts.get("trainedTwice", 0),
        "rolled_back_steps": sum(kill.rolled_back_steps for kill in kills),
        "trail": case.trail,
        "violations": [what for what, holds in expected.items() if not holds],
    }


def line(result: dict[str, Any]) -> str:
    """The README's words."""
    return (
        f"Through Kubernetes ([trail](docs/proof/kubernetes.md)): {result['steps']:,} steps on real pods whose head, worker "
        f"and driver are killed {len(result['kills'])} times in all: {result['handed_out']:,} prompts handed out, "
        f"**{result['skipped']} skipped, {result['trained_twice']} trained twice**, {result['restarts']} restarts, "
        f"{result['rolled_back_steps']} steps rolled back.\n"
    )


def page(result: dict[str, Any]) -> str:
    """The result for people."""
    kills = "\n".join(
        f"| {kill['attempt']} | {kill['what']} | {kill['at_step']} | {kill['resumed_from']} | {kill['rolled_back_steps']} "
        f"| {kill['reason']}{'' if kill['exit_code'] is None else f', exit code {kill["exit_code"]}'} |"
        for kill in result["kills"]
    )
    columns = ("handed_out", "trained", "filtered", "skipped", "trained_twice", "attempts", "restarts", "rolled_back_steps")
    figures = " | ".join([*(str(result[name]) for name in columns), f"{result['save_every_steps']} steps"])
    return f"""# The proof through Kubernetes

`make proof-kubernetes` trains the copy task with answers of differing lengths on real pods, and in turn deletes its head pod
and its worker pod by force and kills its driver (SIGKILL). A pod that is deleted by force has a second or two left, in which
the driver mostly saves. Written by that command; the condition trail is in [kubernetes.json](kubernetes.json).

| prompts handed out | trained | filtered | skipped | trained twice | attempts | restarts | steps rolled back | saved every |
|---|---|---|---|---|---|---|---|---|
| {figures} |

| attempt | killed | at step | the next one resumed from | steps rolled back | what the status said |
|---|---|---|---|---|---|
{kills}

{"Nothing is wrong with it." if not result["violations"] else "Violated: " + "; ".join(result["violations"])}
"""


if __name__ == "__main__":
    sys.exit(main())
