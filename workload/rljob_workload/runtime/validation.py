"""Validation: greedy answers of the weights of this moment, by the ranks themselves or through agents."""

from __future__ import annotations

from rljob_api.exitcodes import ExitCode
from rljob_api.progress import Finished
from rljob_api.spec import RLJobSpec
from rljob_workload.data.builtin import TaskData
from rljob_workload.environments import load_environment
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.step import validation_prompts

#: The collector keeps the deadline itself, and says who has not reported; this much later it does not answer at all.
ANSWER_SECONDS = 10.0


def validates(spec: RLJobSpec, step: int) -> bool:
    """Whether validation follows this step."""
    last = step == spec.algorithm.grpo.steps
    return spec.validation is not None and (last or step % spec.validation.every_steps == 0)


def target_reached(spec: RLJobSpec, step: int, reward: float | None) -> Finished | None:
    """The run's end, where this step was validated and its reward is the one that the run was to get to."""
    target = spec.validation.stop_at_reward if spec.validation else None
    if reward is None or target is None or reward < float(target):
        return None
    return Finished(reason="TargetReached", message=f"validation reward {reward:.4g} >= {target} at step {step}")


def greedy_verdicts(calls: Calls, spec: RLJobSpec, task: TaskData) -> tuple[int, int]:
    """Right answers, and all: one answer of an engine to each prompt, judged by the environment."""
    assert spec.validation is not None
    replicas, prompts = calls.actors.replicas, validation_prompts(task, spec.validation.prompts)
    parts = [
        rank.validate.remote(prompts[index :: len(replicas)]) for index, replica in enumerate(replicas) for rank in replica
    ]
    stall = float(spec.deadlines.stall_seconds)
    answers = [answer for part in calls.get(parts, stall, "validation does not end") for answer in part]
    if len(answers) != len(prompts):
        raise RunError(ExitCode.UNEXPECTED, f"validation: {len(prompts)} prompts, {len(answers)} answers")
    environment = load_environment(str(spec.environment.builtin), fixed_length=task.eos is None)
    decode, rows = task.tokenizer.decode, task.rows
    right = sum(environment.score(decode(answer.tokens), rows[answer.tag[1]].expected).correct for answer in answers)
    return right, len(answers)


def agents_verdicts(calls: Calls, spec: RLJobSpec, task: TaskData) -> tuple[int, int]:
    """Right answers, and all: each prompt played by an agent, which says what is right."""
    assert spec.validation is not None
    rows = [(prompt.tag[1], task.rows[prompt.tag[1]]) for prompt in validation_prompts(task, spec.validation.prompts)]
    played = calls.collector.validate.remote(rows)
    return calls.get(played, spec.deadlines.stall_seconds + ANSWER_SECONDS, "validation does not end"), len(rows)
