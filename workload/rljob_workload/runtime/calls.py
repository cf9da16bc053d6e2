"""Calls to the actors: each with a deadline, each end with its exit code."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_workload.core.handover import HandoverError, HandoverTimeoutError
from rljob_workload.core.source import SourceError
from rljob_workload.megatron.errors import DeviceError, EngineError, EngineStepError, NonFiniteError, WeightsError
from rljob_workload.runtime.agent import AgentError
from rljob_workload.runtime.errors import CollectorFailedError, HungError, RunError, cause_line, plain
from rljob_workload.runtime.launch import Actors
from rljob_workload.runtime.whereabouts import whereabouts
from rljob_workload.server.errors import ServerError

log = logging.getLogger("rljob.driver")

#: A control call is answered in milliseconds; this is for a machine that swaps.
STATUS_SECONDS = 5.0

#: What actors raise on purpose: these explain themselves, and no traceback is shown for them.
_TYPED: dict[type[BaseException], ExitCode] = {
    NonFiniteError: ExitCode.NON_FINITE,
    EngineError: ExitCode.INVALID_SPEC,
    SourceError: ExitCode.BAD_DATA,
    WeightsError: ExitCode.SAVE_FAILED,
    DeviceError: ExitCode.ENVIRONMENT_MISSING,
    ServerError: ExitCode.ENVIRONMENT_MISSING,
    AgentError: ExitCode.AGENT_FAILED,
    HandoverTimeoutError: ExitCode.HANDOVER_TIMEOUT,
    HungError: ExitCode.HUNG,
}


class Calls:
    """What the driver asks of its actors."""

    def __init__(self, actors: Actors) -> None:
        self.actors = actors
        self.collector = actors.collector

    def ranks(self, method: str, seconds: float, code: ExitCode, *arguments: Any) -> Any:
        """Call all ranks and wait for all; past the deadline, name those that did not come."""
        refs = [getattr(rank, method).remote(*arguments) for rank in self.actors.ranks]
        deadline = time.monotonic() + seconds
        pending = list(refs)
        absent: list[Any] = []
        # One by one: a rank that fails leaves the others waiting in a collective, and its error is the cause.
        while pending and not absent:
            done, rest = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            ray.get(done)
            pending, absent = rest, [] if done else rest
        if absent:
            missing = ", ".join(str(refs.index(ref)) for ref in absent)
            where = whereabouts(self.actors.ranks)
            raise RunError(code, f"{method}: no answer of rank {missing} within {seconds:g} s; {where}")
        return ray.get(refs)

    def get(self, refs: Any, seconds: float, what: str) -> Any:
        """Results of other calls; past the deadline, `what` says what did not happen."""
        try:
            return ray.get(refs, timeout=seconds)
        except GetTimeoutError as err:
            raise RunError(ExitCode.HUNG, f"{what} within {seconds:g} s") from err

    def collector_answers(self) -> bool:
        """Whether the collector tells its state within moments. While it does, its own deadlines end what hangs."""
        try:
            ray.get(self.collector.status.remote(), timeout=STATUS_SECONDS)
        except (GetTimeoutError, RayActorError):
            return False
        return True

    def stall_report(self, step: int, seconds: float) -> str:
        """Of a step that gets neither its batch nor the collector's own word about it."""
        try:
            status = ray.get(self.collector.status.remote(), timeout=STATUS_SECONDS)
        except (GetTimeoutError, RayActorError) as err:
            said = f"and it does not tell its state ({type(err).__name__})"
        else:
            oldest = ", ".join(str(one["ordinal"]) for one in status["oldest_in_flight"]) or "none"
            said = f"which is {status['state']}; in flight longest: {oldest}; its last moves: {'; '.join(status['log'][-3:])}"
        return f"step {step}: no word of the collector within {seconds:g} s (deadlines.stallSeconds), {said}"

    def classified(self, err: RayTaskError) -> RunError:
        """An exception that an actor raised, as the way the run ends."""
        cause = err.cause
        for kind, code in _TYPED.items():
            if isinstance(cause, kind):
                where = f"; {whereabouts(self.actors.ranks)}" if kind is HungError else ""
                return RunError(code, cause_line(str(cause)) + where)
        text = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, RayActorError) or "ActorDiedError" in text or "ActorUnavailableError" in text:
            return self.lost(cause)
        if isinstance(cause, OSError) and cause.filename:
            return RunError(ExitCode.SAVE_FAILED, f"cannot write {cause.filename}: {cause.strerror}")
        log.error("an actor raised: %s", plain(str(err)))
        # A rank whose neighbour was killed reports a broken collective before Ray reports the death, in whatever it does.
        if dead := self._dead():
            return self._lost(dead, cause_line(str(cause)))
        if isinstance(cause, (CollectorFailedError, EngineStepError, HandoverError)):
            return RunError(ExitCode.COLLECTOR_LOST, cause_line(str(cause)))
        return RunError(ExitCode.UNEXPECTED, cause_line(text))

    def lost(self, err: BaseException) -> RunError:
        """An actor died: say which."""
        return self._lost(self._dead(), str(err))

    def _lost(self, dead: list[str], why: str) -> RunError:
        code = ExitCode.COLLECTOR_LOST if dead == ["the collector"] else ExitCode.RANK_LOST
        return RunError(code, f"{' and '.join(dead) or 'an actor'} died: {' '.join(plain(why).split())[:600]}")

    def _dead(self) -> list[str]:
        """The actors that do not live."""
        calls = {f"rank {index}": rank.status for index, rank in enumerate(self.actors.ranks)}
        calls["the collector"] = self.collector.status
        return [name for name, status in calls.items() if not _answers(status)]


def _answers(status: Any) -> bool:
    """Whether the actor behind this status method lives (a busy one does)."""
    try:
        ray.get(status.remote(), timeout=10)
    except RayActorError:
        return False
    except GetTimeoutError:
        return True
    return True
