"""The loop of an agent: takes rollouts, has so many played at once, reports what they are worth.

An agent in Python writes `play`, a coroutine from one rollout to its result, and calls `run(play)`; `hints` is an example.
Results that are there at about the same time are reported in one request, whose answer brings the next rollouts. A rollout
counts against `at_once` from when it is taken until it is reported, so the trainer knows of every one that it gives out that
its agent is about to ask.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

#: Rollouts that are played at once.
AT_ONCE = 64
#: A result waits for others for as long as each comes within so many seconds of the one before, and so many in all.
MOMENT_SECONDS = 0.002
LONGEST_GATHER_SECONDS = 0.02
#: Statuses of a result that are no news: accepted, and given up by the trainer meanwhile.
_QUIET = (200, 410)

#: Every report asks for rollouts in the place of those it reports. A request of its own is made when so large a part of all
#: could be played, or after so many seconds without a report: whoever takes them singly has them answered singly.
HUNGRY_PART = 4
PATIENCE_SECONDS = 0.1
#: Objects made since the last look for garbage among the young ones: those of turns that wait are no garbage.
YOUNG_OBJECTS = 50_000
#: Rollouts and results that one request may ask for and bring.
MOST_IN_ONE = 256

Rollout = dict[str, Any]
#: `{"reward": 0.5, "correct": False}`, or `{"error": "why there is none"}`.
Result = dict[str, Any]
#: Plays one rollout with the run's session, which sends the token, or with a client of its own. An exception ends the agent.
Play = Callable[[aiohttp.ClientSession, Rollout], Coroutine[Any, Any, Result]]


def run(play: Play, at_once: int = AT_ONCE) -> None:
    """Play until the run is over. Where the servers are and where the token is stands in the environment."""
    url = os.environ["RLJOB_DP_OPENAI_SERVER_BASE_URLS"].split(",")[0]
    token = Path(os.environ["RLJOB_CONTROL_TOKEN_FILE"]).read_text().strip()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
    asyncio.run(serve(play, url, token, at_once))


async def serve(play: Play, url: str, token: str, at_once: int = AT_ONCE) -> None:
    """The same with a base URL and a token."""
    headers = {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(limit=at_once + 2)  # turns, a report, and the request that waits for rollouts
    timeout = aiohttp.ClientTimeout(total=None)  # a turn may wait while the model is trained
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        await Loop(session, url, play, at_once).run()


class AgentError(Exception):
    """The trainer does not answer as it should."""


class Loop:
    """At most `at_once` rollouts, from `run` to the end of the run."""

    def __init__(self, session: aiohttp.ClientSession, url: str, play: Play, at_once: int) -> None:
        self._session = session
        self._url = url
        self._play = play
        self._at_once = at_once
        self._playing: set[asyncio.Task[Result]] = set()
        self._results: list[Result] = []
        #: Rollouts that a request under way may bring.
        self._asked = 0
        self._over = False
        self._failure: BaseException | None = None
        #: Something has happened: a rollout is played, or the request that waits for some is answered.
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Play until the run is over. Raises what `play` raised, AgentError and aiohttp's errors."""
        waiting: asyncio.Task[None] | None = None
        patient = True
        try:
            while not self._over:
                self._news.clear()
                if self._failure is not None:
                    raise self._failure
                if self._results:
                    await self._gather()
                    await self._report()
                elif waiting is None and self._free > (self._at_once // HUNGRY_PART if patient else 0):
                    patient = True
                    waiting = asyncio.create_task(self._wait_for_some(self._free))
                    waiting.add_done_callback(lambda _: self._news.set())
                elif waiting is not None and waiting.done():
                    await waiting
                    waiting = None
                else:
                    patient = await self._something(PATIENCE_SECONDS if waiting is None and self._free else None)
        finally:
            for task in filter(None, [*self._playing, waiting]):
                task.cancel()

    async def _something(self, seconds: float | None) -> bool:
        """Wait for news; False when there is none within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    @property
    def _free(self) -> int:
        """Rollouts that may be taken."""
        return min(self._at_once - len(self._playing) - len(self._results) - self._asked, MOST_IN_ONE)

    async def _gather(self) -> None:
        """Let results of about the same time come together: until a moment passes without one, or nothing is played."""
        loop = asyncio.get_running_loop()
        end, count = loop.time() + LONGEST_GATHER_SECONDS, 0
        while self._playing and count < len(self._results) and loop.time() < end:
            count = len(self._results)
            await asyncio.wait(self._playing, timeout=MOMENT_SECONDS)

    async def _report(self) -> None:
        """Tell results, and play what the trainer gives in their place."""
        results, self._results = self._results[:MOST_IN_ONE], self._results[MOST_IN_ONE:]
        with self._asking(most := self._free):
            body = {"results": results, "next": most}
            async with self._session.post(f"{self._url}/rollouts/results", json=body) as response:
                answer = await _answer_of(response)
        for said in answer["results"]:
            if said["status"] not in _QUIET:
                print(f"{said['id']}: {said['status']} {said['error']['message']}", file=sys.stderr)
        self._begin(answer)

    async def _wait_for_some(self, most: int) -> None:
        """Wait until the trainer has rollouts, and play them."""
        with self._asking(most):
            async with self._session.get(f"{self._url}/rollouts/next", params={"max": most}) as response:
                answer = await _answer_of(response)
        self._begin(answer)

    @contextmanager
    def _asking(self, most: int) -> Iterator[None]:
        self._asked += most
        try:
            yield
        finally:
            self._asked -= most

    def _begin(self, answer: dict[str, Any]) -> None:
        self._over = self._over or answer["over"]
        for rollout in answer["rollouts"]:
            task = asyncio.create_task(self._play(self._session, rollout))
            self._playing.add(task)
            task.add_done_callback(partial(self._played, rollout["id"]))

    def _played(self, name: str, task: asyncio.Task[Result]) -> None:
        self._playing.discard(task)
        if task.cancelled():
            return
        if (failure := task.exception()) is not None:
            self._failure = failure
        else:
            self._results.append({"id": name, **task.result()})
        self._news.set()


async def _answer_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    if response.status != 200:
        said = (await response.text())[:500]
        raise AgentError(f"a request for rollouts, or with results, was answered with {response.status}: {said}")
    answer: dict[str, Any] = await response.json()
    return answer
