"""Rules on numbers that are no integers: what float32 can compute with, and what has a meaning."""

from __future__ import annotations

from .base import DECIMAL_PATTERN
from .expr import Expr, field, has
from .rule import Clause, Rule, clause
from .spec import LEAST_TEMPERATURE

#: Near the end of float32 the optimizer and the loss refuse a number.
LARGEST = 1e30
_TARGET = "validation.stopAtReward"


def _at_most(path: str, most: float, why: str) -> Clause:
    return clause(
        path, _no_number(path) | (_number(path) <= most), f"{{value}} {why}; at most {most:g} would do", value=field(path)
    )


def _number(path: str) -> Expr:
    return field(path).decimal()


def _no_number(path: str) -> Expr:
    """Whether the field's own pattern refuses it: the API server asks all rules even then, and has no number to compare."""
    return ~field(path).matches(DECIMAL_PATTERN)


_TOO_LARGE = "is too large to be computed with"

NUMBER_RULE = Rule(
    "numbers",
    "NumberInvalid",
    "error",
    "Decimal numbers are such that a model can be trained with them, and a target can be reached, but not before training.",
    (
        clause(
            "generation.temperature",
            _no_number("generation.temperature") | (_number("generation.temperature") >= float(LEAST_TEMPERATURE)),
            "{value} is too low: training samples its answers, and logits are divided by it; "
            f"at least {LEAST_TEMPERATURE} would do",
            value=field("generation.temperature"),
        ),
        _at_most("generation.temperature", LARGEST, _TOO_LARGE),
        _at_most("algorithm.grpo.learningRate", LARGEST, _TOO_LARGE),
        _at_most("algorithm.grpo.clipLow", 1.0, "clips the probability ratio below 0, where it never is"),
        _at_most("algorithm.grpo.clipHigh", LARGEST, _TOO_LARGE),
        _at_most("algorithm.grpo.entropyCoefficient", LARGEST, _TOO_LARGE),
        clause(
            _TARGET,
            ~has(_TARGET) | _no_number(_TARGET) | (_number(_TARGET) > 0.0),
            "{value} is reached by any model: the reward of a validation is the share of right answers, from 0 to 1; more "
            "than 0 would do",
            value=field(_TARGET),
        ),
        clause(
            _TARGET,
            ~has(_TARGET) | _no_number(_TARGET) | (_number(_TARGET) <= 1.0),
            "{value} is never reached: the reward of a validation is the share of right answers, from 0 to 1; at most 1 "
            "would do",
            value=field(_TARGET),
        ),
    ),
    deviation="Not Megatron's subject.",
)
