"""The pumps: one per replica asks its ranks for decode slices, and a keeper of deadlines gives up what does not come.

A pump looks at the collector's state and pulls prompts in one go under the lock: what pauses the collecting cannot come in
between, and no prompt is pulled that is not handed out at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rljob_api.layout import layout_of
from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import HTTP, Answer, DecodeSlice, Request, TrainBatch
from rljob_workload.core.groups import Group
from rljob_workload.core.ledger import SkipCause
from rljob_workload.core.slices import SliceGoal, share_left
from rljob_workload.runtime.errors import HungError, cause_line
from rljob_workload.runtime.owner import Owner
from rljob_workload.runtime.players import Players
from rljob_workload.runtime.scoring import ScoreError, Scorer

log = logging.getLogger("rljob.collector")

#: Engine iterations of a slice at most, while somebody waits by HTTP.
ASKED_ITERATIONS = 8

#: Without a new request or report for so long, a burst of them is over; and it is over after so long in any case.
QUIET_SECONDS = 0.008
LONGEST_BURST_SECONDS = 0.1
#: Between two looks at a burst.
LOOK_SECONDS = 0.002

#: Requests of a slice, and what it goes on for.
_Order = tuple[list[Request], SliceGoal]


class PumpsOwner(Owner, Protocol):
    """The collector, as its pumps see it; only `scorer` is used without the lock, too."""

    @property
    def scorer(self) -> Scorer: ...
    @property
    def players(self) -> Players | None: ...
    @property
    def version(self) -> int: ...
    @property
    def now(self) -> float: ...
    @property
    def collecting(self) -> bool: ...
    @property
    def ahead(self) -> bool: ...
    @property
    def serving(self) -> bool: ...
    def fail(self, why: str, cause: BaseException) -> None: ...


class Pumps:
    """Slices in, answers out, groups scored."""

    def __init__(self, owner: PumpsOwner, spec: RLJobSpec) -> None:
        self._owner = owner
        self._spec = spec
        self._replicas: Sequence[Sequence[Any]] = []
        self._numbers: Sequence[Sequence[int]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        #: Answers that each replica's engine still has to deliver.
        self._busy: list[int] = []
        #: Which replica answers a group, by its tag; forgotten when it is no longer open.
        self._given: dict[tuple[int, int], int] = {}
        #: When each replica's running slice began.
        self._slices: dict[int, float] = {}

    @property
    def slices(self) -> dict[int, float]:
        """The replicas that run a decode slice, and for how many seconds."""
        return {replica: time.monotonic() - since for replica, since in self._slices.items()}

    @property
    def idle(self) -> bool:
        """Nothing is being generated, and nothing is about to be."""
        return not self._slices and not any(self._wanted(index) for index in range(len(self._replicas)))

    def start(self, replicas: Sequence[Sequence[Any]], numbers: Sequence[Sequence[int]]) -> None:
        """Begin to pump; in the event loop of the actor's work. `numbers`: of the ranks of each replica."""
        self._replicas, self._numbers = replicas, numbers
        self._busy = [0] * len(replicas)
        for index in range(len(replicas)):
            self._spawn(partial(self._pump, index), f"replica {index}")
        self._spawn(self._keep_deadlines, "the keeper of deadlines")

    def _spawn(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Run beside the others; whatever goes wrong there ends the attempt, with its cause."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as err:  # noqa: BLE001 - handed to whoever waits for the next step
                # A remote error comes as both Ray's class and its own, with a traceback as its text.
                cause = getattr(err, "cause", None) or err
                with self._owner.monitor.changing():
                    self._owner.fail(f"{name}: {type(cause).__name__}: {cause_line(str(cause))}", cause)

        task = asyncio.create_task(guarded(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- training ---------------------------------------------------------------------------

    def train(self, batch: TrainBatch, wake: bool) -> Awaitable[list[Any]]:
        """Ask all ranks for one training step. Slices have ended; those that are begun from now on come behind it.

        Awaited: what each rank says, in the order of their numbers. Raises what a rank raised, or HungError naming those
        that do not answer.
        """
        ranks = {number: rank for replica, numbers in zip(self._replicas, self._numbers, strict=True)
                 for number, rank in zip(numbers, replica, strict=True)}  # fmt: skip
        ordered = sorted(ranks)
        return self._call("train", ordered, [ranks[number].train.remote(batch, wake) for number in ordered])

    async def _call(
        self, what: str, numbers: Sequence[int], calls: Sequence[Awaitable[Any]], *, behind: bool = False
    ) -> list[Any]:
        """The results of one call to each of these ranks. `behind` a training step, which has its own deadline."""
        seconds = float(self._spec.deadlines.stall_seconds) * (2 if behind else 1)
        futures = [asyncio.ensure_future(call) for call in calls]
        # The first failure is the cause; the others then wait in a collective.
        await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        results = [future.result() for future in futures if future.done()]
        if absent := [number for number, future in zip(numbers, futures, strict=True) if not future.done()]:
            named = ", ".join(map(str, absent))
            raise HungError(f"{what}: no answer of rank {named} within {seconds:g} s (deadlines.stallSeconds)")
        return results

    # ---- slices -----------------------------------------------------------------------------

    async def _pump(self, replica: int) -> None:
        """Keep one replica generating while the collector is collecting.

        The wait for something to do has no deadline of its own: whoever needs the answers (`take`) has one.
        """
        while True:
            await self._gather(replica)
            order = await self._owner.monitor.first(lambda: self._next_slice(replica))
            assert order is not None
            try:
                answers, left = await self._slice(replica, *order)
                with self._owner.monitor.changing():
                    self._busy[replica] = left
                    self._owner.desk.arrive(answer for answer in answers if answer.tag[0] == HTTP)
                    complete = self._owner.rollouts.arrive(answers)
                    expected = [self._owner.rollouts.expected(group.ordinal) for group in complete]
                self._judge(list(zip(complete, expected, strict=True)))
            finally:
                with self._owner.monitor.changing():
                    del self._slices[replica]
                    self._give_up_overdue()
                    self._owner.settle()

    async def _gather(self, replica: int) -> None:
        """An idle engine waits a moment for the rest of a burst: each request by itself costs as much as all together."""
        monitor, desk, players = self._owner.monitor, self._owner.desk, self._owner.players
        await monitor.first(lambda: self._first_of_burst(replica))
        began = time.monotonic()
        while not self._busy[replica] and (now := time.monotonic()) < began + LONGEST_BURST_SECONDS:
            with monitor.reading():
                if not desk.waits(replica) or (players is not None and not players.thinking(replica)):
                    return  # nobody is left who could ask
                newest = max(began, desk.newest(replica), players.newest(replica) if players else 0.0)
            if now > newest + QUIET_SECONDS:
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _first_of_burst(self, replica: int) -> bool | None:
        """True when a slice has something to do. Agents get the prompts that they may have, and then ask."""
        if not self._wanted(replica):
            return None
        if self._owner.players is None or self._busy[replica]:
            return True
        if self._owner.collecting and self._owner.rollouts.missing(self._owner.version):
            self._dispatch(replica)
        return self._owner.desk.waits(replica) or None

    def _wanted(self, replica: int) -> bool:
        if self._owner.serving and self._owner.desk.wants(replica):
            return True
        rollouts, version = self._owner.rollouts, self._owner.version
        if not self._owner.collecting or not rollouts.missing(version):
            return False
        return self._busy[replica] > 0 or rollouts.can_dispatch_now(version)

    def _next_slice(self, replica: int) -> _Order | None:
        if not self._wanted(replica):
            return None
        rollouts, version, desk = self._owner.rollouts, self._owner.version, self._owner.desk
        requests = self._dispatch(replica) if self._owner.collecting and rollouts.missing(version) else []
        asked = desk.wants(replica)
        requests += desk.take(replica)
        if not requests and not self._busy[replica]:
            return None
        slots = self._slots(replica) if rollouts.can_dispatch(version) else 0
        self._slices[replica] = time.monotonic()
        self._owner.settle()
        goal = SliceGoal(max(1, rollouts.missing(version)), slots)
        # Others may ask meanwhile: those who come by HTTP do not know of slices.
        return requests, replace(goal, iterations=ASKED_ITERATIONS) if asked else goal

    def _dispatch(self, replica: int) -> list[Request]:
        """New prompts: for the engine, or for agents, whose requests come by HTTP."""
        rollouts, players = self._owner.rollouts, self._owner.players
        if players is not None:
            players.open(rollouts.dispatch(self._owner.version, self._owner.now))
            return []
        requests = rollouts.dispatch(self._owner.version, self._owner.now, self._share_left(replica))
        self._given.update(dict.fromkeys((request.tag for request in requests), replica))
        return requests

    def _share_left(self, replica: int) -> int | None:
        """Groups that this replica's slice may take in, so that the first pump does not take them all; None: any number."""
        if len(self._replicas) == 1:
            return None
        rollouts = self._owner.rollouts
        self._given = {tag: whose for tag, whose in self._given.items() if rollouts.is_open_tag(tag)}
        groups = rollouts.in_flight_soon(self._owner.version)
        return share_left(groups, len(self._replicas), list(self._given.values()).count(replica))

    def _slots(self, replica: int) -> int:
        """Answers that the replica's engines generate at once; a replica that shares experts has several."""
        engines = len(self._replicas[replica]) // layout_of(self._spec).model_ranks
        return self._spec.generation.max_requests * max(1, engines)

    async def _slice(self, replica: int, requests: Sequence[Request], goal: SliceGoal) -> tuple[list[Answer], int]:
        """One call of all ranks of a replica. Raises what a rank raised, or HungError naming those that do not answer."""
        ranks, numbers = self._replicas[replica], self._numbers[replica]
        calls = [rank.decode.remote(requests, goal) for rank in ranks]
        slices: list[DecodeSlice] = await self._call("decode", numbers, calls, behind=self._owner.ahead)
        return [answer for result in slices for answer in result.answers], slices[0].left

    # ---- scores -----------------------------------------------------------------------------

    def _judge(self, complete: Sequence[tuple[Group, str]]) -> None:
        """Ask the environment about complete groups; not with the lock held, for it may take its time."""
        scorer = self._owner.scorer
        for group, expected in complete:
            if not scorer.quick:
                self._spawn(partial(self._score, group, expected), f"prompt {group.ordinal}")
                continue
            # In place: a slice that starts before its neighbours are judged would run with few requests.
            try:
                scores = scorer.score(group, expected)
            except ScoreError as err:
                with self._owner.monitor.changing():
                    self.lost(group, str(err))
            else:
                with self._owner.monitor.changing():
                    self._owner.rollouts.scored(group, scores)

    async def _score(self, group: Group, expected: str) -> None:
        try:
            scores = await self._owner.scorer.score_in_thread(group, expected)
        except ScoreError as err:
            with self._owner.monitor.changing():
                self.lost(group, str(err))
        else:
            with self._owner.monitor.changing():
                self._owner.rollouts.scored(group, scores)
        finally:
            with self._owner.monitor.changing():
                self._owner.settle()

    # ---- deadlines --------------------------------------------------------------------------

    async def _keep_deadlines(self) -> None:
        """Give up groups whose answers do not all come in time, also when nothing else happens any more."""
        monitor = self._owner.monitor
        while True:
            with monitor.reading():
                seen, left = monitor.changes, self._until_next_deadline()
                if left is not None and left < 0:
                    self._give_up_overdue()
                    self._owner.settle()
                    monitor.notify()
                    continue
            if left is None or self._owner.players is not None:
                await monitor.changed(seen, left)
            else:  # whatever is handed out meanwhile has a later deadline
                await asyncio.sleep(left)

    def _until_next_deadline(self) -> float | None:
        """Seconds until a group or a validation rollout is overdue; None while there is none whose clock runs."""
        first = self._owner.rollouts.first_deadline()
        left = [first - self._owner.now] if first is not None and self._owner.collecting else []
        players = self._owner.players
        if players is not None and (seconds := players.until_deadline()) is not None:
            left.append(seconds)
        return min(left, default=None)

    def _give_up_overdue(self) -> None:
        seconds = self._spec.generation.answer_timeout_seconds
        for group in self._owner.rollouts.overdue(self._owner.now):
            players = self._owner.players
            done = f"{len(group.answers)} answers after {seconds} s" if players is None else players.late(group)
            self.lost(group, f"{done} (generation.answerTimeoutSeconds)")
        if self._owner.players is not None:
            self._owner.players.give_up_overdue()

    def lost(self, group: Group, why: str, *, counted: bool = True) -> None:
        """This try of a group has failed, or is given up by no fault of the prompt; with the lock held."""
        if self._owner.players is not None:
            self._owner.players.close(group, why)
        cause: SkipCause | None = None
        if counted:
            cause = self._owner.rollouts.failed(group)
        else:
            self._owner.rollouts.withdraw(group)
        end = f"skipped ({cause})" if cause is SkipCause.RETRY_BUDGET_EXHAUSTED else "will be answered again"
        log.warning("prompt %d, try %d: %s; %s", group.ordinal, group.attempt + 1, why, end)
