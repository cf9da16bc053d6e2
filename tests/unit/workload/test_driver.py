"""The driver's order of calls, against actors that only write down what they are asked."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.exitcodes import ExitCode
from rljob_api.progress import Finished
from rljob_workload.algorithm.batch import TrainStats
from rljob_workload.core.due import Decision, Due
from rljob_workload.core.groups import StepInfo
from rljob_workload.core.handover import Passage
from rljob_workload.core.ledger import Ledger
from rljob_workload.core.ledger_file import ledger_to_json
from rljob_workload.core.rollouts import RestoreReport
from rljob_workload.core.weight_digest import Staged, WeightDigest
from rljob_workload.runtime import driver as driver_module
from rljob_workload.runtime import saves as saves_module
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.control import Control
from rljob_workload.runtime.driver import Driver
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.metrics import read_metrics
from rljob_workload.runtime.progress import Progress
from rljob_workload.runtime.rank import RankStep
from rljob_workload.runtime.stop import StopSignal
from rljob_workload.runtime.stretch import Stepped
from rljob_workload.runtime.training import Training

from .test_beginnings import attempt_in
from .test_driver_surroundings import report

STEPS = 6
PASSAGE = Passage("Train", 0.0, 0.0, {})
STEP = RankStep(TrainStats(0.0, 0.0, 0.0, 0.0, 0.0, speaks=True), 0.0, PASSAGE, PASSAGE)


class World:
    """Actors, and hooks that happen in the middle of their calls."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.trace: list[str] = []
        self.during: dict[str, Callable[[], None]] = {}
        self.held: dict[int, concurrent.futures.Future[Any]] = {}
        #: Steps whose groups do not come, and steps whose training lasts until an interrupt.
        self.hold: set[int] = set()
        self.hold_training: set[int] = set()
        self.trained = self.skipped = 0
        self.interrupted: set[int] = set()
        #: Calls of `step` and `resume`.
        self.calls = 0
        self.stop = StopSignal()
        self.control = Control(self.stop)
        self.progress = Progress(report())
        self.directory = directory
        monkeypatch.setattr(driver_module.launch, "launch", lambda *_, **__: self.actors())
        monkeypatch.setattr(driver_module, "Watch", lambda *_: SimpleNamespace(looking=threading.Lock))
        monkeypatch.setattr(saves_module, "_in_background", lambda *_: [])
        monkeypatch.setattr(Calls, "get", lambda _, refs, *__: refs)
        monkeypatch.setattr(Calls, "ranks", lambda _, method, seconds, code, *arguments: self.ranks(method, *arguments))
        grpo = {"algorithm__grpo__steps": STEPS, "validation": None}
        self.driver = Driver(attempt_in(directory, **(grpo | changes)), self.progress, self.stop, self.control, spread=False)

    def actors(self) -> Any:
        rank = SimpleNamespace(**{name: self.method(name) for name in ("address", "setup", "written", "finish_save")})
        names = ("start", "status", "resume", "snapshot", "interrupt", "restore")
        methods = {name: self.method(name, getattr(self, name, lambda *_: None)) for name in names}
        step = SimpleNamespace(remote=self.step)
        return SimpleNamespace(ranks=[rank], replicas=[], collector=SimpleNamespace(**methods, step=step), kill=lambda: None)

    def method(self, name: str, answer: Callable[..., Any] = lambda *_: None) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls += name == "resume"
            if name not in ("address", "setup", "start", "status", "restore"):
                self.say(
                    " ".join([name, *(str(a) for a in arguments if isinstance(a, int) and a is not True and a is not False)])
                )
            return answer(*arguments)

        return SimpleNamespace(remote=remote)

    def say(self, what: str) -> None:
        self.trace.append(what)
        self.during.pop(what, lambda: None)()

    def ranks(self, method: str, *arguments: Any) -> Any:
        self.say(method)
        return [{"save": Staged(WeightDigest(), 0), "load": WeightDigest()}.get(method, PASSAGE)]

    def step(self, step: int, wake: bool, onward: bool) -> Any:
        """What the collector does with a step, up to where it is held."""
        self.calls += 1
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.held[step] = future
        self.say(f"take {step}")
        if step in self.interrupted:
            self.interrupted.remove(step)
            future.set_result(None)
        if step not in self.hold and not future.done():
            self.say("train and wake" if wake else "train")
            if step not in self.hold_training:
                self.finish(step, onward)
        return SimpleNamespace(future=lambda: future)

    def finish(self, step: int, onward: bool) -> None:
        info = StepInfo(reward=0.5, correct=0.0, samples=8, answer_tokens=24, spanning=0, oldest_age=0, mean_age=0.0)
        self.trained += 8
        self.say(f"commit {step}")
        if onward:
            self.say(f"resume {step}")
        self.held[step].set_result(Stepped(8, info, 0.25, 0.0, 0.0, [STEP], self.status(), onward))

    def interrupt(self, step: int) -> None:
        if step in self.hold_training:
            self.hold_training.remove(step)
            self.finish(step, onward=False)
        elif step in self.held:
            self.hold.discard(step)
            self.held[step].set_result(None)
        else:
            self.interrupted.add(step)

    def status(self) -> Any:
        counts = {"handed_out": self.trained, "trained": self.trained, "skipped": self.skipped, "skipped_by": {}}
        cap = {"configured": 16, "effective": 16, "reason": "", "warning": ""}
        return {"counts": counts, "skipped_names": {}, "cap": cap}

    def snapshot(self) -> Any:
        return {"ledger": ledger_to_json(Ledger())}

    def restore(self, *_: Any) -> RestoreReport:
        return RestoreReport(self.trained, 0, [])

    def sigterm(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def ask_save(self) -> None:
        self.control.answer("/control/save", "")

    def run(self) -> Finished | RunError:
        try:
            with self.stop.installed():
                return self.driver.run()
        except RunError as err:
            return err

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if path.name.startswith("step-"))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    return lambda **changes: World(tmp_path, monkeypatch, **changes)


def end_of(run: World) -> tuple[ExitCode, str]:
    error = run.run()
    assert isinstance(error, RunError)
    return error.code, str(error)


SAVE = ["snapshot", "save"]


def test_a_save_comes_between_the_commit_and_the_waking_and_the_engine_is_down_until_then(make: Any) -> None:
    world = make(checkpoint__everySteps=2, algorithm__grpo__steps=3)
    assert isinstance(world.run(), Finished)
    step_1 = ["take 1", "train and wake", "commit 1", "resume 1"]
    step_2 = ["take 2", "train", "commit 2", *SAVE, "wake", "resume 2"]
    step_3 = ["take 3", "train", "commit 3", *SAVE, "wake"]
    assert world.trace == step_1 + step_2 + step_3


def test_a_step_that_nothing_follows_is_committed_and_the_next_one_begun_in_one_call(make: Any) -> None:
    world = make(checkpoint__everySteps=STEPS)
    assert isinstance(world.run(), Finished)
    assert [said for said in world.trace if "resume" in said] == [f"resume {step}" for step in range(1, STEPS)]
    assert world.calls == STEPS


def test_a_limit_on_skipped_prompts_is_looked_at_before_the_next_step_begins(make: Any) -> None:
    world = make(checkpoint__everySteps=STEPS, prompts__onExceeded="Fail")
    assert isinstance(world.run(), Finished)
    assert world.calls == STEPS + STEPS - 1


@pytest.mark.parametrize(("step", "where"), [(1, "before the first step: "), (3, "step 2, which was saved: ")])
def test_a_limit_on_skipped_prompts_ends_the_run_while_no_step_completes(make: Any, step: int, where: str) -> None:
    world = make(checkpoint__everySteps=100, prompts__onExceeded="Fail")
    world.hold = {step}

    def skip() -> None:
        world.skipped = 1
        world.interrupted.add(step)  # as the collector does by itself

    world.during[f"take {step}"] = skip
    code, message = end_of(world)
    assert code is ExitCode.SKIPPED_TOO_MANY
    assert message.startswith(f"{where}1 prompts skipped, prompts.maxSkipped allows 0")
    assert world.saved() == (["step-000002-t000001"] if step > 1 else [])
    assert world.progress.report.prompts.skipped == 1


def test_what_became_urgent_with_the_commit_is_served_though_the_next_batch_is_there(make: Any) -> None:
    world = make(checkpoint__everySteps=100)
    world.during["resume 2"] = world.ask_save
    assert isinstance(world.run(), Finished)
    at = world.trace.index("resume 2")
    assert world.trace[at : at + 8] == ["resume 2", "interrupt 3", "take 3", "sleep", *SAVE, "wake", "resume 2"]


def test_a_save_that_is_asked_for_while_groups_are_missing_does_not_wait_for_them(make: Any) -> None:
    world = make(checkpoint__everySteps=100)
    world.hold = {3}
    world.during["take 3"] = world.ask_save
    assert isinstance(world.run(), Finished)
    at = world.trace.index("take 3")
    assert world.trace[at : at + 8] == ["take 3", "interrupt 3", "sleep", *SAVE, "wake", "resume 2", "take 3"]
    assert world.saved() == ["step-000002-t000001", "step-000006-t000001"]


def test_a_save_that_is_asked_for_in_the_middle_of_training_is_made_before_the_next_step(make: Any) -> None:
    world = make(checkpoint__everySteps=100)
    world.hold_training = {1}
    world.during["train and wake"] = world.ask_save
    assert isinstance(world.run(), Finished)
    assert world.trace[:9] == ["take 1", "train and wake", "interrupt 1", "commit 1", "sleep", *SAVE, "wake", "resume 1"]


def test_a_save_that_is_asked_for_when_training_has_just_ended_is_made_before_the_next_step(make: Any) -> None:
    world = make(checkpoint__everySteps=100)
    world.during["commit 1"] = world.ask_save
    assert isinstance(world.run(), Finished)
    assert world.trace[2:10] == ["commit 1", "resume 1", "interrupt 2", "take 2", "sleep", *SAVE, "wake"]


def test_a_save_that_is_asked_for_as_the_next_step_is_decided_is_made_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wish was part of that step's decision, and the save before the step has served it."""
    world = make(checkpoint__everySteps=100)
    decide, asked = Due.decide, []

    def asked_just_before(due: Due, step: int) -> Decision:
        if step == 3 and not asked:
            asked.append(step)
            world.ask_save()
        return decide(due, step)

    monkeypatch.setattr(Due, "decide", asked_just_before)
    assert isinstance(world.run(), Finished)
    assert world.saved() == ["step-000002-t000001", "step-000006-t000001"]


def test_what_is_saved_already_is_not_saved_again(make: Any) -> None:
    world = make(checkpoint__everySteps=2)
    world.during["resume 2"] = world.ask_save
    assert isinstance(world.run(), Finished)
    assert "sleep" not in world.trace
    assert world.trace.count("save") == 3


@pytest.mark.parametrize("moment", ["take 3", "commit 2", "resume 2"])
def test_sigterm_saves_the_steps_that_are_done_and_ends_without_another(make: Any, moment: str) -> None:
    world = make(checkpoint__everySteps=100)
    world.hold = {3}
    world.during[moment] = world.sigterm
    assert end_of(world) == (ExitCode.STOPPED, "stopped by SIGTERM after step 2, which was saved")
    assert world.saved() == ["step-000002-t000001"]
    assert world.trace[-3:] == ["sleep", *SAVE]
    assert "train" not in world.trace[world.trace.index("commit 2") :]


@pytest.mark.parametrize(("target", "steps"), [("0.95", 0), ("0.97", STEPS - 3)])
def test_a_run_that_has_reached_its_target_says_so_and_trains_no_further(
    make: Any, monkeypatch: pytest.MonkeyPatch, target: str, steps: int
) -> None:
    world = make(checkpoint__everySteps=3)
    world.during["commit 3"] = world.sigterm
    assert end_of(world) == (ExitCode.STOPPED, "stopped by SIGTERM after step 3, which was saved")
    metrics = world.directory / "metrics.jsonl"
    *earlier, last = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(earlier) + json.dumps(json.loads(last) | {"validation_reward": 0.96}) + "\n")
    again = make(checkpoint__everySteps=100, validation={"everySteps": 100, "prompts": 8, "stopAtReward": target})
    again.trained = world.trained
    monkeypatch.setattr(Training, "_validate", lambda self, step: 0.5)
    finished = again.run()
    assert isinstance(finished, Finished)
    assert sum("take" in said for said in again.trace) == steps
    if not steps:
        assert (finished.reason, finished.message) == ("TargetReached", "validation reward 0.96 >= 0.95 at step 3")


def test_sigterm_before_the_first_step_leaves_nothing_behind(make: Any) -> None:
    world = make()
    world.hold = {1}
    world.during["take 1"] = world.sigterm
    assert end_of(world) == (ExitCode.STOPPED, "stopped by SIGTERM before the first step; there is nothing to save")
    assert world.saved() == []


def test_a_control_request_to_stop_is_named(make: Any) -> None:
    world = make()
    world.during["commit 1"] = lambda: world.control.answer("/control/stop", "")
    assert end_of(world) == (ExitCode.STOPPED, "stopped by a control request after step 1, which was saved")


def test_sigterm_during_a_save_of_the_same_step_saves_once(make: Any) -> None:
    world = make(checkpoint__everySteps=2)
    world.during["save"] = world.sigterm
    assert end_of(world) == (ExitCode.STOPPED, "stopped by SIGTERM after step 2, which was saved")
    assert world.trace.count("save") == 1


def test_seconds_since_the_last_save_make_one_due(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(checkpoint__everySteps=100, checkpoint__everySeconds=10)
    now = time.monotonic()
    monkeypatch.setattr(driver_module.time, "monotonic", lambda: now)

    def later() -> None:
        nonlocal now
        now += 11

    world.during["commit 1"] = later
    assert isinstance(world.run(), Finished)
    assert world.saved() == ["step-000002-t000001", "step-000006-t000001"]


def test_the_run_ends_with_a_save_before_its_deadline(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(driver_module.time, "monotonic", lambda: now)
    changes = {"deadlines__activeSeconds": 700, "deadlines__provisioningSeconds": 100, "deadlines__firstStepSeconds": 100}
    world = make(checkpoint__everySteps=100, **changes, deadlines__stallSeconds=100)

    def step_takes_150_seconds() -> None:
        nonlocal now
        now += 150

    for number in range(1, 5):
        world.during[f"commit {number}"] = step_takes_150_seconds
    code, message = end_of(world)
    # 150, 300, 450, and with the next one at 600 there is no room for a fifth
    assert (code, message) == (
        ExitCode.DEADLINE,
        "deadlines.activeSeconds (700) leaves no time for another step after step 4, which was saved",
    )
    assert world.saved() == ["step-000004-t000001"]
    assert world.trace[-4:] == ["train", "commit 4", *SAVE]


def test_counters_go_on_over_steps_and_are_in_the_checkpoint(make: Any) -> None:
    world = make(checkpoint__everySteps=3)
    assert isinstance(world.run(), Finished)
    lines = read_metrics(world.directory / "metrics.jsonl")
    assert [line["consumed_prompts"] for line in lines] == [8, 16, 24, 32, 40, 48]
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24, 32, 40, 48]
    assert [line["consumed_tokens"] for line in lines] == [24, 48, 72, 96, 120, 144]
    assert [line["totals"]["starved_seconds"] for line in lines] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert {line["engine/constructions"] for line in lines} == {1}
    again = make(algorithm__grpo__steps=7)
    again.trained = 48
    assert isinstance(again.run(), Finished)
    last = read_metrics(world.directory / "metrics.jsonl")[-1]
    assert (last["step"], last["consumed_tokens"], last["totals"]["starved_seconds"]) == (7, 168, 1.75)
    assert last["elapsed_seconds"] >= lines[-1]["elapsed_seconds"]
    assert last["active_seconds"] >= lines[-1]["active_seconds"]
