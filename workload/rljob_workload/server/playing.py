"""What agents ask for, below `/v1/rollouts` and under each rollout's own address.

One that plays many rollouts at once tells many results in one request and is given the next rollouts in its answer. What is
wrong with one result is said of that one; the others of its request count.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web

from rljob_workload.algorithm.advantages import LARGEST_REWARD
from rljob_workload.algorithm.batch import Answer
from rljob_workload.core.agents import (
    AgentRollout,
    Purpose,
    RolloutBusyError,
    RolloutError,
    RolloutOverError,
    RolloutUnknownError,
    VerdictError,
)
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.server import openai, reply
from rljob_workload.server.answering import Answering
from rljob_workload.server.errors import ApiError, bad
from rljob_workload.server.wire import answer, body_of, hung_up

#: Rollouts that one request may give out, and results that it may bring; seconds that it may wait for the first rollout.
MOST_ROLLOUTS = 256
LONGEST_WAIT = 60.0


class Agents(Protocol):
    """What is asked about rollouts; with the lock held."""

    @property
    def over(self) -> bool:
        """Whether no rollout will come any more."""
        ...

    @property
    def epoch(self) -> int:
        """Grows when the agent ends; who asked before that gets nothing."""
        ...

    def hand_out(self, most: int) -> list[AgentRollout]:
        """Rollouts for an agent."""
        ...

    def put_back(self, rollouts: Sequence[AgentRollout]) -> None:
        """Their client is gone before it got them; wakes who waits for some."""
        ...

    def get(self, name: str) -> AgentRollout:
        """A rollout that is being played. Raises RolloutUnknownError, RolloutOverError."""
        ...

    def seconds_left(self, rollout: AgentRollout) -> float:
        """Until it must be reported, by a clock that stands still while the trainer pauses."""
        ...

    def report(self, name: str, reward: float, *, correct: bool | None) -> None:
        """The agent's verdict, or the same again; wakes who waits for it. Raises RolloutError."""
        ...

    def give_up(self, name: str, why: str) -> None:
        """The agent cannot end it, or says so again. Raises as `get` does."""
        ...


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What an agent said of a rollout. `error`: why there is no reward."""

    reward: float = 0.0
    correct: bool | None = None
    error: str | None = None


class Playing:
    """The requests of agents. `urls`: of the replicas, each with `/v1` behind it."""

    def __init__(
        self,
        agents: Agents,
        monitor: Monitor,
        limits: openai.Limits,
        answering: Answering,
        *,
        body_limit: int,
        rollout_seconds: float,
    ) -> None:
        """`rollout_seconds`: what agents are told of a rollout's time."""
        self._agents = agents
        self._monitor = monitor
        self._limits = limits
        self._answering = answering
        self._body_limit = body_limit
        self._rollout_seconds = rollout_seconds
        self.urls: Sequence[str] = ()

    # ---- rollouts out -----------------------------------------------------------------------

    async def next(self, request: web.BaseRequest) -> web.Response:
        """Rollouts to play, as soon as there is one."""
        agents = self._agents
        most = int(_query(request, "max", 1, 1, MOST_ROLLOUTS, whole=True))
        wait = _query(request, "wait", 30.0, 0.0, LONGEST_WAIT)
        epoch = agents.epoch

        def look() -> list[AgentRollout] | None:
            if agents.over or agents.epoch != epoch:
                return []
            return agents.hand_out(most) or None

        found = self._delivered(request, await self._monitor.first_in_line("rollouts", look, wait) or [])
        return answer({"rollouts": [self._described(one) for one in found], "over": agents.over})

    def _delivered(self, request: web.BaseRequest, found: list[AgentRollout]) -> list[AgentRollout]:
        """Rollouts that were handed out for a request, unless its client is gone: then nobody would play them.

        A client that leaves while its request waits ends the request, and nothing is handed out.
        """
        if not found or not hung_up(request):
            return found
        with self._monitor.reading():
            self._agents.put_back(found)
        return []

    def _described(self, rollout: AgentRollout) -> dict[str, Any]:
        base = self.urls[rollout.replica or 0].removesuffix("/v1")
        begin = self._limits.begin
        tokens = rollout.tokens[len(begin) :] if rollout.tokens[: len(begin)] == begin else rollout.tokens
        return {
            "id": rollout.id,
            "purpose": rollout.purpose,
            "model": self._limits.model,
            "base_url": f"{base}/rollouts/{rollout.id}/v1",
            "prompt": self._limits.tokenizer.decode(tokens),
            "prompt_token_ids": rollout.tokens,
            "expected": rollout.expected,
            "seed": zlib.crc32(rollout.id.encode()),
            "timeout_seconds": self._rollout_seconds,
        }

    def state(self, name: str) -> web.Response:
        """Of a rollout that still counts."""
        with self._monitor.reading():
            rollout = self._agents.get(name)
            left = self._agents.seconds_left(rollout)
            told = {
                "id": rollout.id,
                "purpose": rollout.purpose,
                "turns": rollout.trajectory.turns,
                "answering": rollout.turn is not None,
                "seconds_left": round(max(0.0, left), 3),
            }
        return answer(told)

    # ---- turns ------------------------------------------------------------------------------

    async def turn(self, request: web.BaseRequest, name: str, kind: str) -> web.StreamResponse:
        """One answer of a rollout."""
        agents = self._agents
        body = await body_of(request, self._body_limit)
        with self._monitor.reading():
            rollout = agents.get(name)
            if rollout.turn is not None:
                raise RolloutBusyError(f"rollout {name}: a turn is being generated; a rollout takes one at a time")
            rollout.turn = 0  # taken, until the desk gives it a number
        try:
            ask = openai.read(kind, body, self._limits, rollout.trajectory)
            if rollout.purpose is Purpose.TRAIN:
                openai.require_trained_sampling(ask.sampling, self._limits)
            else:
                ask = replace(ask, sampling=replace(ask.sampling, greedy=True, temperature=1.0, top_p=1.0, seed=None))
        except BaseException:
            rollout.turn = None
            raise
        if (last := rollout.trajectory.last) is not None and rollout.trajectory.repeats(ask.prompts[0]):
            rollout.turn = None  # nothing is generated anew: who could choose among answers would train on a choice
            return await self._answering.respond(request, ask, [[last.answer]])
        ((found,),) = await self._answering.answers(rollout.replica or 0, ask, rollout)
        with self._monitor.reading():
            agents.get(name)  # may have been given up while the answer was on its way
            self._remember(rollout, ask, found)
        return await self._answering.respond(request, ask, [[found]])

    def _remember(self, rollout: AgentRollout, ask: openai.Ask, found: Answer) -> None:
        said = reply.ended(found, ask.sampling, self._limits).text
        rollout.trajectory.end(ask.prompts[0], found, text=ask.text, messages=ask.messages, said=said)

    # ---- results in -------------------------------------------------------------------------

    async def result(self, request: web.BaseRequest, name: str) -> web.Response:
        """The result of one rollout."""
        verdict = _verdict(await body_of(request, self._body_limit))
        with self._monitor.reading():
            self._accept(name, verdict)
        return answer({"accepted": True})

    async def results(self, request: web.BaseRequest) -> web.Response:
        """Results of several rollouts, each accepted or refused by itself, and the next rollouts, if there are any."""
        results, most = _batch(await body_of(request, self._body_limit))
        with self._monitor.reading():
            said = [self._accepted(result) for result in results]
            found = self._agents.hand_out(most) if most else []
            if found:
                self._monitor.notify()
        rollouts = [self._described(one) for one in self._delivered(request, found)]
        return answer({"results": said, "rollouts": rollouts, "over": self._agents.over})

    def _accepted(self, result: Mapping[str, Any]) -> dict[str, Any]:
        name = result["id"]
        try:
            self._accept(name, _verdict({key: value for key, value in result.items() if key != "id"}))
        except (ApiError, RolloutError) as err:
            refusal = refused(err)
            return {"id": name, "status": refusal.status, **refusal.body}
        return {"id": name, "status": HTTPStatus.OK}

    def _accept(self, name: str, verdict: _Verdict) -> None:
        """With the lock held."""
        if verdict.error is None:
            self._agents.report(name, verdict.reward, correct=verdict.correct)
        else:
            self._agents.give_up(name, f"the agent said: {verdict.error}")
            self._monitor.notify()


def refused(err: ApiError | RolloutError) -> ApiError:
    """A rollout's refusal as an answer; an answer stays what it is."""
    match err:
        case ApiError():
            return err
        case VerdictError():
            return bad(str(err), "correct")
        case RolloutUnknownError():
            return ApiError(HTTPStatus.NOT_FOUND, str(err))
        case RolloutOverError():
            return ApiError(HTTPStatus.GONE, str(err))
        case _:
            return ApiError(HTTPStatus.CONFLICT, str(err))


def _batch(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The results of a request, each with its id, and how many rollouts are asked for. Raises ApiError."""
    if unknown := next((key for key in body if key not in ("results", "next")), None):
        raise bad(f"{unknown[:80]}: unknown; there are results and next", unknown[:80])
    results, most = body.get("results", []), body.get("next", 0)
    if not isinstance(results, list) or len(results) > MOST_ROLLOUTS:
        raise bad(f"results: must be a list of at most {MOST_ROLLOUTS}", "results")
    for place, result in enumerate(results):
        if not isinstance(result, dict) or not isinstance(result.get("id"), str):
            raise bad(f"results[{place}]: must be an object with id, and reward or error", "results")
    if type(most) is not int or not 0 <= most <= MOST_ROLLOUTS:
        raise bad(f"next: {str(most)[:40]!r} is no integer from 0 to {MOST_ROLLOUTS}", "next")
    return results, most


def _verdict(body: Mapping[str, Any]) -> _Verdict:
    """Raises ApiError."""
    if unknown := next((key for key in body if key not in ("reward", "correct", "error")), None):
        raise bad(f"{unknown[:80]}: unknown; a result has reward and correct, or error", unknown[:80])
    if (error := body.get("error")) is not None:
        raw = str(error).encode(errors="surrogatepass").decode(errors="replace")  # may hold what is no character
        return _Verdict(error=" ".join(raw.split())[:300])  # a line of a log
    reward, correct = body.get("reward"), body.get("correct")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
        raise bad(f"reward: {str(reward)[:40]} is no number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}", "reward")
    if correct is not None and not isinstance(correct, bool):
        raise bad(f"correct: {str(correct)[:40]} is not true or false", "correct")
    return _Verdict(float(reward), correct)


def _query(request: web.BaseRequest, name: str, default: float, least: float, most: float, *, whole: bool = False) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or (whole and value != int(value)):
        raise bad(f"{name}: {text[:40]!r} is no {'integer' if whole else 'number'} from {least:g} to {most:g}", name)
    return value
