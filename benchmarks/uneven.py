"""Part (c) of `benchmarks.train`: async against sync of the same code, on answers of very uneven length.

    python -m benchmarks.uneven [--rounds N]      prints one JSON object

Each arm is a loop of its own (policy, engine, ledger) in this process; they take turns, so that whatever else the machine
does meets them alike. Lengths are imposed per answer by the seed: log-normal, median 16 tokens, the 99th percentile 20 times
that, cut at the context. An answer's length depends on its prompt's number and its place in the group only, so every arm
answers the same list; every arm has the same engine slots.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from typing import Any

from benchmarks.loop import Loop, one_rank, peak_megabytes, share_in_prompt, spec_of

MEDIAN, P99_OVER_MEDIAN, CONTEXT = 16, 20, 512
#: Standard normal's 99th percentile.
Z99 = 2.3263
SIGMA = math.log(P99_OVER_MEDIAN) / Z99
PROMPTS, ANSWERS, PROMPT_TOKENS = 8, 8, 5
SLOTS = PROMPTS * ANSWERS
WARM_UP, STEPS_PER_ROUND = 4, 4
SEED = 0


def lengths(ordinal: int, answers: int) -> tuple[int, ...]:
    """Tokens of each answer to a prompt."""
    return tuple(_length(ordinal, answer) for answer in range(answers))


def _length(ordinal: int, answer: int) -> int:
    rng = random.Random(f"{SEED}/{ordinal}/{answer}")  # noqa: S311 - a benchmark
    drawn = MEDIAN * math.exp(SIGMA * rng.gauss())
    return max(1, min(CONTEXT - PROMPT_TOKENS, round(drawn)))


def arm(age: int) -> Loop:
    """A loop; `age` 0 is the synchronous one."""
    window = max(age, 1)
    spec = spec_of(
        {
            "generation": {
                "maxSequenceLength": CONTEXT,
                "maxRequests": SLOTS,
                "maxInFlightPrompts": PROMPTS * (window + 1),
                "kvCache": {"mode": "Persist", "size": "256Mi"},
            },
            "algorithm.grpo": {
                "promptsPerStep": PROMPTS,
                "generationsPerPrompt": ANSWERS,
                "microBatchSize": 8,
                "maxTrajectoryAgeSteps": window,
                "steps": 10_000,
            },
        }
    )
    return Loop(spec, lengths=lengths, reward=share_in_prompt, synchronous=not age)


def measure(ages: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Samples, tokens and seconds of each arm, over the same number of steps."""
    one_rank(spec_of({}))
    arms = {age: arm(age) for age in ages}
    marks: dict[int, list[dict[str, float]]] = {age: [] for age in ages}
    for loop in arms.values():
        for _ in range(WARM_UP):
            loop.step()
    for _ in range(rounds):
        for age, loop in arms.items():
            loop.clock.reset()
            iterations = loop.iterations
            for _ in range(STEPS_PER_ROUND):
                loop.step()
            marks[age].append(_mark(loop, loop.iterations - iterations))
    return {
        "arms": {str(age): _sums(marks[age]) for age in ages},
        "rounds": {
            str(age): statistics.median(
                mark["samples"] / mark["cpu"] / (base["samples"] / base["cpu"])
                for mark, base in zip(marks[age], marks[ages[0]], strict=True)
            )
            for age in ages
        },
        "lengths": _facts(),
        "peak_megabytes": peak_megabytes(),
    }


def _mark(loop: Loop, iterations: int) -> dict[str, float]:
    infos, total, generation = loop.infos[-STEPS_PER_ROUND:], loop.clock.total(), loop.clock.total("engine", "submit")
    return {
        "samples": sum(info.samples for info in infos),
        "tokens": sum(info.answer_tokens for info in infos),
        "cpu": total.cpu,
        "wall": total.wall,
        "generation_cpu": generation.cpu,
        "train_cpu": loop.clock.total("train").cpu,
        "iterations": iterations,
        "age": max(info.oldest_age for info in infos),
    }


def _sums(marks: list[dict[str, float]]) -> dict[str, float]:
    found = {name: sum(mark[name] for mark in marks) for name in marks[0] if name != "age"}
    return found | {"oldest_age": max(mark["age"] for mark in marks)}


def _facts() -> dict[str, float]:
    drawn = sorted(_length(ordinal, answer) for ordinal in range(1000) for answer in range(ANSWERS))
    return {
        "median": statistics.median(drawn),
        "p99": drawn[int(0.99 * len(drawn))],
        "longest": drawn[-1],
        "mean": statistics.fmean(drawn),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    print(json.dumps(measure((0, 1, 2), parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
