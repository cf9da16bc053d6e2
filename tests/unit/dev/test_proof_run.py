"""The order of the proof's kills, without a trainer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from dev.proof import run as module
from dev.proof.job import Sizes
from dev.proof.life import HarnessError
from dev.proof.moments import WANTED, Hit, Plan
from dev.proof.run import Kill, ProofRun


class Scripted(ProofRun):
    """A trainer that has no checkpoint before so many lives among steps; every other moment is hit."""

    def __init__(self, *arguments: Any, checkpoint_after: int) -> None:
        super().__init__(*arguments)
        self._left = checkpoint_after

    def _attended(self, plan: Plan, more: int) -> bool:
        hit = plan.aim
        if plan.aim is Hit.RESUME:
            hit = Hit.RESUME if self._left <= 0 else Hit.START
        else:
            self._left -= 1
        self._kills.append(Kill(len(self._kills) + 1, plan.aim, hit, 0, 0.0, 0.0))
        return True

    def _finish(self) -> None:
        return None


@pytest.mark.parametrize("seed", range(20))
def test_a_resume_is_aimed_at_again_when_there_is_something_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(module, "judged", lambda base: None)
    run = Scripted(tmp_path, Sizes(100), seed, lambda said: None, checkpoint_after=8)
    run.run(6, 1)
    hits = [kill.hit for kill in run._kills]
    assert all(hits.count(moment) >= 1 for moment in WANTED)
    assert not any(one is two is Hit.START for one, two in itertools.pairwise(hits))


def test_a_moment_that_is_never_hit_is_named(tmp_path: Path) -> None:
    run = Scripted(tmp_path, Sizes(100), 1, lambda said: None, checkpoint_after=1000)
    with pytest.raises(HarnessError, match="24 more kills did not hit 1 times: during a resume"):
        run.run(6, 1)
