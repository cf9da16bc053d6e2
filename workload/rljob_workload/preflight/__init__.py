"""The look at the volume before an attempt: choose a checkpoint, compare it with the spec, take the token.

Runs in the operator's image, in a pod of its own before any GPU pod exists, and inside the driver under `rljob local`. So it
imports neither Ray nor torch nor anything of the trainer but `core`.
"""

from rljob_workload.preflight.judge import Order, checkpoint_path, preflight

__all__ = ["Order", "checkpoint_path", "preflight"]
