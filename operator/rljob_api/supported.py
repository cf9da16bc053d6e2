"""What this version honours. A field set to anything else is refused by name (`NotSupportedYet`), never dropped.

Every leaf of the spec is in exactly one of the two tables, which a test walks. Later versions move rows from the second to
the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .findings import Finding
from .spec import RLJobSpec

HONOURED = frozenset(
    f"spec.{path}"
    for path in (
        *(f"trainer.{name}" for name in ("image", "gpuMemory", "nodes", "gpusPerNode", "ranksPerNode", "seed", "template")),
        *(f"trainer.{pod}resources.{what}" for pod in ("", "head.") for what in ("cpu", "memory")),
        "model.preset",
        *(f"model.{name}" for name in ("huggingFace.path", "dtype", "transformer", "allowInferenceOptimizedTraining")),
        *(
            f"model.shape.{name}"
            for name in ("layers", "hiddenSize", "attentionHeads", "queryGroups", "ffnHiddenSize", "vocabSize")
        ),
        *(f"model.shape.{name}" for name in ("experts", "topK")),
        *(f"parallelism.{name}" for name in ("tensor", "pipeline", "expert", "expertTensor", "sequence")),
        *(f"generation.parallelism.{name}" for name in ("tensor", "pipeline", "context", "expert", "expertTensor")),
        *(f"generation.{name}" for name in ("maxNewTokens", "maxSequenceLength", "maxRequests", "temperature")),
        "generation.answerTimeoutSeconds",
        "generation.inferenceOptimized",
        "generation.maxInFlightPrompts",
        "generation.kvCache.size",
        "generation.kvCache.mode",
        "generation.offloadTrainingBuffers",
        "data.builtin",
        "data.seed",
        "data.shuffle",
        "data.onChange",
        "generation.server.enabled",
        "generation.server.port",
        "environment.builtin",
        "environment.agent.command",
        "environment.timeoutSeconds",
        *(f"algorithm.grpo.{name}" for name in ("promptsPerStep", "generationsPerPrompt", "microBatchSize", "steps")),
        *(f"algorithm.grpo.{name}" for name in ("maxTrajectoryAgeSteps", "learningRate", "clipLow", "clipHigh")),
        "algorithm.grpo.entropyCoefficient",
        *(f"validation.{name}" for name in ("everySteps", "prompts", "stopAtReward")),
        "checkpoint.volume.claimName",
        "checkpoint.volume.subPath",
        "checkpoint.everySteps",
        "checkpoint.everySeconds",
        "checkpoint.keepLast",
        "checkpoint.loadReplayBuffer",
        *(f"checkpoint.{name}" for name in ("verify", "onExisting", "from.claimName", "from.path")),
        "prompts.maxSkipped",
        "prompts.retryBudget",
        "prompts.onExceeded",
        *(f"failurePolicy.{name}" for name in ("maxRestarts", "backoffSeconds", "maxBackoffSeconds")),
        "failurePolicy.resetAfterProgress",
        "failurePolicy.rules",
        *(f"deadlines.{name}" for name in ("provisioningSeconds", "firstStepSeconds", "stallSeconds")),
        "deadlines.saveSeconds",
        "deadlines.handoverSeconds",
        "deadlines.activeSeconds",
        "deadlines.onStall",
        "suspend",
        "ttlSecondsAfterFinished",
    )
)


@dataclass(frozen=True)
class Partly:
    """A field of which this version honours some values only."""

    honours: Callable[[Any], bool]
    would_do: str


def _only(*values: object) -> Partly:
    words = " or ".join("unset" if value is None else _spell(value) for value in values)
    return Partly(lambda value: value in values, words)


def _spell(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


PARTLY: dict[str, Partly] = {
    f"spec.{path}": row
    for path, row in {
        "model.shape.hybridPattern": Partly(lambda value: "M" not in (value or ""), "a pattern without Mamba layers (M)"),
        "parallelism.virtualPipeline": _only(1),
        "parallelism.context": _only(1),
        "data.jsonl.path": _only(None),
        "data.parquet.path": _only(None),
        "data.dataset.path": _only(None),
        "queueName": _only(None),
    }.items()
}


def value_at(spec: RLJobSpec, path: str) -> Any:
    """The value at a path such as `spec.model.shape.topK`; None where a branch is unset."""
    value: Any = spec
    for name in path.split(".")[1:]:
        if value is None:
            return None
        fields = type(value).model_fields
        value = getattr(value, next(attribute for attribute, info in fields.items() if info.alias == name))
    return value


def check_supported(spec: RLJobSpec) -> list[Finding]:
    """One finding for each field that is set to a value which this version does not honour."""
    findings = []
    for path, row in PARTLY.items():
        value = value_at(spec, path)
        if not row.honours(value):
            message = f"{_spell(value)} is not supported yet by this version; {row.would_do} is"
            findings.append(Finding("not-supported-yet", "NotSupportedYet", "error", path, message))
    return findings
