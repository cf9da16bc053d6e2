"""Exit codes of the driver: how it ended, for the operator's failure table and for people.

Codes of the shell (126 and up) and Python's own 1 and 2 stay free, so that each code has one meaning.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How the driver ended. `docs/exit-codes.md` lists them; `transient` says whether another attempt may help."""

    OK = 0
    UNEXPECTED = 70
    """An error that nobody foresaw; the traceback is in the driver's log."""
    INVALID_SPEC = 64
    """The spec breaks a rule (the same table as at admission)."""
    BAD_DATA = 65
    """The data set, the tokenizer or the environment can't be loaded."""
    ENVIRONMENT_MISSING = 66
    """A variable, a file or a volume that the launcher must provide is missing or not writable."""
    VERSION_MISMATCH = 67
    """An installed package isn't the pinned version."""
    RANKS_UNAVAILABLE = 72
    """Ray could not place the rank actors before the deadline."""
    RANK_LOST = 73
    """A rank actor died."""
    COLLECTOR_LOST = 74
    """The collector or the engine behind it died."""
    HANDOVER_TIMEOUT = 75
    """A rank did not arrive at a hand-over between generation and training in time."""
    SAVE_FAILED = 76
    """A checkpoint could not be written (volume full, no permission, deadline)."""
    CHECKPOINT_UNLOADABLE = 77
    """The checkpoint to resume from can't be loaded."""
    NON_FINITE = 78
    """Loss or gradient norm became infinite or NaN."""
    SKIPPED_TOO_MANY = 79
    """More prompts were skipped than prompts.maxSkipped allows and prompts.onExceeded is Fail."""
    STOPPED = 80
    """Stopped from outside (SIGTERM, control request, Ctrl-C) after the last step was saved. After Ctrl-C this code is in the
    report only: the command's status is 130, as shells expect."""
    FENCED = 81
    """A newer attempt has taken the run's directory; this one wrote nothing more."""
    REFUSED = 82
    """What is on the volume does not fit the spec (onExisting, another job's run, other model, data or layout)."""
    HUNG = 83
    """A rank, the collector or a collective did not answer within its deadline."""

    DEADLINE = 84
    """No time for another step before deadlines.activeSeconds; the last step was saved."""
    AGENT_FAILED = 85
    """The agent's process ended three times in a row without having reported a rollout."""

    @property
    def word(self) -> str:
        """Its name in messages and pages: RankLost."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def transient(self) -> bool:
        """Whether a new attempt on the same spec can end differently."""
        return self not in _PERMANENT


_PERMANENT = frozenset(
    {
        ExitCode.OK,
        ExitCode.INVALID_SPEC,
        ExitCode.BAD_DATA,
        ExitCode.VERSION_MISMATCH,
        ExitCode.NON_FINITE,
        ExitCode.SKIPPED_TOO_MANY,
        ExitCode.REFUSED,
        ExitCode.DEADLINE,
    }
)


def describe(code: int) -> str:
    """A code with its name for messages: `73 (RankLost)`, or the bare number when it is none of ours."""
    try:
        return f"{code} ({ExitCode(code).word})"
    except ValueError:
        return str(code)
