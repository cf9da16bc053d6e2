"""Control calls get through however many data calls an actor has queued, on the trainer's own actor classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._common.ray_constants import DEFAULT_MAX_CONCURRENCY_ASYNC

from rljob_workload.core.cap import ACTOR_CALLS
from rljob_workload.core.slices import SliceGoal
from rljob_workload.runtime.launch import collector_actor, rank_actor
from rljob_workload.runtime.rank import RankPlace

from .conftest import copy_spec

#: More than Ray runs at once in any actor.
QUEUED = 2000


@pytest.fixture
def private_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        configure_logging=False,
    )
    yield
    ray.shutdown()


def none_done(calls: list[Any]) -> bool:
    done, _ = ray.wait(calls, num_returns=1, timeout=0)
    return not done


def test_the_core_knows_rays_limit() -> None:
    assert ACTOR_CALLS == DEFAULT_MAX_CONCURRENCY_ASYNC


@pytest.mark.usefixtures("private_ray")
def test_control_calls_are_answered_while_two_thousand_data_calls_wait(tmp_path: Path) -> None:
    raw = copy_spec().to_wire()
    # Rank 0 of 2 waits in `setup` for a second rank that never comes: real work that blocks, in the real engine's actor.
    rank = rank_actor().options(num_cpus=0).remote(RankPlace(0, 2, 0, 1, str(tmp_path)), raw)
    address = ray.get(rank.address.remote(), timeout=60)
    data = [rank.setup.remote(address), *(rank.decode.remote([], SliceGoal(1, iterations=1)) for _ in range(QUEUED))]
    collector = collector_actor().options(num_cpus=0).remote(raw, str(tmp_path), 1)
    # Its first slice is queued behind the rank's `setup`: a thousand of these run, the others wait for them.
    ray.get(collector.start.remote([[rank]], 0), timeout=60)
    takes = [collector.take.remote(1) for _ in range(QUEUED)]
    data += takes
    try:
        for _ in range(20):
            status = ray.get(rank.status.remote(), timeout=60)
            assert status["phase"] in ("Starting", "Loading")
        for _ in range(20):
            assert ray.get(collector.status.remote(), timeout=60)["state"] == "Collecting"
        ray.get(collector.interrupt.remote(7), timeout=60)
        assert none_done(data), "a data call ended: then the control calls may have waited for it"
    finally:
        ray.kill(rank)
        ray.kill(collector)
