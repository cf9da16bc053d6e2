"""What a run needs to be able to begin, checked before anything is started: settings, data, the run's directory.

Each of these would end an actor minutes later with an error that names none of the user's words, and cost a restart.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rljob_api.exitcodes import ExitCode
from rljob_api.layout import shape_of
from rljob_api.rules_numbers import NUMBER_RULE
from rljob_api.spec import RLJobSpec
from rljob_workload.data.builtin import TaskData, load_builtin
from rljob_workload.huggingface.pretrained import PretrainedError, architecture_of, describe, find_weights
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.settings import Attempt


def with_model(attempt: Attempt) -> Attempt:
    """The attempt with what the config.json of its model says, where it has one. Raises RunError: see `_refused`."""
    if attempt.spec.model.hugging_face is None:
        return attempt
    try:
        facts = describe(attempt.spec)
    except PretrainedError as err:
        raise _refused(err) from err
    model = attempt.spec.model.model_copy(update={"shape": facts.shape})
    return dataclasses.replace(attempt, model=facts, spec=attempt.spec.model_copy(update={"model": model}))


def check_weights(attempt: Attempt) -> None:
    """The pretrained weights that a run from scratch begins from are all there. Raises RunError: see `_refused`."""
    if attempt.model is None:
        return
    try:
        find_weights(attempt.spec, architecture_of(attempt.model))
    except PretrainedError as err:
        raise _refused(err) from err


def _refused(err: PretrainedError) -> RunError:
    """ENVIRONMENT_MISSING where nothing is mounted or can be read, REFUSED where something else is there."""
    return RunError(ExitCode.REFUSED if err.there else ExitCode.ENVIRONMENT_MISSING, str(err))


def check_settings(spec: RLJobSpec) -> None:
    """Values that fit the schema and that no model can be trained with. Raises RunError (INVALID_SPEC)."""
    for finding in NUMBER_RULE.findings(spec, spec.to_wire()):
        raise RunError(ExitCode.INVALID_SPEC, f"{finding.path}: {finding.message}")
    shape = shape_of(spec.model)
    if shape is not None and spec.model.hugging_face is None and (width := shape.hidden_size // shape.attention_heads) % 2:
        raise RunError(
            ExitCode.INVALID_SPEC,
            f"spec.model.shape: hiddenSize {shape.hidden_size} over {shape.attention_heads} attentionHeads gives heads of "
            f"{width}; rotary positions need an even size",
        )


def load_task(spec: RLJobSpec) -> TaskData:
    """The data set, checked against the model and the sequence length. Raises RunError (BAD_DATA)."""
    task = load_builtin(str(spec.data.builtin))
    vocab = spec.model.shape.vocab_size if spec.model.shape else None
    if vocab is not None and vocab < task.tokenizer.vocab_size:
        raise RunError(
            ExitCode.BAD_DATA,
            f"spec.model.shape.vocabSize {vocab} is less than the {task.tokenizer.vocab_size} tokens that "
            f"spec.data.builtin {task.name} needs",
        )
    shortest = min(len(row.tokens) for row in task.rows)
    needed = shortest + task.new_tokens(spec.generation.max_new_tokens)
    if needed > spec.generation.max_sequence_length:
        raise RunError(
            ExitCode.BAD_DATA,
            f"no prompt of {task.name} fits: the shortest has {shortest} tokens and with its answer needs {needed}, "
            f"spec.generation.maxSequenceLength is {spec.generation.max_sequence_length}",
        )
    return task


def check_directory(directory: Path) -> None:
    """Places in the run's directory that the run writes to are what they must be. Raises RunError (ENVIRONMENT_MISSING)."""
    for name, wanted in {"trained": "directory", "tensorboard": "directory", "metrics.jsonl": "file"}.items():
        path = directory / name
        if path.exists() and path.is_dir() != (wanted == "directory"):
            raise RunError(ExitCode.ENVIRONMENT_MISSING, f"{path} must be a {wanted}; move it away")
