"""The collector: an asyncio actor beside the driver that keeps the engines busy and the steps fed.

One pump per replica asks its ranks for decode slices while the state is Collecting. `take` ends the collecting: it waits
until a step's groups are there and every slice has ended, so that no rank gets a decode call and a training call in
different orders than its neighbours. `resume` starts the next stretch. Answers in flight stay in the engines in between.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import Answer, TrainBatch
from rljob_workload.core.cap import Cap, in_flight_cap
from rljob_workload.core.ledger import SkipCause
from rljob_workload.core.rollouts import Group, RestoreReport, Rollouts, RolloutSettings, StepInfo
from rljob_workload.core.source import SeekableSource, SourceError
from rljob_workload.core.window import Window
from rljob_workload.data.builtin import TaskData, load_builtin
from rljob_workload.environments import load_environment
from rljob_workload.megatron.errors import EngineError, NonFiniteError
from rljob_workload.runtime.errors import cause_line
from rljob_workload.runtime.journal import RolloutsMaker, keeper_of_books
from rljob_workload.runtime.logs import log_to_file

log = logging.getLogger("rljob.collector")

#: Engine iterations of one decode slice at most: the time that a finished step may have to wait for another replica.
SLICE_ITERATIONS = 64


class CollectorState(StrEnum):
    """What the collector is doing."""

    STARTING = "Starting"
    COLLECTING = "Collecting"
    DRAINING = "Draining"
    PAUSED = "Paused"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Taken:
    """What the driver learns about a step's batch (the batch itself goes to the ranks)."""

    ordinals: tuple[int, ...]
    info: StepInfo
    wait_seconds: float


def cap_of(spec: RLJobSpec) -> Cap:
    """The cap on groups in flight. Ranks decode in slices, one call for all groups, so calls do not limit it."""
    grpo = spec.algorithm.grpo
    return in_flight_cap(
        spec.generation.max_in_flight_prompts,
        prompts_per_step=grpo.prompts_per_step,
        max_age=grpo.max_trajectory_age_steps,
        calls_per_group=0,
    )


def build_rollouts(spec: RLJobSpec, task: TaskData, keeper: RolloutsMaker = Rollouts) -> Rollouts:
    """The bookkeeping for a validated spec. `keeper`: another class of the same making (the audit journal's)."""
    grpo, generation = spec.algorithm.grpo, spec.generation
    source = SeekableSource(task.rows, seed=spec.data.seed, shuffle=spec.data.shuffle)
    window = Window(grpo.prompts_per_step, grpo.max_trajectory_age_steps, grpo.steps)
    settings = RolloutSettings(
        group_size=grpo.generations_per_prompt,
        in_flight_limit=cap_of(spec).effective,
        longest_prompt=generation.max_sequence_length - task.new_tokens(generation.max_new_tokens),
        answer_timeout=float(generation.answer_timeout_seconds),
        retry_budget=spec.prompts.retry_budget,
        filters_per_step=grpo.prompts_per_step,
    )
    return keeper(source, window, settings, _log_skip)


def _log_skip(ordinal: int, cause: SkipCause, particulars: str) -> None:
    log.warning("prompt %d is skipped (%s): %s", ordinal, cause, particulars)


class Collector:
    """The actor's class; `launch.py` wraps it."""

    def __init__(self, spec: dict[str, Any], directory: str, attempt: int) -> None:
        self._spec = RLJobSpec.model_validate(spec)
        task = load_builtin(str(self._spec.data.builtin))
        self._tokenizer = task.tokenizer
        self._environment = load_environment(str(self._spec.environment.builtin), fixed_length=task.eos is None)
        self._rollouts = build_rollouts(self._spec, task, keeper_of_books(Path(directory), attempt))
        self._scorers = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="environment")
        self._scoring: set[asyncio.Task[None]] = set()
        self._replicas: list[list[Any]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._slices = 0
        #: Answers that each replica's engine still has to deliver.
        self._busy: list[int] = []
        self._state = CollectorState.STARTING
        self._failure = ""
        self._failure_kind: type[Exception] = CollectorFailedError
        self._version = 0
        self._clock = _ActiveClock()
        log_to_file(Path(directory) / "logs" / f"collector-attempt-{attempt:06d}.log")

    # ---- the driver's calls -----------------------------------------------------------------

    async def restore(self, saved: dict[str, Any] | None, version: int | None = None, trained_before: int = 0) -> RestoreReport:
        """Go on from a checkpoint's state; before `start`. None: the checkpoint has no ledger, only trained prompts."""
        return self._rollouts.restore(
            saved,
            version=version,
            load_buffer=self._spec.checkpoint.load_replay_buffer,
            restart_on_change=self._spec.data.on_change == "Restart",
            trained_before=trained_before,
        )

    async def start(self, replicas: list[list[Any]], version: int) -> None:
        """Begin to collect on these replicas (each a list of rank actors)."""
        self._replicas = replicas
        self._busy = [0] * len(replicas)
        self._pumps = [asyncio.create_task(self._pump(index)) for index in range(len(replicas))]
        await self.resume(version)

    async def take(self, step: int) -> tuple[Taken, TrainBatch]:
        """The next step's batch; the collector is paused when it returns."""
        began = time.monotonic()
        async with self._changed:
            while (taken := await self._take_when_drained(step)) is None:
                # Restored groups turned out to be too old: collect their replacements.
                self._enter(CollectorState.COLLECTING)
                self._changed.notify_all()
            self._enter(CollectorState.PAUSED)
        batch, info = taken
        return Taken(batch.ordinals, info, time.monotonic() - began), batch

    async def _take_when_drained(self, step: int) -> tuple[TrainBatch, StepInfo] | None:
        """Wait for enough groups, then for the end of all slices. Holds the condition."""
        await self._changed.wait_for(lambda: self._failed or not self._rollouts.missing(self._version))
        self._raise_failure()
        self._enter(CollectorState.DRAINING)
        await self._changed.wait_for(lambda: self._failed or not self._slices)
        self._raise_failure()
        return self._rollouts.take(step, self._version)

    async def commit(self, step: int, ordinals: Sequence[int]) -> dict[str, Any]:
        """The step's optimizer step has been taken on all ranks. May be repeated. Returns the counters."""
        self._rollouts.commit(step, ordinals)
        self._rollouts.check()
        return self.counters()

    async def resume(self, version: int) -> None:
        """Collect again, now with these weights."""
        async with self._changed:
            self._raise_failure()
            self._version = version
            self._enter(CollectorState.COLLECTING)
            self._changed.notify_all()

    async def snapshot(self) -> dict[str, Any]:
        """Everything to resume from, of one moment (no await in between). Only while paused between two steps."""
        if self._state is not CollectorState.PAUSED:
            raise RuntimeError(f"no snapshot while {self._state}")
        return self._rollouts.snapshot()

    async def status(self) -> dict[str, Any]:
        """State, counters, and what is waited for longest."""
        now = self._clock.now()
        oldest = [
            {
                "ordinal": group.ordinal,
                "attempt": group.attempt,
                "answers": len(group.answers),
                "seconds_left": round(group.deadline - now, 1),
            }
            for group in self._rollouts.oldest_in_flight()
        ]
        cap = asdict(cap_of(self._spec))
        return {"state": self._state, "failure": self._failure, "oldest_in_flight": oldest, "cap": cap, **self.counters()}

    def counters(self) -> dict[str, Any]:
        """The ledger's counters, and the skipped ordinals by cause."""
        ledger = self._rollouts.ledger
        return {"counts": asdict(ledger.counts()), "skipped_names": ledger.skipped_names()}

    # ---- the pumps --------------------------------------------------------------------------

    async def _pump(self, replica: int) -> None:
        """Keep one replica generating while the state is Collecting."""
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._wants_slice(replica))
                    self._slices += 1
                try:
                    await self._slice(replica)
                finally:
                    async with self._changed:
                        self._slices -= 1
                        self._changed.notify_all()
        except Exception as err:  # noqa: BLE001 - handed to whoever waits for the next step, with its cause
            # A remote error comes as both Ray's class and its own, with a traceback as its text.
            cause = getattr(err, "cause", err)
            await self._fail(f"replica {replica}: {type(cause).__name__}: {cause_line(str(cause))}", cause)

    def _wants_slice(self, replica: int) -> bool:
        if self._state is not CollectorState.COLLECTING or not self._rollouts.missing(self._version):
            return False
        return self._busy[replica] > 0 or self._rollouts.can_dispatch_now(self._version)

    async def _slice(self, replica: int) -> None:
        share = None if len(self._replicas) == 1 else self._share()
        requests = self._rollouts.dispatch(self._version, self._clock.now(), share)
        # A freed slot is worth an early return only if something can fill it.
        want = 1 if self._rollouts.can_dispatch(self._version) else max(1, self._rollouts.missing(self._version))
        ranks = self._replicas[replica]
        slices = await asyncio.gather(*(rank.decode.remote(requests, want, SLICE_ITERATIONS) for rank in ranks))
        self._busy[replica] = slices[0].left
        self._accept([answer for result in slices for answer in result.answers])

    def _share(self) -> int:
        """New groups for one replica's slice, so that the first pump does not take them all."""
        return -(-self._spec.algorithm.grpo.prompts_per_step // len(self._replicas))

    def _accept(self, answers: Sequence[Answer]) -> None:
        for group in self._rollouts.arrive(answers):
            if self._environment.quick:
                # Judged at once: a slice that starts before its neighbours are judged would run with few requests.
                self._judged(group, self._judge)
                continue
            task = asyncio.create_task(self._score(group))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        for group in self._rollouts.overdue(self._clock.now()):
            seconds = self._spec.generation.answer_timeout_seconds
            self._lost(group, f"{len(group.answers)} answers after {seconds} s (generation.answerTimeoutSeconds)")

    async def _score(self, group: Group) -> None:
        """Ask a slow environment, in a thread and with its deadline."""
        timeout = float(self._spec.environment.timeout_seconds)
        work = asyncio.get_running_loop().run_in_executor(self._scorers, self._judge, group)
        done, _ = await asyncio.wait([work], timeout=timeout)
        if done:
            self._judged(group, lambda _: work.result())
        else:
            work.add_done_callback(lambda late: late.cancelled() or late.exception())
            self._lost(group, f"the environment took more than {timeout:g} s (environment.timeoutSeconds)")
        async with self._changed:
            self._changed.notify_all()

    def _judge(self, group: Group) -> list[tuple[float, bool]]:
        """Reward and verdict of each answer."""
        expected = self._rollouts.expected(group.ordinal)
        scores = [self._environment.score(self._tokenizer.decode(a.tokens), expected) for a in group.answers]
        for score in scores:
            if not abs(score.reward) < float("inf"):
                raise ValueError(f"the reward is {score.reward}")
        return [(float(score.reward), bool(score.correct)) for score in scores]

    def _judged(self, group: Group, judge: Callable[[Group], list[tuple[float, bool]]]) -> None:
        """Take over the environment's verdict; what goes wrong there costs one try."""
        try:
            scores = judge(group)
        except Exception as err:  # noqa: BLE001 - whatever an environment raises, the prompt is retried and counted
            self._lost(group, f"the environment raised {type(err).__name__}: {err}")
        else:
            self._rollouts.scored(group, scores)

    def _lost(self, group: Group, why: str) -> None:
        cause = self._rollouts.failed(group)
        end = f"skipped ({cause})" if cause is SkipCause.RETRY_BUDGET_EXHAUSTED else "will be answered again"
        log.warning("prompt %d, try %d: %s; %s", group.ordinal, group.attempt + 1, why, end)

    # ---- state ------------------------------------------------------------------------------

    @property
    def _failed(self) -> bool:
        return self._state is CollectorState.FAILED

    def _enter(self, state: CollectorState) -> None:
        if state is CollectorState.COLLECTING:
            self._clock.run()
        else:
            self._clock.stop()
        self._state = state

    async def _fail(self, why: str, err: BaseException) -> None:
        log.error("failed: %s", why, exc_info=err)
        async with self._changed:
            self._failure = why
            kept = (kind for kind in (SourceError, NonFiniteError, EngineError) if isinstance(err, kind))
            self._failure_kind = next(kept, CollectorFailedError)
            self._enter(CollectorState.FAILED)
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failed:
            raise self._failure_kind(self._failure)


class CollectorFailedError(Exception):
    """A replica or the collector itself failed; the attempt is over."""


class _ActiveClock:
    """Seconds of collecting: answers' deadlines stand still while the engines do."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def now(self) -> float:
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._total + running

    def run(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        self._total, self._since = self.now(), None
