"""Killing the operator at a chosen request: a proxy on its way to the API server and to Ray, and the life of one job.

Requests are named by method, path and how often the same was asked before, so that a trace of one life names moments that
another life comes to as well. Watches are no moments of their own: they carry what the other requests caused.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from aiohttp import web

from rljob_api import names
from rljob_api.preflight import PreflightReport
from rljob_api.progress import Finished, ProgressReport, PromptCounts
from rljob_operator.api import ApiError

from .conftest import Space, condition, eventually, ready_status, write_kubeconfig
from .gate import Gate
from .spawn import Spawned

When = Literal["before it is forwarded", "after its reply was received"]
WHEN: tuple[When, When] = ("before it is forwarded", "after its reply was received")

ENDS_WITHIN = 240.0


@dataclass(frozen=True, order=True)
class Call:
    """A request of a life: `number` counts the same requests before it."""

    method: str
    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.method} {self.path} #{self.number}"


class CrashProxy(Gate):
    """Forwards to the API server and, below /ray, to the fake Ray; notes each request and kills at one of them."""

    def __init__(self, space: Space, connection: Any) -> None:
        super().__init__(connection)
        self.open = True
        self.calls: list[Call] = []
        self.target: tuple[Call, When] | None = None
        self.operator: Literal["living", "dying", "dead"] = "living"
        self._changed = asyncio.Condition()
        self.process: Spawned | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._namespace = space.name
        self._ray = space.ray_access.partition("/{")[0]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        path = self._named(request)
        if "watch" in request.query or path is None:
            return await super()._forward(request)
        call = Call(request.method, path, self._counts[request.method, path])
        self._counts[request.method, path] += 1
        self.calls.append(call)
        if self._strikes(call, "before it is forwarded"):
            return await self._kill()
        answer = await self._answer(request)
        if self._strikes(call, "after its reply was received"):
            return await self._kill()
        return answer

    def disarm(self) -> bool:
        """Kill nothing from now on; True where the operator was killed, or is about to be."""
        self.target = None
        return self.operator != "living"

    def _strikes(self, call: Call, when: When) -> bool:
        return self.target == (call, when) and self.operator == "living"

    async def killed(self) -> None:
        """Wait until the operator has been killed and is gone."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.operator == "dead")

    def last_like(self, call: Call) -> Call:
        """The last request of this life that differs from that one in its number only; that one where there is none."""
        same = [one for one in self.calls if (one.method, one.path) == (call.method, call.path)]
        return same[-1] if same else call

    def _named(self, request: web.Request) -> str | None:
        """What of the path stays the same from life to life; None for what belongs to the process, not to a job."""
        path = request.path.replace(self._namespace, "NAMESPACE")
        path = re.sub(r"-[0-9a-f]{8}(?=/|$)", "-UID", path)
        path = re.sub(r"(?<=/pods/)(\S+-(?:head|worker))-[a-z0-9]{5}$", r"\1-RANDOM", path)
        if not request.path.startswith("/ray/") and "NAMESPACE" not in path:
            return None
        selector = request.query.get("fieldSelector") or request.query.get("labelSelector") or ""
        selector = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UID", selector)
        if request.query.get("limit"):  # the listings of the watches and of the resync
            return None
        return f"{path}?{selector}" if selector else path

    async def _kill(self) -> web.StreamResponse:
        assert self.process is not None
        self.operator = "dying"
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        async with self._changed:
            self.operator = "dead"
            self._changed.notify_all()
        return web.Response(status=502)  # nobody reads it

    async def _answer(self, request: web.Request) -> web.Response:
        """Forward and read the whole reply."""
        assert self._session is not None
        kept = ("Accept", "Content-Type") + (("Authorization",) if request.path.startswith("/ray/") else ())
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        ray = request.path.startswith("/ray/")
        url = self._ray + request.path_qs.removeprefix("/ray") if ray else self._connection.server + request.path_qs
        body = await request.read() or None
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            content = await answer.read()
            kind = answer.headers.get("Content-Type", "text/plain")
            return web.Response(status=answer.status, body=content, headers={"Content-Type": kind})


@dataclass
class Life:
    """One job from creation to its end: its first attempt fails, its second completes. A killed operator is started again."""

    space: Space
    spec: dict[str, Any]
    proxy: CrashProxy
    address: str
    target: tuple[Call, When] | None = None
    starts: int = 0
    asked: Counter[str] = field(default_factory=Counter)

    async def live(self) -> None:
        """Live it to the end and check what it comes to, once more where the operator was killed (the end is moments too)."""
        await self.space.claim()
        self.proxy.target = self.target
        self._start()
        player = asyncio.create_task(self._play())
        keeper = asyncio.create_task(self._keep_running())
        try:
            await self.space.apply(self.spec)
            await self._check()
            if self.proxy.disarm():
                await keeper
                await self._check()
        finally:
            for task in (player, keeper):
                task.cancel()
            await asyncio.gather(player, keeper, return_exceptions=True)

    async def _check(self) -> None:
        await check_end(
            self.space, await self.space.until(lambda job: "finishTime" in job.get("status", {}), "the end", ENDS_WITHIN)
        )
        await nothing_left(self.space)

    def _start(self) -> None:
        self.starts += 1
        kubeconfig = Path(self.space.environment["RLJOB_TEST_LOGS"]) / "proxy"
        self.proxy.process = self.space.fork_operator(
            KUBECONFIG=write_kubeconfig(kubeconfig, {"server": self.address}, {}),
            RLJOB_RAY_ACCESS=f"{self.address}/ray/{{namespace}}/{{service}}/{{port}}",
            RLJOB_PREFLIGHT_IMAGE="localhost/rljob-operator:dev",
        )

    async def _keep_running(self) -> None:
        await self.proxy.killed()
        self._start()

    async def _play(self) -> None:
        """Kubelet, trainer and preflight, each by what it finds: a killed operator changes nothing for them."""
        while True:
            try:
                for pod in await self.space.items("pods"):
                    await self._play_pod(pod)
                await self._play_drivers()
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
            await asyncio.sleep(0.1)

    async def _play_pod(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        if pod["status"]["phase"] != "Pending" or "deletionTimestamp" in metadata:
            return
        if metadata["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_PREFLIGHT:
            attempt = int(metadata["labels"][names.LABEL_ATTEMPT])
            await self.space.set_pod_status(metadata["name"], preflight_status(pod, attempt))
        else:
            await self.space.set_pod_status(metadata["name"], ready_status())

    async def _play_drivers(self) -> None:
        """A driver that was submitted trains; the first one dies, the second one finishes."""
        ray = self.space.ray
        for submission, driver in list(ray.drivers.items()):
            if driver["status"] != "RUNNING":
                continue
            attempt = int(submission.rpartition("-")[2])
            if submission not in ray.reports:
                ray.reports[submission] = await self._report(attempt, step=10 * attempt)
                ray.served[submission] = 0
            elif ray.served[submission] < 2:
                continue
            elif attempt == 1:
                ray.end(submission, "FAILED", 73, "rank 0 died")
            elif ray.reports[submission].finished is None:
                done = Finished(reason="Completed", message="all steps are done")
                ray.reports[submission] = await self._report(attempt, step=500, finished=done)
            else:
                ray.end(submission, "SUCCEEDED", 0)

    async def _report(self, attempt: int, step: int, **changes: Any) -> ProgressReport:
        return ProgressReport(
            name="copy",
            namespace=self.space.name,
            uid=(await self.space.job())["metadata"]["uid"],
            attempt=attempt,
            phase="Training",
            updated_time="2026-01-01T00:00:00Z",
            step=step,
            total_steps=500,
            prompts=PromptCounts(handed_out=16 * step, trained=16 * step),
            **changes,
        )


def preflight_status(pod: dict[str, Any], attempt: int) -> dict[str, Any]:
    """The status of a preflight that found nothing on the volume."""
    found = PreflightReport(outcome="Fresh", token=attempt, message="nothing to go on from")
    name = pod["spec"]["containers"][0]["name"]
    now = "2026-01-01T00:00:00Z"
    ended = {"exitCode": 0, "reason": "Completed", "message": found.model_dump_json(by_alias=True, exclude_none=True)}
    state = {"terminated": {**ended, "startedAt": now, "finishedAt": now}}
    container = {"name": name, "ready": False, "restartCount": 0, "image": "x", "imageID": "x", "state": state}
    return {"phase": "Succeeded", "containerStatuses": [container]}


async def check_end(space: Space, job: dict[str, Any]) -> None:
    """The end that every life comes to, whatever happened to the operator."""
    status = job["status"]
    summary = condition(job, "Succeeded")
    assert (summary["status"], summary["reason"]) == ("True", "Completed"), yaml.safe_dump(status)
    assert (status["attempt"], status["restarts"], status["step"]) == (2, 1, 500), yaml.safe_dump(status)
    assert status["lastFailure"]["attempt"] == 1
    assert status["lastFailure"]["exitCode"] == 73
    assert status["prompts"]["trained"] == status["prompts"]["handedOut"] == 8000
    taken = [post["submission_id"] for post in space.ray.posts]
    assert taken == ["copy-1", "copy-2"], f"submissions: {taken}"


async def nothing_left(space: Space) -> None:
    """Wait until what a finished job must not leave is gone."""
    left: list[str] = []

    async def gone() -> bool:
        nonlocal left
        left = await left_behind(space)
        return not left

    await eventually(gone, lambda: f"left behind: {left}{space.logs()}", 60)


async def left_behind(space: Space) -> list[str]:
    """What a finished job must not leave."""
    kinds = ("rayclusters", "pods", "secrets")
    return [f"{kind}/{one['metadata']['name']}" for kind in kinds for one in await space.items(kind)]
