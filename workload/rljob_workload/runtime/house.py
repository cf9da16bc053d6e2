"""What the collector runs beside itself when the spec wants an HTTP server: the server, and the agent's process."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Protocol

from rljob_api.layout import layout_of, shape_of
from rljob_api.spec import RLJobSpec
from rljob_workload.data.builtin import TaskData
from rljob_workload.runtime.agent import AgentError, AgentProcess
from rljob_workload.runtime.owner import Owner
from rljob_workload.runtime.players import Players
from rljob_workload.server.front import Front
from rljob_workload.server.openai import Limits
from rljob_workload.server.place import ServerPlace

log = logging.getLogger("rljob.collector")

#: Objects made since the last look for garbage among the young ones, some 10 MB of them.
YOUNG_OBJECTS = 50_000


class HouseOwner(Owner, Protocol):
    """The collector, as this module sees it."""

    @property
    def players(self) -> Players | None: ...
    def fail(self, why: str, cause: BaseException) -> None: ...


class House:
    """Opened once before the first prompt, closed at the end."""

    def __init__(self, owner: HouseOwner, spec: RLJobSpec, task: TaskData, place: ServerPlace, agent_log: Path) -> None:
        self._owner = owner
        self._spec = spec
        self._place = place
        self._agent_log = agent_log
        self._limits = limits_of(spec, task, place.model)
        self._front: Front | None = None
        self._agent: AgentProcess | None = None

    def open(self) -> list[str]:
        """Start server and agent. Returns the servers' URLs. Raises ServerError."""
        self._front = Front(
            self._owner.monitor,
            self._owner.desk,
            self._limits,
            self._owner.players,
            token_file=self._place.token_file,
            answer_seconds=float(self._spec.deadlines.stall_seconds),
            rollout_seconds=float(self._spec.generation.answer_timeout_seconds),
        )
        replicas = len(layout_of(self._spec).replicas())
        urls = self._front.start(self._place.host, self._spec.generation.server.port, replicas)
        log.info("the model is served at %s", ", ".join(urls))
        _collect_garbage_seldom()
        players = self._owner.players
        if players is not None and self._spec.environment.agent is not None:
            self._agent = AgentProcess(
                self._spec.environment.agent.command,
                self._agent_log,
                urls,
                self._place.token_file,
                reports=lambda: players.reports,
                ended=self._agent_ended,
                failed=self._agent_failed,
            )
            self._agent.start()
        return urls

    def close(self) -> None:
        """Tell agents that it is over, end the agent, take the server down. May be repeated."""
        if self._agent is not None:
            self._agent.expect_end()  # which it may do as soon as it is told
        if self._owner.players is not None:
            with self._owner.monitor.changing():
                self._owner.players.end()
        if self._agent is not None:
            self._agent.close()
        if self._front is not None:
            self._front.close()

    def _agent_ended(self, why: str, by_itself: bool) -> None:
        with self._owner.monitor.changing():
            if self._owner.players is not None:
                self._owner.players.agent_ended(why, by_itself=by_itself)

    def _agent_failed(self, error: AgentError) -> None:
        with self._owner.monitor.changing():
            self._owner.fail(str(error), error)


def _collect_garbage_seldom() -> None:
    """Requests wait for their answers, so a look for garbage among what is young finds hundreds that live: a fifth of the
    server's processor time. What was there before a request came, it need not look at at all."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def limits_of(spec: RLJobSpec, task: TaskData, model: str) -> Limits:
    """What requests may ask of this job's engine."""
    shape, generation = shape_of(spec.model), spec.generation
    return Limits(
        model=model,
        new_tokens=task.new_tokens(generation.max_new_tokens),
        most_new_tokens=generation.max_new_tokens,
        sequence=generation.max_sequence_length,
        temperature=float(generation.temperature),
        vocabulary=task.tokenizer.vocab_size if shape is None else shape.vocab_size,
        eos=task.eos,
        tokenizer=task.tokenizer,
    )
