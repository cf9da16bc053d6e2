"""The driver: one attempt of a run, from actors to the last step.

A step is: the collector takes a batch, has it trained on all ranks and commits it (one call), save if due (the engines stay
down until the save has ended), wake, validate if due, collect again. Whether a save is due is decided before the step. Every
wait has a deadline, and every way to end badly has its own exit code.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty

import ray
from ray.exceptions import RayActorError, RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_api.layout import layout_of
from rljob_api.progress import CheckpointInfo, Finished
from rljob_workload.core.checkpoint import Checkpoint, CheckpointError, RunDirectory
from rljob_workload.core.due import ENDING, Cause, Due, DueRules
from rljob_workload.core.handover import Passage
from rljob_workload.runtime import launch, preflight
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.control import Control
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.progress import Progress, utc_now
from rljob_workload.runtime.prompts import cap_report, too_many_skipped
from rljob_workload.runtime.rank import RankStep, woken
from rljob_workload.runtime.record import Record
from rljob_workload.runtime.resume import Beginning, beginning, checkpoint_info, resume
from rljob_workload.runtime.saves import Saves
from rljob_workload.runtime.serving import close_server, server_place
from rljob_workload.runtime.settings import Attempt
from rljob_workload.runtime.step import Phases, metrics_line, prompt_counts
from rljob_workload.runtime.stop import StopSignal
from rljob_workload.runtime.stretch import Stepped
from rljob_workload.runtime.validation import agents_verdicts, greedy_verdicts, target_reached, validates
from rljob_workload.runtime.watch import Watch

log = logging.getLogger("rljob.driver")

#: The collector keeps the deadline of a step itself and says what it waits for; this much later it does not answer at all.
ANSWER_SECONDS = 10.0


class Driver:
    """Runs one attempt. `run` returns how it finished or raises `RunError`."""

    def __init__(
        self,
        attempt: Attempt,
        progress: Progress,
        stop: StopSignal,
        control: Control,
        *,
        spread: bool,
        token_file: Path | None = None,
    ) -> None:
        """`spread`: nodes are different machines; `token_file`: of the run's token, which its HTTP server asks for too."""
        self._attempt = attempt = preflight.with_model(attempt)
        self._token_file = token_file
        self._spec = attempt.spec
        self._progress = progress
        self._stop = stop
        self._control = control
        self._spread = spread
        self._directory = RunDirectory(attempt.directory)
        preflight.check_settings(self._spec)
        self._task = preflight.load_task(self._spec)
        preflight.check_directory(attempt.directory)
        self._record = Record(attempt)
        self._actors: launch.Actors | None = None
        self._saves: Saves | None = None
        self._beginning: Beginning | None = None
        self._version = 0
        self._newest: CheckpointInfo | None = None
        self._ticket = 0
        self._saved_step = 0
        self._cap = 0
        self._stall = float(self._spec.deadlines.stall_seconds)
        self._due = self._new_due()

    def _new_due(self) -> Due:
        rules = DueRules(
            every_steps=self._spec.checkpoint.every_steps,
            last_step=self._spec.algorithm.grpo.steps,
            every_seconds=self._spec.checkpoint.every_seconds,
            deadline=self._record.ends,
        )
        return Due(rules, time.monotonic)

    # ---- the attempt ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Decide where to go on from. It needs no Ray, so that a refusal comes before one is started.

        Raises RunError: see `beginning`; SAVE_FAILED where the volume cannot be written.
        """
        try:
            self._prepared()
        except OSError as err:
            raise self._unwritable(err) from err

    def _prepared(self) -> Beginning:
        if self._beginning is None:
            self._beginning = beginning(self._attempt)
            if self._beginning.checkpoint is None:
                preflight.check_weights(self._attempt)
        return self._beginning

    def _unwritable(self, err: OSError) -> RunError:
        where = err.filename or self._attempt.directory
        return RunError(ExitCode.SAVE_FAILED, f"cannot write {where}: {err.strerror or err}")

    def run(self) -> Finished:
        """Start, resume, train to the end."""
        try:
            self._start()
            with Watch(self._calls().actors, self._progress).looking():
                finished = self._train_to_the_end()
            self._ready_saves().wait()
        except RayTaskError as err:
            raise self._calls().classified(err) from err
        except RayActorError as err:
            raise self._calls().lost(err) from err
        except CheckpointError as err:
            raise RunError(ExitCode.SAVE_FAILED, str(err)) from err
        except OSError as err:
            raise self._unwritable(err) from err
        finally:
            if self._saves is not None:
                self._saves.settle()
            if self._actors is not None and ray.is_initialized():
                close_server(self._spec, self._actors)
                self._actors.kill()
            self._record.close()
        self._progress.update(
            phase="Finished", finished=finished, elapsed_seconds=self._record.clocks.elapsed, oldest=[], handover=None
        )
        return finished

    def _start(self) -> None:
        began = time.monotonic()
        begin = self._prepared()
        fresh = begin.checkpoint is None
        for name in self._directory.remove_unfinished(begin.token):
            log.info("removed the unfinished %s of an earlier attempt", name)
        self._saves = Saves(self._attempt, begin.token, self._directory)
        self._actors = launch.launch(
            self._attempt, spread=self._spread, place=server_place(self._attempt, self._token_file, spread=self._spread)
        )
        placed = time.monotonic()
        self._progress.update(phase="Loading")
        ranks = self._actors.ranks
        deadline = self._spec.deadlines.first_step_seconds
        address = self._calls().get(ranks[0].address.remote(), deadline, "rank 0 did not name its address")
        self._calls().get([rank.setup.remote(address, fresh) for rank in ranks], deadline, "the ranks did not get ready")
        loaded = time.monotonic()
        resumed = resume(self._calls(), begin.checkpoint, self._attempt, self._record.totals, self._record.before)
        self._version = self._saved_step = resumed.version
        self._newest = resumed.report.get("checkpoint")
        if begin.checkpoint is not None:
            self._saves.resumed(begin.checkpoint)
        urls = self._calls().get(
            self._actors.collector.start.remote(self._actors.replicas, self._version, layout_of(self._spec).replicas()),
            deadline,
            "the collector hangs",
        )
        self._record.begin(self._version)
        ready = time.monotonic()
        log.info("ready: actors %.1f s, model and engine %.1f s, resume %.1f s",
                 placed - began, loaded - placed, ready - loaded)  # fmt: skip
        status = self._calls().get(self._calls().collector.status.remote(), deadline, "the collector does not answer")
        cap = cap_report(status["cap"])
        self._cap = cap.effective
        # One update: a report that names what it resumed from also has the prompts of then.
        self._progress.update(
            phase="Generating",
            prompts=prompt_counts(status),
            in_flight_prompts=cap,
            dp_openai_server_base_urls=urls,
            **resumed.report,
        )
        if why := too_many_skipped(self._spec, status):
            raise RunError(ExitCode.SKIPPED_TOO_MANY, why)

    def _train_to_the_end(self) -> Finished:
        grpo = self._spec.algorithm.grpo
        self._due = self._new_due()  # what was asked before had nothing to save; its seconds count from here
        self._control.attach(self._due, self._version, self._newest)
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
        self._ready_saves().check()
        if self._version == self._saved_step:
            self._acknowledge()
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
                self._save(step)
                if not decision.end:
                    results = woken(results, self._wake())
        reward = self._validate_if_due(step, phases) if not decision.end else None
        reached = target_reached(self._spec, step, reward)
        too_many = too_many_skipped(self._spec, stepped.counters)
        if (too_many or reached is not None) and not decision.save:
            # The weights that reached the target are what the run was for; a stopped run goes on from here.
            with phases.timed("save"):
                self._save_if_new()
        self._due.stepped(time.monotonic() - began - phases.seconds.get("save", 0.0))
        self._report(step, stepped, results, phases, reward)
        if too_many is not None:
            self._ready_saves().wait()
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
            self._calls().get(self._calls().collector.interrupt.remote(step), self._stall, "the collector hangs")
        future, events = self._calls().collector.step.remote(step, wake, onward).future(), self._control.events
        future.add_done_callback(lambda _: events.put("stepped"))
        # The step's groups, the last slice and training have this long each, and the collector says which of them hangs.
        deadline = time.monotonic() + 3 * self._stall + ANSWER_SECONDS
        looks = time.monotonic() + self._stall + ANSWER_SECONDS
        while not future.done():
            if not interrupted and self._due.urgent():
                interrupted = True
                self._calls().collector.interrupt.remote(step)
            left = looks - time.monotonic()
            if left < 0:
                if time.monotonic() > deadline or not self._calls().collector_answers():
                    raise RunError(ExitCode.HUNG, self._calls().stall_report(step, self._stall))
                left, looks = self._stall, looks + self._stall
            with suppress(Empty):
                events.get(timeout=left if interrupted else min(left, max(0.0, self._due.seconds_to_spare())))
        stepped: Stepped | None = future.result()
        return stepped

    def _serve(self, cause: Cause | None) -> None:
        """Between two steps, the collector down: save if that is wanted, end if that is, or go on."""
        step = self._version
        slept = cause is not None and self._save_if_new()
        if cause in ENDING:
            self._ready_saves().wait()
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
        self._calls().get(self._calls().collector.resume.remote(self._version), self._stall, "the collector hangs")

    def _end_if_too_many_are_skipped(self) -> None:
        """The collector gives no batch any more where `prompts.onExceeded: Fail` ends the run. Raises RunError."""
        if self._spec.prompts.on_exceeded != "Fail":
            return
        status = self._calls().get(self._calls().collector.status.remote(), self._stall, "the collector hangs")
        if why := too_many_skipped(self._spec, status):
            self._progress.update(prompts=prompt_counts(status))
            self._save_if_new()
            self._ready_saves().wait()
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
        self._ready_saves().stepped(max(result.stats.grad_norm for result in stepped.ranks))
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
        right, count = (agents_verdicts if with_agents else greedy_verdicts)(self._calls(), self._spec, self._task)
        reward = right / count
        log.info("step %d: validation reward %.3f (%d of %d right)", step, reward, right, count)
        self._progress.update(validation_step=step, validation_reward=reward)
        return reward

    # ---- checkpoints ------------------------------------------------------------------------

    def _save_if_new(self) -> bool:
        """Save between two steps, the engines awake; False where the newest state is saved already, True: they are down."""
        if self._version > self._saved_step:
            self._calls().ranks("sleep", self._spec.deadlines.handover_seconds, ExitCode.HANDOVER_TIMEOUT)
            self._save(self._version)
            return True
        self._acknowledge()
        return False

    def _acknowledge(self) -> None:
        """There is nothing newer than what was saved last: whoever has asked for a save has it, once it is published."""
        self._due.served()
        self._ticket = self._control.saving()
        if not self._version or (self._newest is not None and self._newest.step == self._version):
            self._control.saved(self._newest, self._ticket)

    def _wake(self) -> list[Passage]:
        passages: list[Passage] = self._calls().ranks("wake", self._spec.deadlines.handover_seconds, ExitCode.HANDOVER_TIMEOUT)
        return passages

    def _save(self, step: int) -> None:
        """Between train and wake: the engines are down, the collector is paused."""
        self._progress.update(phase="Saving")
        self._ready_saves().wait()  # one at a time; also, its end must not be taken for this one's
        began = time.monotonic()
        # In this order: who asks in between has this save, and gets one more at worst.
        self._due.begun()
        self._ticket = self._control.saving()
        deadline = self._spec.deadlines.save_seconds
        collected = self._calls().get(self._calls().collector.snapshot.remote(), deadline, "the collector gives no snapshot")
        state = {
            "collector": collected,
            "elapsed_seconds": self._record.clocks.elapsed,
            "totals": asdict(self._record.totals),
            "name": self._attempt.name,
            "namespace": self._attempt.namespace,
            "uid": self._attempt.uid,
            "attempt": self._attempt.number,
        }
        self._ready_saves().begin(self._calls(), step, state, lambda saved: self._saved(saved, time.monotonic() - began))
        self._saved_step = step

    def _ready_saves(self) -> Saves:
        if self._saves is None:
            raise RuntimeError("the attempt has not begun")
        return self._saves

    def _saved(self, checkpoint: Checkpoint, seconds: float) -> None:
        """There is a new checkpoint on the volume (told by the thread that wrote it)."""
        # First the checkpoint, then the ticket: `_acknowledge` has it the other way round, and one of the two sees both.
        self._newest = checkpoint_info(self._attempt, checkpoint)
        self._progress.update(checkpoint=self._newest)
        self._due.took(seconds)
        self._control.saved(self._newest, self._ticket)

    def _calls(self) -> Calls:
        """The actors, once they are there."""
        if self._actors is None:
            raise RuntimeError("the actors have not been launched")
        return Calls(self._actors)

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
