"""Environments judge answers. `load_environment` finds the built-in ones by the name in the spec."""

from __future__ import annotations

from rljob_workload.environments.base import Environment, Score
from rljob_workload.environments.exact_match import ExactMatch
from rljob_workload.environments.unreliable import Unreliable

#: Names that `spec.environment.builtin` may take.
BUILTIN_ENVIRONMENTS = ("exactMatch", "unreliable")

__all__ = ["BUILTIN_ENVIRONMENTS", "Environment", "Score", "load_environment"]


def load_environment(name: str, *, fixed_length: bool) -> Environment:
    """The built-in environment of that name."""
    if name == "exactMatch":
        return ExactMatch(fixed_length=fixed_length)
    if name == "unreliable":
        return Unreliable(fixed_length=fixed_length)
    raise ValueError(f"no built-in environment is called {name!r}; there is {', '.join(BUILTIN_ENVIRONMENTS)}")
