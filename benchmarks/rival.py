"""Part (b) of `benchmarks.train`: TRL's GRPOTrainer at the same model size, batch and task.

    python -m benchmarks.rival JSON      our side of one case, in one process: prints one JSON object

Both sides are one process with one torch thread; they run in turns (ours, TRL's, ours, TRL's), each run with its own
start-up, and the medians of their runs are compared. TRL comes from its own environment (`benchmarks/trl-venv.sh`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from benchmarks.loop import Loop, one_rank, peak_megabytes, share_in_prompt, spec_of
from benchmarks.results import ROOT, BenchError, Row, child, environment, python
from benchmarks.rival_trl import Case

PROMPT_TOKENS = 5
_SMALL: dict[str, Any] = {
    "layers": 2,
    "heads": 4,
    "vocab": 64,
    "answers": 8,
    "learning_rate": 0.001,
    "entropy": 0.05,
    "seed": 0,
    "window": 10,
}

#: The example's job, to a mean training reward of 0.9.
COPY = Case(hidden=64, ffn=128, prompts=16, new_tokens=3, steps=800, warm_up=10, target=0.9, reward="copy", **_SMALL)
#: A model where arithmetic weighs, and answers of 64 tokens.
LONG = Case(hidden=256, ffn=512, prompts=8, new_tokens=64, steps=8, warm_up=2, target=None, reward="inPrompt", **_SMALL)


def ours(case: Case) -> dict[str, Any]:
    """The case on our side, in the form of `rival_trl`'s report."""
    spec = spec_of(
        {
            "model.shape": {"layers": case.layers, "hiddenSize": case.hidden, "attentionHeads": case.heads}
            | {"queryGroups": case.heads, "ffnHiddenSize": case.ffn, "vocabSize": case.vocab},
            "generation": {
                "maxSequenceLength": -(-(PROMPT_TOKENS + case.new_tokens) // 16) * 16,
                "maxRequests": case.prompts * case.answers,
                "maxInFlightPrompts": case.prompts,
                "kvCache": {"mode": "Persist", "size": "64Mi"},
            },
            "algorithm.grpo": {
                "promptsPerStep": case.prompts,
                "generationsPerPrompt": case.answers,
                "microBatchSize": case.prompts * case.answers,
                "learningRate": str(case.learning_rate),
                "entropyCoefficient": str(case.entropy),
                "steps": 10_000,
            },
            "trainer": {"seed": case.seed},
        }
    )
    one_rank(spec)
    if case.reward == "copy":
        loop = Loop(spec)
    else:
        loop = Loop(spec, lengths=lambda _, answers: (case.new_tokens,) * answers, reward=share_in_prompt)
    marks = [(time.perf_counter(), time.process_time())]
    for _ in range(case.steps):
        loop.step()
        marks.append((time.perf_counter(), time.process_time()))
        recent = [info.reward for info in loop.infos[-case.window :]]
        if case.target is not None and len(recent) == case.window and statistics.fmean(recent) >= case.target:
            break
    wall, cpu = (marks[-1][kind] - marks[case.warm_up][kind] for kind in (0, 1))
    steps = len(loop.infos) - case.warm_up
    return {
        "parameters": sum(parameter.numel() for parameter in loop.policy.parameters().values()),
        "steps": len(loop.infos),
        "seconds_per_step": wall / steps,
        "cpu_seconds_per_step": cpu / steps,
        "seconds": marks[-1][0] - marks[0][0],
        "cpu_seconds": marks[-1][1] - marks[0][1],
        "rewards": [info.reward for info in loop.infos],
        "peak_megabytes": peak_megabytes(),
    }


def rows(pairs: int = 2) -> list[Row]:
    """Measure both cases."""
    interpreter = trl_interpreter()
    found: list[Row] = []
    for name, case, runs in (("copy", COPY, 1), ("hidden 256, 64 tokens", LONG, pairs)):
        argument = json.dumps(asdict(case))
        mine, theirs = [], []
        for _ in range(runs):
            mine.append(child(f"our side of {name}", python("benchmarks.rival", argument), 240))
            command = [interpreter, "-W", "ignore", "benchmarks/rival_trl.py", argument]
            theirs.append(child(f"TRL's side of {name}", command, 240))
        if mine[0]["parameters"] != theirs[0]["parameters"]:
            raise BenchError(f"{name}: {mine[0]['parameters']} parameters here, {theirs[0]['parameters']} there")
        found += compared(name, case, mine, theirs)
    return found


def compared(name: str, case: Case, mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Row]:
    """The rows of one case."""

    def middle(runs: list[dict[str, Any]], key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    steps, cpu = ([1 / middle(runs, key) for runs in (mine, theirs)] for key in ("seconds_per_step", "cpu_seconds_per_step"))
    samples = case.prompts * case.answers
    size = f"{mine[0]['parameters']:,} parameters, {case.prompts} x {case.answers} answers of {case.new_tokens} tokens"
    peer = f"peer: TRL {theirs[0]['version']}"
    aim = 1.0 if case is LONG else None
    made = [
        Row(f"{name}: steps/s", "steps/s", steps[0], steps[1], "higher", f"{peer}; {size}", aim),
        Row(f"{name}: steps per CPU second", "steps/CPU s", cpu[0], cpu[1], "higher", f"{peer}; one thread", aim),
        Row(f"{name}: samples/s", "samples/s", samples * steps[0], samples * steps[1], "higher", f"{peer}; trained answers"),
        Row(
            f"{name}: peak memory", "MiB", middle(mine, "peak_megabytes"), middle(theirs, "peak_megabytes"), "lower",
            f"{peer}; largest resident size of the process",
        ),
    ]  # fmt: skip
    if case.target is not None:
        for side, runs in (("ours", mine), ("TRL", theirs)):
            if any(run["steps"] == case.steps for run in runs):
                raise BenchError(f"{name}: {side} did not reach reward {case.target} within {case.steps} steps")
        note = f"{peer}; mean of {case.window} steps; {mine[0]['steps']} steps here, {theirs[0]['steps']} there"
        for key, unit, words in (("seconds", "s", "seconds"), ("cpu_seconds", "CPU s", "CPU seconds")):
            measure = f"{name}: {words} to reward {case.target}"
            made.append(Row(measure, unit, middle(mine, key), middle(theirs, key), "lower", note))
    return made


def trl_interpreter() -> str:
    """Make TRL's environment unless it is there. Raises BenchError."""
    done = subprocess.run(
        ["benchmarks/trl-venv.sh"], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False, timeout=900
    )
    if done.returncode:
        raise BenchError(f"benchmarks/trl-venv.sh ended with {done.returncode}")
    return done.stdout.strip()


if __name__ == "__main__":
    print(json.dumps(ours(Case(**json.loads(sys.argv[1])))))
