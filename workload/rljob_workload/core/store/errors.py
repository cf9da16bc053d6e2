"""What can be wrong with a run's directory, one class per thing that callers treat differently."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read."""


class FencedError(CheckpointError):
    """A newer token has been taken: this attempt writes and deletes nothing more."""


class FenceError(CheckpointError):
    """The record of tokens cannot be read; nothing is chosen, written or deleted without it."""


class InvalidCheckpointError(CheckpointError):
    """A directory that is named like a checkpoint and is not one. Says which file of it, and which field."""

    def __init__(self, checkpoint: str, file: str, problem: str, field: str = "") -> None:
        joint = " " if problem.startswith(("is ", "has ")) else ": "
        super().__init__(f"{checkpoint}: {file}{joint}{problem}" + (f" (field {field!r})" if field else ""))
        self.checkpoint = checkpoint
        self.file = file
        self.field = field
        self.problem = problem

    @property
    def why(self) -> str:
        """The message without the checkpoint's name."""
        return str(self)[len(self.checkpoint) + 2 :]

    def __reduce__(self) -> tuple[type[InvalidCheckpointError], tuple[str, str, str, str]]:
        return type(self), (self.checkpoint, self.file, self.problem, self.field)
