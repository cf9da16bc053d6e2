"""A front whose engine is a few lines of Python: what a client sees, without a model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.data.builtin import load_builtin
from rljob_workload.runtime.house import limits_of
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.server.desk import Desk
from rljob_workload.server.front import Agents, Front
from rljob_workload.server.openai import Limits

ROOT = Path(__file__).parents[3]
TOKEN = "correct-horse"
SAID = (4, 5, 6)  # "123"
ALLOWED = {"Authorization": f"Bearer {TOKEN}"}


def agent_spec(**changes: Any) -> RLJobSpec:
    """The example's spec with an agent, and changed fields of generation."""
    raw = yaml.safe_load((ROOT / "examples" / "http-agent.yaml").read_text())["spec"]
    raw["generation"] |= changes
    verdict = judge("agent", raw)
    assert verdict.spec is not None, verdict.findings
    return verdict.spec


def limits(**changes: Any) -> Limits:
    spec = agent_spec(**changes)
    return limits_of(spec, load_builtin("copy3"), "agent")


@dataclass
class Engine:
    """Takes what waits at the desk and answers it with SAID, while it is up."""

    monitor: Monitor
    desk: Desk
    replicas: int
    up: bool = True
    seen: list[Request] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        while not self._over.wait(0.002):
            for replica in range(self.replicas):
                with self.monitor.changing():
                    if self.up:
                        self._answer(self.desk.take(replica))

    def _answer(self, requests: list[Request]) -> None:
        self.seen += requests
        for request in requests:
            said = SAID[: request.sampling.new_tokens if request.sampling else None]
            one = Answer(request.tag, said, (-0.25,) * len(said), ((0, 7),))
            self.desk.arrive([one] * request.answers)

    def close(self) -> None:
        self._over.set()


@dataclass
class Served:
    """A running front."""

    urls: list[str]
    engine: Engine
    front: Front

    @property
    def url(self) -> str:
        return self.urls[0]


@contextmanager
def served(
    directory: Path,
    *,
    replicas: int = 1,
    agents: Agents | None = None,
    monitor: Monitor | None = None,
    desk: Desk | None = None,
    answer_seconds: float = 30.0,
) -> Iterator[Served]:
    """A front on the loopback device with its engine."""
    token = directory / "token"
    token.write_text(TOKEN)
    monitor, desk = monitor or Monitor(), desk or Desk()
    front = Front(monitor, desk, limits(), agents, token_file=str(token), answer_seconds=answer_seconds, rollout_seconds=60.0)
    engine = Engine(monitor, desk, replicas)
    thread = threading.Thread(target=engine.work, daemon=True)
    urls = front.start("127.0.0.1", 0, replicas)
    thread.start()
    try:
        yield Served(urls, engine, front)
    finally:
        front.close()
        engine.close()
        thread.join(5)


async def post(server: Served, body: Any, path: str = "/completions", headers: dict[str, str] = ALLOWED) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(server.url + path, data=data, headers=headers) as response:
        return response.status, await response.json()


def waiting(server: Served) -> int:
    with server.engine.monitor.reading():
        return len(server.engine.desk._tickets)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.005)
