"""What can go wrong on a rank. Apart from the modules that raise it, so that a driver can read it without importing torch."""

from __future__ import annotations


class DeviceError(Exception):
    """This process cannot compute as it was asked to."""


class EngineError(Exception):
    """The engine cannot serve a request with these settings."""


class EngineStepError(Exception):
    """A step of the engine failed; the message names rank, step and the prompts in flight."""


class NonFiniteError(Exception):
    """The loss, the gradient or a probability is not a number any more."""


class WeightsError(Exception):
    """A checkpoint's weights cannot be written or read."""


def reason_of(err: BaseException) -> str:
    """One line on the error at the bottom: libraries wrap it, and print whole tracebacks as their message.

    torch's CheckpointException, for one, carries a traceback per rank; its `failures` map ranks to (exception, traceback).
    """
    failures = getattr(err, "failures", None)
    if isinstance(failures, dict) and failures:
        return reason_of(next(iter(failures.values()))[0])
    # What was merely being handled (an absent optional package, say) explains nothing, unless it is the disk's refusal.
    below = err.__cause__ or (err.__context__ if isinstance(err.__context__, OSError) else None)
    if below is not None:
        return reason_of(below)
    if isinstance(err, OSError) and err.strerror:
        return f"{err.filename}: {err.strerror}" if err.filename else err.strerror
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[0][:400]}" if lines else type(err).__name__
