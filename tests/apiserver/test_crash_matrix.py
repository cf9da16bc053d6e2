"""SIGKILL of the operator at every request that one job's life makes, just before it is forwarded and just after its reply.

`make test-slow` kills at all of them (RLJOB_CRASHES=all), `make test` at a spread of ten. They come from a recorded life.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dev.kube import ROOT

from .conftest import Space
from .crash import WHEN, Call, CrashProxy, Life, When
from .fake_ray import FakeRay

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(5400)]

AT_ONCE = 6
"""Lives at the same time: each waits for KubeRay and for its operator's start most of the time."""

TRIES = 4
"""A life may be told of things in fewer pieces than the recorded one, and repeat a request less often."""


@asynccontextmanager
async def life(space: Space, spec: dict[str, Any], logs: Path, target: tuple[Call, When] | None) -> AsyncIterator[Life]:
    """A life in a namespace of its own."""
    ray = FakeRay()
    name = f"{space.name}-{secrets.token_hex(3)}"
    await space.kube.request("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": name}})
    await asyncio.to_thread(logs.mkdir)
    environment = {**space.environment, "RLJOB_TEST_LOGS": str(logs)}
    own = replace(space, name=name, ray=ray, ray_access=await ray.start(), environment=environment, operators=[])
    proxy = CrashProxy(own, await space.kube.connection())
    try:
        yield Life(own, spec, proxy, await proxy.start(), target)
    finally:
        for process in own.operators:
            process.kill()
            await asyncio.to_thread(process.wait)
        await proxy.stop()
        await ray.stop()
        await space.kube.request("DELETE", f"/api/v1/namespaces/{name}")


async def survive(space: Space, spec: dict[str, Any], logs: Path, call: Call, when: When) -> str:
    """Live with a kill at that moment; returns what is wrong, or nothing."""
    for number in range(TRIES):
        async with life(space, spec, logs.with_name(f"{logs.name}-{number}"), (call, when)) as one:
            try:
                await one.live()
            except (AssertionError, pytest.fail.Exception) as error:
                return f"killed at {call}, {when}: {error}"
        if one.proxy.operator != "living":
            return ""
        # This life made the request less often than the recorded one: its last one is that moment, then.
        call = one.proxy.last_like(call)
    return f"{call} did not come again in {TRIES} lives"


def chosen(moments: list[tuple[Call, When]]) -> list[tuple[Call, When]]:
    """All of them, or ten spread over the life that end with its last."""
    wanted = os.environ.get("RLJOB_CRASHES", "10")
    if wanted == "all":
        return moments
    count = int(wanted)
    return [moments[(number + 1) * len(moments) // count - 1] for number in range(count)]


async def test_a_killed_operator_comes_to_the_same_end_wherever_it_is_killed(
    space: Space, spec: dict[str, Any], tmp_path: Path
) -> None:
    spec = {**spec, "failurePolicy": {"backoffSeconds": 1, "maxRestarts": 3}}
    async with life(space, spec, tmp_path / "trace", None) as recorded:
        await recorded.live()
        calls = list(dict.fromkeys(recorded.proxy.calls))
    assert len(calls) >= 20, calls
    moments = [(call, when) for call in calls for when in WHEN]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, call: Call, when: When) -> str:
        async with gate:
            said = await survive(space, spec, tmp_path / f"life-{index}", call, when)
            print(f"{index}: {call}, {when}: {said.partition(chr(10))[0] or 'survived'}", flush=True)
            return said

    wrong = [
        said for said in await asyncio.gather(*(one(index, *moment) for index, moment in enumerate(chosen(moments)))) if said
    ]
    path = ROOT / "build/crash-matrix.json"
    path.parent.mkdir(exist_ok=True)
    lived = len(chosen(moments))
    result = {"calls": [str(call) for call in calls], "moments": len(moments), "killed": lived, "wrong": wrong}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{lived} of {len(moments)} moments: the operator was killed there, and the job came to the same end")
    assert not wrong, "\n\n".join(wrong)
