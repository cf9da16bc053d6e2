"""From a checked request to its answer: the wait at the desk, and the form in which the answer goes out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus

from aiohttp import web

from rljob_workload.algorithm.batch import Answer, Sampling
from rljob_workload.core.agents import AgentRollout
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.server import reply
from rljob_workload.server.desk import Deliver, Desk
from rljob_workload.server.errors import ApiError
from rljob_workload.server.openai import Ask, Limits
from rljob_workload.server.wire import answer

#: What the desk delivers.
_Got = list[Answer] | Exception


class _Mailbox:
    """From a pump's thread into the server's: however many answers a slice brings, they cost one wake-up.

    Whoever puts holds the collector's lock; who empties it does not. Nothing is left lying: a letter is put in before the
    flag is looked at, and the flag is taken down before the letters are taken out.
    """

    def __init__(self) -> None:
        self._letters: deque[tuple[asyncio.Future[_Got], _Got]] = deque()
        self._called = False

    def slot(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[_Got]) -> Deliver:
        """Where answers for this future go. `loop`: the one it belongs to."""

        def put(got: _Got) -> None:
            self._letters.append((future, got))
            if not self._called:
                self._called = True
                loop.call_soon_threadsafe(self._empty)

        return put

    def _empty(self) -> None:
        self._called = False
        while self._letters:
            future, got = self._letters.popleft()
            if not future.done():  # else nobody waits any more
                future.set_result(got)


class Answering:
    """What OpenAI's endpoints and the turns of rollouts have in common; used in the server's thread."""

    def __init__(self, monitor: Monitor, desk: Desk, limits: Limits, seconds: float) -> None:
        """`seconds`: how long a request may wait."""
        self._monitor = monitor
        self._desk = desk
        self._limits = limits
        self._seconds = seconds
        self._mailbox = _Mailbox()
        #: How an engine samples where a request says nothing; to say it costs more than the rest of a request.
        self._usual = Sampling(limits.new_tokens, temperature=limits.temperature)
        self._prefix = f"{int(time.time()):x}"
        self._count = 0

    async def answers(self, replica: int, ask: Ask, rollout: AgentRollout | None = None) -> list[list[Answer]]:
        """Wait for the engine; the answers to each prompt. Whatever ends the wait early takes the requests back.

        Raises ApiError where the wait is too long, and what the desk raises or delivers.
        """
        loop = asyncio.get_running_loop()
        sampling = None if ask.sampling == self._usual else ask.sampling
        tickets: dict[int, asyncio.Future[_Got]] = {}
        try:
            with self._monitor.reading():
                if not self._desk.waits(replica):
                    self._monitor.notify()  # of a burst the first request wakes the pump, which waits for the others
                for prompt in ask.prompts:
                    future: asyncio.Future[_Got] = loop.create_future()
                    slot = self._mailbox.slot(loop, future)
                    number = self._desk.submit(replica, prompt, ask.n, sampling, slot)
                    tickets[number] = future
                    if rollout is not None:
                        rollout.turn = number
            async with asyncio.timeout(self._seconds):
                return [_answers_of(await future) for future in tickets.values()]
        except TimeoutError:
            raise ApiError(
                HTTPStatus.GATEWAY_TIMEOUT, f"no answer within {self._seconds:g} s (deadlines.stallSeconds)"
            ) from None
        finally:
            with self._monitor.reading():
                for number in tickets:
                    self._desk.cancel(number)
                if rollout is not None:
                    rollout.turn = None

    async def respond(self, request: web.BaseRequest, ask: Ask, answers: Sequence[Sequence[Answer]]) -> web.StreamResponse:
        """The answer as the request wants it: in one piece or as a stream. `answers`: to each prompt."""
        self._count += 1
        whole = reply.respond(ask, answers, self._limits, f"{self._prefix}{self._count:08x}", int(time.time()))
        if not ask.stream:
            return answer(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        events = [answer(event).body for event in reply.chunks(ask, whole)]
        await response.write(b"".join(b"data: " + bytes(event) + b"\n\n" for event in [*events, b"[DONE]"]))  # type: ignore[arg-type]
        await response.write_eof()
        return response


def _answers_of(got: _Got) -> list[Answer]:
    if isinstance(got, Exception):
        raise got
    return got
