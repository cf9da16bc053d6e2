"""Asking the environment: within a deadline, in threads that a hanging call may keep, with a verdict or a reason."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rljob_workload.algorithm.advantages import LARGEST_REWARD
from rljob_workload.core.groups import Group
from rljob_workload.environments.base import Environment
from rljob_workload.runtime.errors import HungError

log = logging.getLogger("rljob.collector")

#: Calls of the environment that run at once.
SLOTS = 4
#: Calls that never returned before the environment is given up: each keeps a thread.
MOST_HUNG = 64

#: Reward and verdict of each answer of a group.
Scores = Sequence[tuple[float, bool]]


class ScoreError(Exception):
    """The environment gave no usable verdict on one group; the message says why."""


class EnvironmentHungError(HungError):
    """So many calls of the environment have not returned that there is no point in more."""


class Scorer:
    """The environment of a run. `quick` ones are asked in place, others in threads."""

    def __init__(self, environment: Environment, decode: Callable[[Sequence[int]], str], timeout: float) -> None:
        self.environment = environment
        self._decode = decode
        self._timeout = timeout
        self._slots = asyncio.Semaphore(SLOTS)
        self._hung = 0

    @property
    def quick(self) -> bool:
        """Whether scoring takes less time than handing it to a thread."""
        return self.environment.quick

    @property
    def hung(self) -> int:
        """Calls that exceeded their deadline and have not returned since."""
        return self._hung

    def score(self, group: Group, expected: str) -> Scores:
        """The verdict, in this thread. Raises ScoreError."""
        decode, judge = self._decode, self.environment.score
        try:
            scores = [judge(decode(answer.tokens), expected) for answer in group.answers]
        except Exception as err:
            raise ScoreError(f"the environment raised {type(err).__name__}: {err}") from err
        for score in scores:
            if not abs(score.reward) <= LARGEST_REWARD:
                raise ScoreError(
                    f"the environment's reward is {str(score.reward)[:40]}; at most {LARGEST_REWARD:g} can be computed with"
                )
        return [(float(score.reward), bool(score.correct)) for score in scores]

    async def score_in_thread(self, group: Group, expected: str) -> Scores:
        """The verdict, awaited for at most the environment's timeout. Raises ScoreError or EnvironmentHungError."""
        async with self._slots:
            call = _in_thread(lambda: self.score(group, expected))
            done, _ = await asyncio.wait({call}, timeout=self._timeout)
            if done:
                return call.result()
        # The slot is free again, the thread is not: nothing can end it.
        self._hung += 1
        call.add_done_callback(self._returned)
        if self._hung > MOST_HUNG:
            raise EnvironmentHungError(
                f"{self._hung} calls of the environment have not returned, the newest for prompt {group.ordinal}, after more "
                f"than {self._timeout:g} s each (environment.timeoutSeconds)"
            )
        raise ScoreError(f"the environment took more than {self._timeout:g} s (environment.timeoutSeconds)")

    def _returned(self, call: asyncio.Future[Any]) -> None:
        self._hung -= 1
        call.exception()  # too late to matter, and not to be reported as forgotten


def _in_thread[T](function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a thread of its own that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # a result of T where there is no error

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as err:  # noqa: BLE001 - handed over to whoever awaits it
            error = err
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return future
