"""The driver: one attempt of a run, from actors to the last step.

A step is: take a batch from the collector, train it on all ranks, commit it, save if due (the engines stay down until the
save has ended), wake, validate if due, collect again. Whether a save is due is decided before the step. Every wait has a
deadline, and every way to end badly has its own exit code.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_api.progress import Finished
from rljob_workload.core.checkpoint import Checkpoint, CheckpointError, RunDirectory
from rljob_workload.core.rollouts import StepInfo
from rljob_workload.environments import load_environment
from rljob_workload.runtime import launch, preflight
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.collector import Taken
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.metrics import MetricsFile
from rljob_workload.runtime.progress import Progress, utc_now
from rljob_workload.runtime.prompts import cap_report, too_many_skipped
from rljob_workload.runtime.rank import RankStep
from rljob_workload.runtime.resume import beginning, checkpoint_info, resume
from rljob_workload.runtime.saves import Saves
from rljob_workload.runtime.settings import Attempt
from rljob_workload.runtime.step import Phases, Totals, metrics_line, prompt_counts, validation_prompts
from rljob_workload.runtime.stop import StopSignal

log = logging.getLogger("rljob.driver")


class Driver:
    """Runs one attempt. `run` returns how it finished or raises `RunError`."""

    def __init__(self, attempt: Attempt, progress: Progress, stop: StopSignal, *, spread: bool) -> None:
        self._attempt = attempt
        self._spec = attempt.spec
        self._progress = progress
        self._stop = stop
        self._spread = spread
        self._directory = RunDirectory(attempt.directory)
        preflight.check_settings(self._spec)
        self._task = preflight.load_task(self._spec)
        preflight.check_directory(attempt.directory)
        self._metrics = _open_metrics(attempt)
        self._environment = load_environment(str(self._spec.environment.builtin), fixed_length=self._task.eos is None)
        self._actors: launch.Actors | None = None
        self._saves: Saves | None = None
        self._totals = Totals()
        self._version = 0
        self._stall = float(self._spec.deadlines.stall_seconds)
        self._began = time.monotonic()

    # ---- the attempt ------------------------------------------------------------------------

    def run(self) -> Finished:
        """Start, resume, train to the end."""
        try:
            self._start()
            finished = self._train_to_the_end()
            self._ready_saves().wait()
        except RayTaskError as err:
            raise self._calls().classified(err) from err
        except RayActorError as err:
            raise self._calls().lost(err) from err
        except CheckpointError as err:
            raise RunError(ExitCode.SAVE_FAILED, str(err)) from err
        except OSError as err:
            where = err.filename or self._attempt.directory
            raise RunError(ExitCode.SAVE_FAILED, f"cannot write {where}: {err.strerror or err}") from err
        finally:
            if self._saves is not None:
                self._saves.settle()
            if self._actors is not None and ray.is_initialized():
                self._actors.kill()
            self._metrics.close()
        self._progress.update(phase="Finished", finished=finished, elapsed_seconds=self._elapsed())
        return finished

    def _start(self) -> None:
        began = time.monotonic()
        begin = beginning(self._attempt)
        for name in self._directory.remove_unfinished(begin.token):
            log.info("removed the unfinished %s of an earlier attempt", name)
        self._saves = Saves(self._attempt, begin.token, self._directory, self._saved)
        self._actors = launch.launch(self._attempt, spread=self._spread)
        placed = time.monotonic()
        self._progress.update(phase="Loading")
        ranks = self._actors.ranks
        deadline = self._spec.deadlines.first_step_seconds
        address = self._calls().get(ranks[0].address.remote(), deadline, "rank 0 did not name its address")
        self._calls().get([rank.setup.remote(address) for rank in ranks], deadline, "the ranks did not get ready")
        loaded = time.monotonic()
        resumed = resume(self._calls(), begin.checkpoint, self._attempt, self._totals, self._metrics.last)
        self._version = resumed.version
        if begin.checkpoint is not None:
            self._saves.resumed(begin.checkpoint)
        self._calls().get(
            self._actors.collector.start.remote(self._actors.replicas, self._version), deadline, "the collector hangs"
        )
        self._began = time.monotonic()
        log.info("ready: actors %.1f s, model and engine %.1f s, resume %.1f s",
                 placed - began, loaded - placed, self._began - loaded)  # fmt: skip
        status = self._calls().get(self._calls().collector.status.remote(), deadline, "the collector does not answer")
        # One update: a report that names what it resumed from also has the prompts of then.
        self._progress.update(
            phase="Generating", prompts=prompt_counts(status), in_flight_prompts=cap_report(status["cap"]), **resumed.report
        )
        if why := too_many_skipped(self._spec, status):
            raise RunError(ExitCode.SKIPPED_TOO_MANY, why)

    def _train_to_the_end(self) -> Finished:
        grpo = self._spec.algorithm.grpo
        with self._stop.between_steps():
            while self._version < grpo.steps:
                reached = self._step(self._version + 1)
                if reached is not None:
                    return reached
        return Finished(reason="Completed", message=f"all {grpo.steps} steps are done")

    # ---- one step ---------------------------------------------------------------------------

    def _step(self, step: int) -> Finished | None:
        self._ready_saves().check()
        save_due = self._save_due(step)
        validate_due = self._validation_due(step)
        phases = Phases()
        with phases.timed("generate"):
            taken, batch = self._take(step)
        with phases.timed("train"):
            results = self._train(step, batch, wake=not save_due)
        phases.move("train", "handover", max(result.handover_seconds for result in results))
        with phases.timed("commit"):
            counters = self._commit(step, taken)
        if save_due:
            with phases.timed("save"):
                self._save(step)
                self._calls().ranks("wake", self._spec.deadlines.handover_seconds, ExitCode.HANDOVER_TIMEOUT)
        reward = None
        if validate_due:
            with phases.timed("validate"):
                reward = self._validate(step)
        reached = self._reached(step, reward)
        too_many = too_many_skipped(self._spec, counters)
        stop = self._stop.asked or too_many is not None
        if (stop or reached is not None) and not save_due:
            # The weights that reached the target are what the run was for; a stopped run goes on from here.
            with phases.timed("save"):
                self._calls().ranks("sleep", self._spec.deadlines.handover_seconds, ExitCode.HANDOVER_TIMEOUT)
                self._save(step)
        if reached is None and not stop and step < self._spec.algorithm.grpo.steps:
            with phases.timed("commit"):
                self._calls().get(self._calls().collector.resume.remote(self._version), self._stall, "the collector hangs")
        self._report(step, taken.info, results, counters, phases, reward)
        if stop or reached is not None:
            self._ready_saves().wait()
        if too_many is not None:
            raise RunError(ExitCode.SKIPPED_TOO_MANY, f"step {step}, which was saved: {too_many}")
        if stop and reached is None:
            raise RunError(ExitCode.STOPPED, f"stopped by SIGTERM after step {step}, which was saved")
        return reached

    def _take(self, step: int) -> tuple[Taken, Any]:
        self._progress.update(phase="Generating")
        taken_ref, batch_ref = self._calls().collector.take.options(num_returns=2).remote(step)
        try:
            return ray.get(taken_ref, timeout=self._stall), batch_ref
        except ray.exceptions.GetTimeoutError as err:
            raise RunError(ExitCode.COLLECTOR_LOST, self._calls().stall_report(step, self._stall)) from err

    def _train(self, step: int, batch: Any, *, wake: bool) -> list[RankStep]:
        self._progress.update(phase="Training")
        results: list[RankStep] = self._calls().ranks("train", self._stall, ExitCode.HANDOVER_TIMEOUT, batch, wake)
        self._version = step
        self._ready_saves().stepped(max(result.stats.grad_norm for result in results))
        return results

    def _commit(self, step: int, taken: Taken) -> dict[str, Any]:
        counters: dict[str, Any] = self._calls().get(
            self._calls().collector.commit.remote(step, taken.ordinals), self._stall, "the collector does not commit"
        )
        self._totals.add(taken.info)
        if counters["counts"]["trained"] != self._totals.trained_prompts + len(taken.ordinals):
            raise RunError(
                ExitCode.UNEXPECTED,
                f"step {step}: the ledger counts {counters['counts']['trained']} trained prompts, "
                f"the driver {self._totals.trained_prompts + len(taken.ordinals)}",
            )
        self._totals.trained_prompts += len(taken.ordinals)
        return counters

    def _validate(self, step: int) -> float:
        self._progress.update(phase="Validating")
        assert self._spec.validation is not None
        replicas = self._calls().actors.replicas
        prompts = validation_prompts(self._task, self._spec.validation.prompts)
        calls = [
            rank.validate.remote(prompts[index :: len(replicas)]) for index, replica in enumerate(replicas) for rank in replica
        ]
        answers = [a for part in self._calls().get(calls, self._stall, "validation does not end") for a in part]
        if len(answers) != len(prompts):
            raise RunError(ExitCode.UNEXPECTED, f"validation: {len(prompts)} prompts, {len(answers)} answers")
        score, tokenizer = self._environment.score, self._task.tokenizer
        right = sum(score(tokenizer.decode(a.tokens), self._task.rows[a.tag[1]].expected).correct for a in answers)
        reward = right / len(answers)
        log.info("step %d: validation reward %.3f (%d of %d right)", step, reward, right, len(answers))
        self._progress.update(validation_step=step, validation_reward=reward)
        return reward

    def _reached(self, step: int, reward: float | None) -> Finished | None:
        validation = self._spec.validation
        if reward is None or validation is None or validation.stop_at_reward is None:
            return None
        if reward < float(validation.stop_at_reward):
            return None
        message = f"validation reward {reward:.4g} >= {validation.stop_at_reward} at step {step}"
        return Finished(reason="TargetReached", message=message)

    def _save_due(self, step: int) -> bool:
        return step % self._spec.checkpoint.every_steps == 0 or step == self._spec.algorithm.grpo.steps

    def _validation_due(self, step: int) -> bool:
        validation = self._spec.validation
        last = step == self._spec.algorithm.grpo.steps
        return validation is not None and (step % validation.every_steps == 0 or last)

    # ---- checkpoints ------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        """Between train and wake: the engines are down, the collector is paused."""
        self._progress.update(phase="Saving")
        deadline = self._spec.deadlines.save_seconds
        collected = self._calls().get(self._calls().collector.snapshot.remote(), deadline, "the collector gives no snapshot")
        state = {
            "collector": collected,
            "elapsed_seconds": self._elapsed(),
            "totals": asdict(self._totals),
            "name": self._attempt.name,
            "namespace": self._attempt.namespace,
            "uid": self._attempt.uid,
            "attempt": self._attempt.number,
        }
        self._ready_saves().begin(self._calls(), step, state)

    def _saved(self, checkpoint: Checkpoint) -> None:
        """There is a new checkpoint (told by the thread that wrote it)."""
        self._progress.update(checkpoint=checkpoint_info(self._attempt, checkpoint))

    def _ready_saves(self) -> Saves:
        if self._saves is None:
            raise RuntimeError("the attempt has not begun")
        return self._saves

    def _calls(self) -> Calls:
        """The actors, once they are there."""
        if self._actors is None:
            raise RuntimeError("the actors have not been launched")
        return Calls(self._actors)

    # ---- reporting --------------------------------------------------------------------------

    def _report(
        self,
        step: int,
        info: StepInfo,
        results: list[RankStep],
        counters: dict[str, Any],
        phases: Phases,
        validation_reward: float | None,
    ) -> None:
        elapsed = self._elapsed()
        counts = counters["counts"]
        line = metrics_line(step, self._attempt.number, elapsed, info, results, counts, phases, self._totals)
        if validation_reward is not None:
            line["validation_reward"] = validation_reward
        self._metrics.write(line)
        self._progress.update(
            step=step,
            last_step_time=utc_now(),
            reward=info.reward,
            elapsed_seconds=elapsed,
            consumed_samples=self._totals.consumed_samples,
            prompts=prompt_counts(counters),
        )
        if step % 10 == 0 or validation_reward is not None:
            log.info("step %d of %d: reward %.3f, loss %+.4f, entropy %.3f, %d answers over versions, %.1f s",
                     step, self._spec.algorithm.grpo.steps, info.reward, line["loss"], line["entropy"],
                     info.spanning, elapsed)  # fmt: skip

    def _elapsed(self) -> float:
        return self._totals.elapsed_before + time.monotonic() - self._began


def _open_metrics(attempt: Attempt) -> MetricsFile:
    path = attempt.directory / "metrics.jsonl"
    try:
        return MetricsFile(path)
    except OSError as err:
        raise RunError(ExitCode.ENVIRONMENT_MISSING, f"cannot use {err.filename or path}: {err.strerror or err}") from err
