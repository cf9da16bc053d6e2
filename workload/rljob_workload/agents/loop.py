"""The loop of an agent: takes rollouts, has so many played at once, reports what they are worth.

An agent in Python writes `play`, a coroutine from one rollout to its result, and calls `run(play)`; `hints` is an example.
Results that are there at about the same time are reported in one request, whose answer brings the next rollouts. A rollout
counts against `at_once` from when it is taken until it is reported, so the trainer knows of every one that it gives out that
its agent is about to ask.

One bad result, a play that hangs, or a server that is full or away for a while costs the rollouts concerned, not the agent.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from rljob_workload.agents.results import MOST_ERROR, UnusableError, result_of

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

#: A request for rollouts, or with results, is repeated while the server is full or not there: for so many seconds in all from
#: its first failure, with pauses that begin and end with these; a `Retry-After` that is longer holds instead.
TROUBLE_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
#: How often it is looked whether a play takes longer than its rollout's `timeout_seconds`.
LOOK_SECONDS = 1.0
#: Of the question whether a rollout still counts.
ASK_SECONDS = 10.0

#: What becomes of a request where a connection cannot be made, or breaks.
DROPPED = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)

Rollout = dict[str, Any]
#: `{"reward": 0.5, "correct": False}`, or `{"error": "why there is none"}`.
Result = dict[str, Any]
#: Plays one rollout with the run's session, which sends the token, or with a client of its own. An exception ends the agent;
#: what is no result is reported as an error of its rollout.
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
    connector = aiohttp.TCPConnector(limit=at_once + 3)  # turns, a report, the wait for rollouts, a look at one
    timeout = aiohttp.ClientTimeout(total=None)  # a turn may wait while the model is trained
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        await Loop(session, url, play, at_once).run()


class AgentError(Exception):
    """The trainer does not answer as it should."""


@dataclass(slots=True)
class _Played:
    """A rollout that is being played. `due`: when it is asked whether it still counts, by the event loop's clock."""

    rollout: Rollout
    due: float


class Loop:
    """At most `at_once` rollouts, from `run` to the end of the run."""

    def __init__(self, session: aiohttp.ClientSession, url: str, play: Play, at_once: int) -> None:
        self._session = session
        self._url = url
        self._play = play
        self._at_once = at_once
        #: A task that is not here any more is ours no longer: nothing that becomes of it counts.
        self._playing: dict[asyncio.Task[Result], _Played] = {}
        self._results: list[Result] = []
        #: Rollouts that a request under way may bring.
        self._asked = 0
        self._over = False
        self._failure: BaseException | None = None
        #: Something has happened: a rollout is played, or the request that waits for some is answered.
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Play until the run is over. Raises what `play` raised, AgentError, and aiohttp's errors of answers that are none."""
        waiting: asyncio.Task[None] | None = None
        patient = True
        watching = asyncio.create_task(self._watch())
        watching.add_done_callback(self._watched)
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
            playing, self._playing = self._playing, {}
            for task in filter(None, [*playing, waiting, watching]):
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
            answer = await self._ask("POST", "rollouts/results", json={"results": results, "next": most})
        for result, said in zip(results, answer["results"], strict=False):
            if said["status"] in _QUIET:
                continue
            why = f"{said['status']} {said['error']['message']}"
            print(f"{said['id']}: {why}", file=sys.stderr)
            if "error" not in result:  # else the rollout, and the others of its prompt, would wait until it is late
                self._results.append({"id": result["id"], "error": f"the result was refused: {why}"[:MOST_ERROR]})
        self._begin(answer)

    async def _wait_for_some(self, most: int) -> None:
        """Wait until the trainer has rollouts, and play them."""
        with self._asking(most):
            answer = await self._ask("GET", "rollouts/next", params={"max": most})
        self._begin(answer)

    async def _ask(self, method: str, path: str, **what: Any) -> dict[str, Any]:
        """The answer; the request is repeated while nobody serves it. Raises AgentError.

        Sending results again is safe, since the trainer takes the same one twice as once. Rollouts of an answer that was lost
        are played by nobody: the trainer gives them out again when they are late.
        """
        now = asyncio.get_running_loop().time
        end, pause = None, FIRST_PAUSE_SECONDS
        while True:
            wait = pause
            try:
                async with self._session.request(method, f"{self._url}/{path}", **what) as response:
                    if response.status == 200:
                        answer: dict[str, Any] = await response.json()
                        return answer
                    why = f"was answered with {response.status}: {(await response.text())[:500]}"
                    if response.status != 503:
                        raise AgentError(f"{method} {path} {why}")
                    wait = retry_after(response, pause)
            except DROPPED as err:
                why = f"failed: {type(err).__name__}: {err}"
            if self._over:  # another request was told so
                return {"results": [], "rollouts": [], "over": True}
            end = end or now() + TROUBLE_SECONDS
            if now() + wait > end:
                raise AgentError(f"{method} {path} {why}; tried for {TROUBLE_SECONDS:g} s")
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    @contextmanager
    def _asking(self, most: int) -> Iterator[None]:
        self._asked += most
        try:
            yield
        finally:
            self._asked -= most

    def _begin(self, answer: dict[str, Any]) -> None:
        self._over = self._over or answer["over"]
        now = asyncio.get_running_loop().time()
        for rollout in answer["rollouts"]:
            task = asyncio.create_task(self._play(self._session, rollout))
            self._playing[task] = _Played(rollout, now + rollout["timeout_seconds"])
            task.add_done_callback(partial(self._played, rollout["id"]))

    def _played(self, name: str, task: asyncio.Task[Result]) -> None:
        """What became of a play. Nothing may be raised here: nobody would hear it."""
        ours = self._playing.pop(task, None) is not None
        failure = None if task.cancelled() else task.exception()
        if not ours:
            return
        if failure is not None:
            self._fail(failure)
        elif task.cancelled():
            self._give_up(name, "play gave no result: it was cancelled, and not by the loop")
        else:
            try:
                self._results.append({"id": name, **result_of(task.result())})
            except UnusableError as err:
                self._give_up(name, str(err))
        self._news.set()

    def _give_up(self, name: str, why: str) -> None:
        print(f"{name}: {why}", file=sys.stderr)
        self._results.append({"id": name, "error": why})
        self._news.set()

    def _fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._news.set()

    # ---- plays that hang --------------------------------------------------------------------

    async def _watch(self) -> None:
        """Give up plays of rollouts whose time is over.

        The trainer's clock of a rollout stands still while no model answers, and an agent cannot know for how long it did. So
        it is asked: a play that waits for a step, or a validation, longer than `timeout_seconds` goes on.
        """
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for task, played in [one for one in self._playing.items() if one[1].due <= now()]:
                seconds = played.rollout["timeout_seconds"]
                left = await self._left(played.rollout)
                if left is not None:  # it may be over sooner, with another one of its prompt
                    played.due = now() + min(left, seconds / 4)
                elif self._playing.pop(task, None) is not None:
                    task.cancel()
                    self._give_up(played.rollout["id"], f"not played within {seconds:g} s")

    async def _left(self, rollout: Rollout) -> float | None:
        """Seconds that the trainer waits for it, pauses left out; None: it waits no longer."""
        url, timeout = f"{self._url}/rollouts/{rollout['id']}", aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                if response.status == 200:
                    return float((await response.json())["seconds_left"])
                if response.status in (404, 410):
                    return None
        except (*DROPPED, TimeoutError):
            pass
        return math.inf  # not known

    def _watched(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fail(failure)


def retry_after(response: aiohttp.ClientResponse, default: float) -> float:
    """Seconds until a server that is full may be asked again: at least `default`."""
    try:
        return max(default, float(response.headers.get("Retry-After", default)))
    except ValueError:  # a date
        return default
