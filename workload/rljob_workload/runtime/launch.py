"""Placing the actors: the collector beside the driver, the ranks on the worker nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api.exitcodes import ExitCode
from rljob_api.layout import layout_of
from rljob_api.names import RESOURCE_HEAD, RESOURCE_NODE
from rljob_workload.runtime.collector import Collector
from rljob_workload.runtime.concurrency import actor_class
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.rank import Rank, RankPlace
from rljob_workload.runtime.settings import Attempt
from rljob_workload.server.place import ServerPlace

#: Ray would show each actor its own GPU only.
SEE_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@dataclass(slots=True)
class Actors:
    """The handles of one attempt."""

    ranks: list[Any]
    collector: Any
    group: Any
    #: Ranks that answer together (`Layout.replicas`).
    replicas: list[list[Any]]

    def kill(self) -> None:
        """End all actors of this attempt."""
        for actor in [*self.ranks, self.collector]:
            ray.kill(actor)
        remove_placement_group(self.group)


def rank_actor() -> Any:
    """The actor class of ranks: work one call after the other, control calls in threads beside it."""
    return actor_class(Rank, control_calls=2)


def collector_actor() -> Any:
    """The actor class of the collector: control calls have an event loop of their own."""
    return actor_class(Collector, control_calls=16)


def _require_gpus(wanted: int) -> None:
    """Where all ranks are on this machine (`rljob local`), no other one will come. Raises RunError (ENVIRONMENT_MISSING)."""
    there = int(ray.cluster_resources().get("GPU", 0))
    if there < wanted:
        raise RunError(
            ExitCode.ENVIRONMENT_MISSING,
            f"spec.trainer.gpusPerNode asks for {wanted} GPUs in all, and this machine has {there}; set it to 0 for CPU ranks",
        )


def launch(attempt: Attempt, *, spread: bool, place: ServerPlace | None = None) -> Actors:
    """Reserve one bundle per node and start the actors there. `spread`: insist on different machines.

    `place`: of the HTTP server, where the spec wants one.
    """
    layout = layout_of(attempt.spec)
    timeout = float(attempt.spec.deadlines.provisioning_seconds)
    per_node = layout.ranks_per_node
    if attempt.spec.trainer.gpus_per_node and not spread:
        _require_gpus(layout.world)
    bundle = {"CPU": per_node, RESOURCE_NODE: per_node}
    if attempt.spec.trainer.gpus_per_node:
        bundle["GPU"] = per_node
    group = placement_group([bundle] * layout.nodes, strategy="STRICT_SPREAD" if spread else "PACK")
    ready, _ = ray.wait([group.ready()], timeout=timeout)
    if not ready:
        raise RunError(
            ExitCode.RANKS_UNAVAILABLE,
            f"no place for {layout.world} ranks within {timeout:g} s: need {layout.nodes} nodes with {bundle} each, "
            f"Ray has {ray.cluster_resources()}",
        )
    raw = attempt.spec.to_wire()
    # Each rank sees all GPUs of its node and takes that of LOCAL_RANK: memory that the GPUs share is set up by their numbers.
    runtime_env = {"env_vars": {SEE_ALL_GPUS: "1"}} if attempt.spec.trainer.gpus_per_node else None
    # Without machines of their own (`rljob local`) all nodes are this one.
    on_node = per_node if spread else layout.world
    ranks = [
        rank_actor()
        .options(
            name=f"rank-{rank}",
            num_cpus=1,
            num_gpus=1 if attempt.spec.trainer.gpus_per_node else 0,
            runtime_env=runtime_env,
            resources={RESOURCE_NODE: 1},
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank // per_node),
        )
        .remote(RankPlace(rank, layout.world, rank % on_node, attempt.number, str(attempt.directory)), raw)
        for rank in range(layout.world)
    ]
    collector = (
        collector_actor()
        .options(
            name="collector",
            num_cpus=0,
            resources={RESOURCE_HEAD: 1},
            max_restarts=0,
        )
        .remote(raw, str(attempt.directory), attempt.number, place)
    )
    replicas = [[ranks[rank] for rank in members] for members in layout.replicas()]
    return Actors(ranks, collector, group, replicas)
