"""The steps of an attempt, over actors that are ready.

A step is: the collector takes a batch, has it trained on all ranks and commits it (one call), save if due (the engines stay
down until the save has ended), wake, validate if due, collect again. Whether a save is due is decided before the step.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from queue import Empty

from rljob_api.exitcodes import ExitCode
from rljob_api.progress import Finished
from rljob_workload.core.due import ENDING, Cause
from rljob_workload.core.handover import Passage
from rljob_workload.data.builtin import TaskData
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.keeper import Keeper, Parts
from rljob_workload.runtime.progress import utc_now
from rljob_workload.runtime.prompts import too_many_skipped
from rljob_workload.runtime.rank import RankStep, woken
from rljob_workload.runtime.step import Phases, metrics_line, prompt_counts
from rljob_workload.runtime.stop import StopSignal
from rljob_workload.runtime.stretch import Stepped
from rljob_workload.runtime.validation import agents_verdicts, greedy_verdicts, target_reached, validates

log = logging.getLogger("rljob.driver")

#: The collector keeps the deadline of a step itself and says what it waits for; this much later it does not answer at all.
ANSWER_SECONDS = 10.0


class Training:
    """Trains step after step until the run has what it was for."""

    def __init__(self, parts: Parts, keeper: Keeper, stop: StopSignal, task: TaskData, version: int, cap: int) -> None:
        """`version`: steps behind the weights; `cap`: prompts in flight at most, for the metrics."""
        self._attempt = parts.attempt
        self._spec = parts.attempt.spec
        self._calls = parts.calls
        self._record = parts.record
        self._progress = parts.progress
        self._control = parts.control
        self._keeper = keeper
        self._due = keeper.due
        self._stop = stop
        self._task = task
        self._version = version
        self._cap = cap
        self._stall = float(self._spec.deadlines.stall_seconds)

    def to_the_end(self) -> Finished:
        """All steps; the last one's save may still be on its way. Raises RunError for every other way to end."""
        grpo = self._spec.algorithm.grpo
        with self._stop.while_training(self._control.ask_stop):
            if reached := self._reached_before():
                return reached
            while self._version < grpo.steps:
                reached = self._step(self._version + 1)
                if reached is not None:
                    return reached
        return Finished(reason="Completed", message=f"all {grpo.steps} steps are done")

    def _reached_before(self) -> Finished | None:
        """The target, where the weights that this attempt goes on from are the ones that an earlier one reached it with."""
        before = self._record.before
        return target_reached(self._spec, self._version, before.validation_reward if before.step == self._version else None)

    # ---- one step ---------------------------------------------------------------------------

    def _step(self, step: int) -> Finished | None:
        self._keeper.check()
        self._keeper.acknowledge(self._version)
        decision = self._due.decide(step)
        phases, began = Phases(), time.monotonic()
        with phases.timed("generate"):
            stepped = self._ask(step, wake=not decision.save, onward=not decision.save and self._goes_on(step))
        if stepped is None:
            self._end_if_too_many_are_skipped()
            self._serve(self._due.urgent())
            return None
        results = stepped.ranks
        handover = max(result.handover_seconds for result in results)
        phases.move("generate", "train", stepped.train_seconds - handover)
        phases.move("generate", "handover", handover)
        phases.move("generate", "commit", stepped.commit_seconds)
        self._trained(step, stepped, handover)
        if decision.save:
            with phases.timed("save"):
                self._keeper.save(step)
                if not decision.end:
                    results = woken(results, self._wake())
        reward = self._validate_if_due(step, phases) if not decision.end else None
        reached = target_reached(self._spec, step, reward)
        too_many = too_many_skipped(self._spec, stepped.counters)
        if (too_many or reached is not None) and not decision.save:
            # The weights that reached the target are what the run was for; a stopped run goes on from here.
            with phases.timed("save"):
                self._keeper.save_if_new(self._version)
        self._due.stepped(time.monotonic() - began - phases.seconds.get("save", 0.0))
        self._report(step, stepped, results, phases, reward)
        if too_many is not None:
            self._keeper.wait()
            raise RunError(ExitCode.SKIPPED_TOO_MANY, f"step {step}, which was saved: {too_many}")
        if reached is None and step < self._spec.algorithm.grpo.steps and not stepped.onward:
            # Asked for since the decision: the collector is down now, and one more step may be too long to wait.
            self._serve(decision.end or self._due.urgent())
        return reached

    def _ask(self, step: int, *, wake: bool, onward: bool) -> Stepped | None:
        """The step, trained and committed; None where something more urgent has come up (the collector is paused then)."""
        self._progress.update(phase="Generating")
        interrupted = self._due.urgent() is not None
        if interrupted:  # before it is asked for the step, whose groups may be there at once
            self._calls.get(self._calls.collector.interrupt.remote(step), self._stall, "the collector hangs")
        future, events = self._calls.collector.step.remote(step, wake, onward).future(), self._control.events
        future.add_done_callback(lambda _: events.put("stepped"))
        # The step's groups, the last slice and training have this long each, and the collector says which of them hangs.
        deadline = time.monotonic() + 3 * self._stall + ANSWER_SECONDS
        looks = time.monotonic() + self._stall + ANSWER_SECONDS
        while not future.done():
            if not interrupted and self._due.urgent():
                interrupted = True
                self._calls.collector.interrupt.remote(step)
            left = looks - time.monotonic()
            if left < 0:
                if time.monotonic() > deadline or not self._calls.collector_answers():
                    raise RunError(ExitCode.HUNG, self._calls.stall_report(step, self._stall))
                left, looks = self._stall, looks + self._stall
            with suppress(Empty):
                events.get(timeout=left if interrupted else min(left, max(0.0, self._due.seconds_to_spare())))
        stepped: Stepped | None = future.result()
        return stepped

    def _serve(self, cause: Cause | None) -> None:
        """Between two steps, the collector down: save if that is wanted, end if that is, or go on."""
        step = self._version
        slept = cause is not None and self._keeper.save_if_new(self._version)
        if cause in ENDING:
            self._keeper.wait()
            code = ExitCode.DEADLINE if cause is Cause.DEADLINE else ExitCode.STOPPED
            why = (
                f"deadlines.activeSeconds ({self._spec.deadlines.active_seconds}) leaves no time for another step"
                if cause is Cause.DEADLINE
                else f"stopped by {self._stop.by}"
            )
            saved = f" after step {step}, which was saved" if step else " before the first step; there is nothing to save"
            raise RunError(code, why + saved)
        if slept:
            self._wake()
        self._calls.get(self._calls.collector.resume.remote(self._version), self._stall, "the collector hangs")

    def _end_if_too_many_are_skipped(self) -> None:
        """The collector gives no batch any more where `prompts.onExceeded: Fail` ends the run. Raises RunError."""
        if self._spec.prompts.on_exceeded != "Fail":
            return
        status = self._calls.get(self._calls.collector.status.remote(), self._stall, "the collector hangs")
        if why := too_many_skipped(self._spec, status):
            self._progress.update(prompts=prompt_counts(status))
            self._keeper.save_if_new(self._version)
            self._keeper.wait()
            where = f"step {self._version}, which was saved" if self._version else "before the first step"
            raise RunError(ExitCode.SKIPPED_TOO_MANY, f"{where}: {why}")

    def _goes_on(self, step: int) -> bool:
        """Whether the next stretch of collecting can begin with the commit: nothing between them needs the collector down."""
        if step == self._spec.algorithm.grpo.steps or validates(self._spec, step):
            return False
        return self._spec.prompts.on_exceeded != "Fail"  # the counters may then end the run, after a save

    def _trained(self, step: int, stepped: Stepped, handover: float) -> None:
        """The weights have taken this step: everything that counts steps learns of it."""
        self._version = step
        self._control.stepped(step)
        self._keeper.stepped(max(result.stats.grad_norm for result in stepped.ranks))
        totals = self._record.totals
        totals.spend(stepped.wait_seconds, handover)
        totals.add(stepped.info)
        totals.trained_prompts += stepped.prompts
        if (trained := stepped.counters["counts"]["trained"]) != totals.trained_prompts:
            raise RunError(
                ExitCode.UNEXPECTED,
                f"step {step}: the ledger counts {trained} trained prompts, the driver {totals.trained_prompts}",
            )

    def _validate_if_due(self, step: int, phases: Phases) -> float | None:
        if not validates(self._spec, step):
            return None
        with phases.timed("validate"):
            return self._validate(step)

    def _validate(self, step: int) -> float:
        self._progress.update(phase="Validating")
        assert self._spec.validation is not None
        with_agents = self._spec.environment.agent is not None
        right, count = (agents_verdicts if with_agents else greedy_verdicts)(self._calls, self._spec, self._task)
        reward = right / count
        log.info("step %d: validation reward %.3f (%d of %d right)", step, reward, right, count)
        self._progress.update(validation_step=step, validation_reward=reward)
        return reward

    def _wake(self) -> list[Passage]:
        passages: list[Passage] = self._calls.ranks("wake", self._spec.deadlines.handover_seconds, ExitCode.HANDOVER_TIMEOUT)
        return passages

    # ---- reporting --------------------------------------------------------------------------

    def _report(
        self,
        step: int,
        stepped: Stepped,
        results: list[RankStep],
        phases: Phases,
        validation_reward: float | None,
    ) -> None:
        info, clocks, totals = stepped.info, self._record.clocks, self._record.totals
        line = metrics_line(step, self._attempt.number, clocks, info, results, stepped.counters["counts"], phases, totals)
        line |= {"starved_seconds": round(stepped.wait_seconds, 5), "in_flight_cap": self._cap}
        if validation_reward is not None:
            line["validation_reward"] = validation_reward
        self._record.write(line)
        self._progress.update(
            step=step,
            last_step_time=utc_now(),
            reward=info.reward,
            elapsed_seconds=clocks.elapsed,
            consumed_samples=totals.consumed_samples,
            prompts=prompt_counts(stepped.counters),
        )
        if step % 10 == 0 or validation_reward is not None:
            log.info("step %d of %d: reward %.3f, loss %+.4f, entropy %.3f, %d answers over versions, %.1f s",
                     step, self._spec.algorithm.grpo.steps, info.reward, line["loss"], line["entropy"],
                     info.spanning, clocks.elapsed)  # fmt: skip
