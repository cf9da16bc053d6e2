"""The job of the proof: the copy task with answers of differing lengths, judged by something that raises, hangs and is slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
NAME = "proof"
DATA = "copyv"


@dataclass(frozen=True)
class Sizes:
    """What a run of the proof is made of."""

    steps: int
    prompts_per_step: int = 8
    generations_per_prompt: int = 4
    max_age: int = 2
    every_steps: int = 20
    retry_budget: int = 2
    seed: int = 0

    @property
    def in_flight(self) -> int:
        """Prompts that are answered at the same time: fewer than the age limit allows, so that they do not move in step."""
        return self.prompts_per_step * self.max_age


def manifest(sizes: Sizes) -> dict[str, Any]:
    """The RLJob: the example with another task, environment and sizes."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())
    job["metadata"]["name"] = NAME
    spec = job["spec"]
    # The fewer other tokens there are, the sooner an untrained policy hits the end token: lengths differ from the start.
    spec["model"]["shape"]["vocabSize"] = 18
    spec["data"] |= {"builtin": DATA, "seed": sizes.seed}
    spec["environment"] = {"builtin": "unreliable", "timeoutSeconds": 1}
    spec["generation"] |= {
        "maxNewTokens": 7,
        "maxInFlightPrompts": sizes.in_flight,
        "maxRequests": sizes.in_flight * sizes.generations_per_prompt,
    }
    spec["algorithm"]["grpo"] |= {
        "steps": sizes.steps,
        "promptsPerStep": sizes.prompts_per_step,
        "generationsPerPrompt": sizes.generations_per_prompt,
        "microBatchSize": sizes.prompts_per_step * sizes.generations_per_prompt,
        "maxTrajectoryAgeSteps": sizes.max_age,
    }
    spec["checkpoint"] |= {"everySteps": sizes.every_steps, "keepLast": 2}
    spec["prompts"] |= {"retryBudget": sizes.retry_budget, "maxSkipped": 100_000}
    spec.pop("validation")
    return job


def write(sizes: Sizes, path: Path) -> Path:
    """The manifest as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(manifest(sizes), sort_keys=False))
    return path
