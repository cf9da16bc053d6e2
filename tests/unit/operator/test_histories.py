"""A job's life through random histories: crashes of the operator, lost requests, killed pods, and other people's hands."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_operator.api import ApiError
from rljob_operator.world import Driver

from .builders import FINISHED, found, report, spec
from .fakes import FakeCluster, FakeRay, gone, later
from .life import Operator, state

MOVES = [
    "pass",
    "pass",
    "pass",
    "blind pass",
    "restart",
    "kuberay",
    "ready",
    "ready",
    "time",
    "pods go",
    "kill head",
    "kill worker",
    "driver fails",
    "driver ends",
    "progress",
    "api down",
    "ray down",
    "ray up",
    "swallow",
    "edit",
    "drop cluster",
    "restart before clusters are listed",
    "strip label",
    "clock back",
    "preflight ends",
    "preflight ends",
    "preflight refuses",
    "preflight dies",
    "drain worker",
    "suspend",
    "resume",
    "late pod",
    "later pod",
    "orphan pods",
    "hold",
    "release",
    "clock forward",
    "break spec",
    "mend spec",
    "claim goes",
    "claim comes",
    "quota",
    "quota ends",
    "scale up",
    "hold secret",
    "release secret",
    "other operator",
    "two operators",
    "preflight is deleted",
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(MOVES), min_size=20, max_size=120), st.booleans())
def test_attempts_never_overlap_and_nothing_is_submitted_twice_whatever_happens(moves: list[str], preflight: bool) -> None:
    asyncio.run(_live(moves, preflight))


async def _live(moves: list[str], preflight: bool) -> None:
    # FakeCluster and FakeRay raise BrokenError when an attempt overlaps another, when its cluster comes before its preflight's
    # end, or when a driver is submitted twice.
    kube = FakeCluster(spec(failurePolicy={"maxRestarts": 1000}))
    ray = FakeRay(kube)
    operator, other = Operator(kube, ray, preflight=preflight), Operator(kube, ray, preflight=preflight)
    attempts = [0]
    for move in moves:
        match move:
            case "other operator":
                await other.step()
            case "two operators":
                await asyncio.gather(operator.step(), other.step())
            case _:
                await _move(move, kube, ray, operator)
        attempts.append(kube.status().get("attempt", 0))
    assert attempts == sorted(attempts)
    assert len(set(ray.submitted)) == len(ray.submitted)
    assert kube.status_writes <= len(moves) * 3
    await _settle(kube, ray, operator)
    assert state(kube) == "TargetReached"
    assert (kube.clusters, kube.pods, kube.secrets) == ({}, {}, {}), "something is left behind"


async def _move(move: str, kube: FakeCluster, ray: FakeRay, operator: Operator) -> None:
    name = next(iter(kube.clusters), None)
    match move:
        case "pass":
            await operator.step()
        case "blind pass":
            await operator.step(told=False)
        case "restart":
            operator.restart()
        case "kuberay":
            kube.kuberay_makes_pods()
        case "ready":
            kube.pods_get_ready()
        case "time":
            later(kube, 30)
        case "pods go":
            kube.pods_without_cluster_go()
        case "kill head" | "kill worker":
            pod = f"{name}-head" if move == "kill head" else f"{name}-workers-worker"
            if pod in kube.pods:
                kube.kill_pod(pod)
        case "driver fails" | "driver ends" if (name, name) in ray.jobs:
            assert name is not None
            failed = move == "driver fails"
            ray.end(name, "FAILED" if failed else "SUCCEEDED", 73 if failed else 0)
            if not failed:
                ray.reports[name] = report(500, int(name.rsplit("-", 1)[1]), finished=FINISHED)
        case "progress" if name is not None and ray.jobs.get((name, name)) == Driver("RUNNING"):
            known = ray.reports.get(name)
            ray.reports[name] = report((known.step if known else 0) + 7, int(name.rsplit("-", 1)[1]))
        case "api down":
            kube.fail_next.append(gone())
        case "ray down" | "ray up":
            ray.reachable = move == "ray up"
        case "swallow":
            ray.swallow_answers = 1
        case "edit":
            kube.edit("copy", kube.jobs["copy"]["spec"])
        case "restart before clusters are listed":
            operator.restart()
            for one in kube.clusters:
                operator.store.clusters.drop(("default", one))
        case "strip label" if name is not None:
            kube.clusters[name]["metadata"]["labels"] = {}
            kube._touch(kube.clusters[name])
        case "clock back":
            later(kube, -45)
        case "preflight ends":
            kube.preflights_end(found("Fresh"))
        case "preflight refuses":
            kube.preflights_end(found("Corrupt"))
        case "preflight dies":
            kube.preflights_end(None)
        case "drain worker" if f"{name}-workers-worker" in kube.pods:
            kube.drain_pod(f"{name}-workers-worker")
        case "suspend" | "resume":
            kube.edit("copy", kube.jobs["copy"]["spec"] | {"suspend": move == "suspend"})
        case "drop cluster" if name is not None:
            del kube.clusters[name]
        case _:
            _meddle(move, kube)


def _meddle(move: str, kube: FakeCluster) -> None:
    """What other people and other machines do."""
    name = next(iter(kube.clusters), None)
    match move:
        case "late pod" | "later pod" if name is None:  # KubeRay had not seen yet that its cluster is gone
            attempt = kube.status().get("attempt", 0) - (move == "later pod")
            if attempt > 0:
                kube.late_pod(f"copy-{attempt}")
        case "orphan pods" if name is not None:
            kube.orphan_pods(name)
        case "hold" | "release":
            kube.held = move == "hold"
        case "clock forward":
            later(kube, 4000)
        case "break spec" | "mend spec":
            broken = spec(generation__parallelism={"tensor": 2})["generation"]
            whole = kube.jobs["copy"]["spec"]
            kube.edit("copy", whole | {"generation": broken if move == "break spec" else spec()["generation"]})
        case "claim goes" | "claim comes":
            kube.claims = {"copy-checkpoints"} if move == "claim comes" else set()
        case "quota" | "quota ends":
            kube.refuse_create = ApiError(403, "Forbidden", "exceeded quota", "POST") if move == "quota" else None
        case "scale up" if name is not None:
            kube.clusters[name]["spec"]["workerGroupSpecs"][0]["replicas"] = 2
            kube._touch(kube.clusters[name])
        case "hold secret" | "release secret":
            kube.hold_secrets(move == "hold secret")
        case "preflight is deleted":
            kube.preflights_are_deleted()


async def _settle(kube: FakeCluster, ray: FakeRay, operator: Operator) -> None:
    """Whatever happened, a quiet world brings the job to its end."""
    ray.reachable, kube.fail_next = True, []
    for move in ("resume", "release", "mend spec", "claim comes", "quota ends", "release secret"):
        await _move(move, kube, ray, operator)
    for _ in range(60):
        await operator.step()
        kube.pods_without_cluster_go()
        kube.kuberay_makes_pods()
        kube.pods_get_ready()
        kube.preflights_end(found("Fresh"))
        later(kube, 20)
        for cluster, submission in list(ray.jobs):
            if cluster in kube.clusters and ray.jobs[cluster, submission].status == "RUNNING":
                await _move("driver ends", kube, ray, operator)
        if kube.status().get("finishTime") and not kube.pods:
            return
