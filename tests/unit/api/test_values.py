"""Quantities, progress arithmetic and exit codes."""

from __future__ import annotations

import pytest

from rljob_api.base import quantity
from rljob_api.exitcodes import ExitCode, describe
from rljob_api.progress import PromptCounts


@pytest.mark.parametrize(("text", "value"), [("500m", 0.5), ("3Gi", 3 * 2**30), ("2", 2), ("1.5Ki", 1536), ("10M", 10**7)])
def test_quantities_are_read_as_kubernetes_reads_them(text: str, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1Xi", "x"])
def test_a_malformed_quantity_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)


def test_the_partition_of_prompts_adds_up_or_is_found_out() -> None:
    counts = PromptCounts(handed_out=10, trained=4, filtered=1, buffered=2, in_flight=1, retryable=1, skipped=1)
    assert counts.adds_up()
    assert not counts.model_copy(update={"trained": 5}).adds_up()


def test_exit_codes_are_named_and_unknown_ones_stay_numbers() -> None:
    assert describe(73) == "73 (RankLost)"
    assert describe(137) == "137"
    assert not ExitCode.INVALID_SPEC.transient
    assert ExitCode.RANK_LOST.transient
