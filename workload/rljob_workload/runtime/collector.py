"""The collector: an asyncio actor beside the driver that keeps the engines busy and has the steps trained.

`step` is a training step from its first missing group to its commit, in one call. It ends the collecting: it waits until the
groups are there and every decode slice has ended, so that no rank gets a decode call and a training call in different orders
than its neighbours. `resume` starts the next stretch, unless the commit has; then its first slices are asked for *ahead*, right
behind the training call, and a rank goes from one to the other without a word from here. Answers in flight stay in the engines
in between. The driver's other calls have a concurrency group of their own, which Ray runs in a thread of its own: they are
answered whatever else goes on (see `monitor`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.layout import layout_of
from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import TrainBatch
from rljob_workload.core.collecting import OPEN, SERVING, STILL, CollectorMachine, CollectorState, Transition
from rljob_workload.core.groups import Group
from rljob_workload.core.rollouts import RestoreReport, Rollouts, StepInfo
from rljob_workload.core.source import Row, SourceError
from rljob_workload.data.builtin import TaskData, load_builtin
from rljob_workload.environments import load_environment
from rljob_workload.megatron.errors import EngineError, NonFiniteError
from rljob_workload.runtime.account import Account
from rljob_workload.runtime.agent import AgentError, agent_log
from rljob_workload.runtime.concurrency import control
from rljob_workload.runtime.errors import CollectorFailedError, HungError, cause_line
from rljob_workload.runtime.journal import keeper_of_books
from rljob_workload.runtime.logs import log_to_file
from rljob_workload.runtime.monitor import Monitor
from rljob_workload.runtime.players import Players
from rljob_workload.runtime.prompts import too_many_skipped
from rljob_workload.runtime.pumps import Pumps
from rljob_workload.runtime.rollouts_of import build_rollouts
from rljob_workload.runtime.scoring import Scorer
from rljob_workload.runtime.stretch import ActiveClock, End, Stepped
from rljob_workload.server.desk import Desk
from rljob_workload.server.place import ServerPlace

if TYPE_CHECKING:
    from rljob_workload.runtime.house import House
    from rljob_workload.runtime.rank import RankStep

log = logging.getLogger("rljob.collector")

#: What a rank, the data or an environment say on purpose; everything else is a CollectorFailedError.
_KEPT = (SourceError, NonFiniteError, EngineError, HungError, AgentError)


class Collector:
    """The actor's class; `launch.py` wraps it."""

    def __init__(self, spec: dict[str, Any], directory: str, attempt: int, place: ServerPlace | None = None) -> None:
        """`place`: of the HTTP server, where the spec wants one."""
        self._spec = RLJobSpec.model_validate(spec)
        log_to_file(Path(directory) / "logs" / f"collector-attempt-{attempt:06d}.log")
        task = load_builtin(str(self._spec.data.builtin))
        environment = load_environment(str(self._spec.environment.builtin or "exactMatch"), fixed_length=task.eos is None)
        self._rollouts = build_rollouts(self._spec, task, keeper_of_books(Path(directory), attempt))
        self._scorer = Scorer(environment, task.tokenizer.decode, float(self._spec.environment.timeout_seconds))
        self._monitor = Monitor()
        self._machine = CollectorMachine(time.monotonic, self._moved)
        self._clock = ActiveClock()
        replicas = len(layout_of(self._spec).replicas())
        self._desk = Desk()
        answer_seconds = float(self._spec.generation.answer_timeout_seconds)
        self._players = Players(self, replicas, answer_seconds) if self._spec.environment.agent else None
        self._house = self._new_house(task, place, agent_log(Path(directory), attempt)) if place else None
        self._pumps = Pumps(self, self._spec)
        self._account = Account(self._spec, self._rollouts, self._players, self._pumps, self._machine, self._clock)
        self._failure: Exception | None = None
        self._interrupted: int | None = None
        self._version = 0
        #: The step that is being trained, where the slices behind it have been asked for or are about to be; 0: none.
        self._ahead = 0

    def _new_house(self, task: TaskData, place: ServerPlace, agent_log: Path) -> House:
        from rljob_workload.runtime.house import House  # without a server, no process imports one

        return House(self, self._spec, task, place, agent_log)

    # ---- the driver's calls -----------------------------------------------------------------

    async def restore(self, saved: dict[str, Any] | None, version: int | None = None, trained_before: int = 0) -> RestoreReport:
        """Go on from a checkpoint's state; before `start`. None: the checkpoint has no ledger, only trained prompts."""
        with self._monitor.changing():
            return self._rollouts.restore(
                saved,
                version=version,
                load_buffer=self._spec.checkpoint.load_replay_buffer,
                restart_on_change=self._spec.data.on_change == "Restart",
                trained_before=trained_before,
            )

    async def start(self, replicas: list[list[Any]], version: int, numbers: list[list[int]] | None = None) -> list[str]:
        """Begin to collect on these replicas, each a list of rank actors. Returns the URLs of their HTTP servers, if any.

        `numbers`: the ranks' numbers, unless they are in order.
        """
        urls = self._house.open() if self._house else []
        counter = itertools.count()
        self._pumps.start(replicas, numbers or [[next(counter) for _ in replica] for replica in replicas])
        await self.resume(version)
        return urls

    async def validate(self, rows: Sequence[tuple[int, Row]]) -> int:
        """Have agents play these (index, row), greedily; how many they report as right. Only between two steps.

        Raises HungError when they are not through within deadlines.stallSeconds.
        """
        players, stall = self._ready_players(), float(self._spec.deadlines.stall_seconds)
        with self._monitor.changing():
            self._machine.enter(CollectorState.VALIDATING, f"version {self._version}: {len(rows)} prompts")
            players.open_validation(rows)
        if await self._monitor.first(lambda: self._none_missing(players), stall) is None:
            with self._monitor.reading():
                missing, untaken = players.missing_verdicts(), players.untaken_verdicts()
            raise HungError(f"validation: agents have not reported {missing} of {len(rows)} rollouts within {stall:g} s "
                            f"(deadlines.stallSeconds), {untaken} of which none has taken")  # fmt: skip
        with self._monitor.changing():
            self._machine.enter(CollectorState.DRAINING, "validation is over")
        if await self._monitor.first(lambda: None if self._pumps.slices else True, stall) is None:
            raise HungError(f"validation: a decode slice does not end within {stall:g} s")
        with self._monitor.changing():
            self._machine.enter(CollectorState.PAUSED, "validation is over")
            return players.right()

    def _none_missing(self, players: Players) -> bool | None:
        self._raise_failure()
        return None if players.missing_verdicts() else True

    def _ready_players(self) -> Players:
        if self._players is None:
            raise RuntimeError("validation by agents, but the spec names no agent")
        return self._players

    @control
    async def close(self) -> None:
        """The run is over: the agent ends, the HTTP server goes down, whoever waits is told. May be repeated."""
        if self._house is not None:
            await asyncio.to_thread(self._house.close)

    async def step(self, step: int, wake: bool, onward: bool) -> Stepped | None:
        """Take the step's batch, have all ranks train it, commit it. None where `interrupt` came before the batch.

        `wake`: no save follows, the engines wake after training. `onward`: nothing else follows either, so the next stretch
        begins with the commit, unless an interrupt has come by then (or before its first slices were asked for).
        Raises HungError, and whatever a rank raised.
        """
        began = time.monotonic()
        batch, info = await self.take(step)
        if batch is None or info is None:
            return None
        taken = time.monotonic()
        training = self._pumps.train(batch, wake)
        self._go_ahead(step, onward)
        ranks: list[RankStep] = await self._trained(training)
        trained = time.monotonic()
        onward = onward and (self._ahead == step or self._interrupted != step)
        counters = await self.commit(step, batch.ordinals, onward)
        ended = time.monotonic()
        return Stepped(
            len(batch.ordinals), info, taken - began, trained - taken, ended - trained, ranks, counters, onward
        )  # fmt: skip

    def _go_ahead(self, step: int, onward: bool) -> None:
        """Have the pumps ask for the slices after this step, whose training all ranks have been asked for already.

        Should training fail, the slices fail too: a rank that has not come back to decode takes none. Requests by HTTP are
        for the weights that are there, so with a server the slices wait for the commit; but agents may have their prompts
        already, so that their first turns are waiting by then.
        """
        with self._monitor.changing():
            if not onward or self._interrupted == step:
                return
            if self._house is None:
                self._ahead = step
            elif self._players is not None:
                self._players.open(self._rollouts.dispatch(step, self.now))

    async def _trained(self, training: Awaitable[list[RankStep]]) -> list[RankStep]:
        try:
            return await training
        except Exception as err:
            with self._monitor.changing():  # before a slice behind it says the same in a worse way
                self._ahead = 0
                self.fail(f"training: {cause_line(str(err))}", err)
            raise

    async def take(self, step: int) -> tuple[TrainBatch, StepInfo] | tuple[None, None]:
        """The next step's batch, or None where `interrupt` came first; the collector is paused when it returns.

        Raises HungError when there is none within deadlines.stallSeconds, and names what it has waited for.
        """
        stall = float(self._spec.deadlines.stall_seconds)
        end = await self._monitor.first(lambda: self._end_of_stretch(step), stall)
        if end is None and self._machine.state is CollectorState.DRAINING:
            # The groups are there; the slices have deadlines of their own, and those name ranks.
            end = await self._monitor.first(lambda: self._end_of_stretch(step), stall)
        if end is None:
            with self._monitor.reading():
                waiting = self._account.waiting_for(self._version)
            raise HungError(f"step {step}: no batch within {stall:g} s (deadlines.stallSeconds); {waiting}")
        return end.taken or (None, None)

    @control
    async def interrupt(self, step: int) -> None:
        """Have this step end without a batch; where it has one already, the next stretch does not begin with its commit."""
        with self._monitor.changing():
            self._interrupted = step

    @control
    async def commit(self, step: int, ordinals: Sequence[int], resume: bool = False) -> dict[str, Any]:
        """The step's optimizer step has been taken on all ranks. May be repeated. Returns the counters.

        `resume`: nothing comes before the next stretch, so it begins at once.
        """
        with self._monitor.changing():
            self._rollouts.commit(step, ordinals)
            self._rollouts.check()
            counters = self._account.counters()
            if resume and self._version < step:  # a repetition finds that it has been done
                self._resume(step)
            return counters

    @control
    async def resume(self, version: int) -> None:
        """Collect again, now with these weights."""
        with self._monitor.changing():
            self._resume(version)

    @control
    async def snapshot(self) -> dict[str, Any]:
        """Everything to resume from, of one moment. Only between two steps; the state is Saving from here to `resume`."""
        with self._monitor.changing():
            if self._machine.state not in STILL:
                raise RuntimeError(f"no snapshot while {self._machine.state}")
            self._machine.enter(CollectorState.SAVING, f"version {self._version}")
            return self._rollouts.snapshot()

    @control
    async def status(self) -> dict[str, Any]:
        """State, counters, and what is waited for longest."""
        with self._monitor.reading():
            return {"failure": str(self._failure or ""), **self._account.status()}

    def counters(self) -> dict[str, Any]:
        """The ledger's counters, and the skipped ordinals by cause."""
        with self._monitor.reading():
            return self._account.counters()

    # ---- what the pumps see; all of it with the lock held ----------------------------------

    @property
    def monitor(self) -> Monitor:
        """The lock."""
        return self._monitor

    @property
    def rollouts(self) -> Rollouts:
        """The bookkeeping."""
        return self._rollouts

    @property
    def scorer(self) -> Scorer:
        """The environment."""
        return self._scorer

    @property
    def desk(self) -> Desk:
        """Requests by HTTP."""
        return self._desk

    @property
    def players(self) -> Players | None:
        """Agents' rollouts; None where prompts are answered without agents."""
        return self._players

    @property
    def version(self) -> int:
        """The policy version that generates, or will when the slices that may be begun now are."""
        return self._ahead or self._version

    @property
    def now(self) -> float:
        """Seconds of collecting so far: the clock of the answers' deadlines."""
        return self._clock.now()

    @property
    def collecting(self) -> bool:
        """Whether prompts may be pulled and slices begun."""
        return self.ahead or self._machine.state in OPEN

    @property
    def ahead(self) -> bool:
        """Whether slices that are begun now come behind a training step."""
        return self._ahead > 0

    @property
    def serving(self) -> bool:
        """Whether slices may be begun for requests by HTTP."""
        return self._machine.state in SERVING

    def lose(self, group: Group, why: str, *, counted: bool = True) -> None:
        """This try of a group has failed; or, not `counted`, it is given up by no fault of the prompt."""
        self._pumps.lost(group, why, counted=counted)

    def settle(self) -> None:
        """Name the state after what is going on, while collecting."""
        if self._machine.state not in OPEN:
            return
        if self._rollouts.exhausted(self._version):
            self._machine.enter(CollectorState.EXHAUSTED, "the last prompts are handed out")
        elif self._pumps.idle:
            self._machine.enter(CollectorState.THROTTLED, "nothing may be handed out")
        else:
            self._machine.enter(CollectorState.COLLECTING, "prompts are answered")

    def fail(self, why: str, cause: BaseException) -> None:
        """The attempt is over: whoever waits for a step is told."""
        log.error("failed: %s", why, exc_info=cause)
        kind = next((kind for kind in _KEPT if isinstance(cause, kind)), CollectorFailedError)
        if self._failure is None:
            self._failure = kind(why)
        self._machine.enter(CollectorState.FAILED, why)

    # ---- state ------------------------------------------------------------------------------

    def _end_of_stretch(self, step: int) -> End | None:
        """Drain when a step's groups are there, and take them when all slices have ended; None while that lasts."""
        self._raise_failure()
        interrupted = self._interrupted == step
        if self._machine.state in OPEN:
            if not interrupted and self._rollouts.missing(self._version):
                if self._spec.prompts.on_exceeded != "Fail" or not too_many_skipped(self._spec, self._account.counters()):
                    self._refuse_dead_end(step)
                    return None
                # The run is over, and need not wait for a batch that may never come: the driver asks why there is none.
                self._interrupted, interrupted = step, True
            self._machine.enter(CollectorState.DRAINING, f"step {step}{' is interrupted' if interrupted else ''}")
        if self._machine.state is not CollectorState.DRAINING:
            raise RuntimeError(f"step {step} cannot be taken while {self._machine.state}")
        if self._pumps.slices:
            return None
        taken = None if interrupted else self._rollouts.take(step, self._version)
        if taken is None and not interrupted:
            # Restored groups turned out to be too old: collect their replacements.
            self._machine.enter(CollectorState.COLLECTING, "groups were too old")
            self.settle()
            return None
        self._machine.enter(CollectorState.PAUSED, f"step {step}")
        return End(taken)

    def _resume(self, version: int) -> None:
        self._raise_failure()
        self._version, self._ahead = version, 0
        self._interrupted = None
        self._machine.enter(CollectorState.COLLECTING, f"version {version}")
        self.settle()

    def _refuse_dead_end(self, step: int) -> None:
        """Nobody answers anything and nothing may be handed out: waiting longer would change nothing."""
        if self._pumps.idle and not self._rollouts.in_flight and not self._rollouts.can_dispatch(self._version):
            counts = asdict(self._rollouts.ledger.counts())
            self.fail(f"step {step} lacks {self._rollouts.missing(self._version)} groups and none can come: {counts}",
                      CollectorFailedError("dead end"))  # fmt: skip
            self._raise_failure()

    def _moved(self, move: Transition) -> None:
        if move.after in OPEN:
            self._clock.run()
        else:
            self._clock.stop()
        log.debug("%s -> %s: %s", move.before, move.after, move.why)
        self._monitor.notify()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
