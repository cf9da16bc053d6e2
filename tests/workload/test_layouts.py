"""Every layout on the real Megatron classes: the same numbers as one rank, and nothing lost over many hand-overs.

Short by default; `RLJOB_LAYOUT_CYCLES=200` runs the full count of hand-overs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import TrainBatch

from .conftest import ROOT
from .many_ranks import ManyRanks, Trainer

CYCLES = int(os.environ.get("RLJOB_LAYOUT_CYCLES", "12"))
STEPS = 4
DENSE, EXPERTS, HYBRID = "dense", "experts", "hybrid"
#: What the models' shapes add to the example's; 65 rows of vocabulary are no multiple of two ranks.
SHAPES: dict[str, dict[str, Any]] = {
    DENSE: {"vocabSize": 65, "queryGroups": 2},
    EXPERTS: {"experts": 4, "topK": 2},
    HYBRID: {"layers": 6, "hybridPattern": "*-*E*-", "experts": 4, "topK": 1},
}


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    model: str
    ranks: int
    sizes: dict[str, Any]
    nodes: int = 1

    @property
    def name(self) -> str:
        sizes = [f"{name}{size}" for name, size in self.sizes.items()]
        return "-".join([self.model, f"{self.nodes}x{self.ranks // self.nodes}", *sizes])


CASES = (
    Case(DENSE, 2, {"tensor": 2}),
    Case(DENSE, 2, {"tensor": 2, "sequence": True}),
    Case(DENSE, 2, {"pipeline": 2}),
    Case(DENSE, 2, {"pipeline": 2}, nodes=2),
    Case(DENSE, 2, {}, nodes=2),
    Case(EXPERTS, 2, {"expert": 2}),
    Case(EXPERTS, 2, {"expert": 2}, nodes=2),
    Case(EXPERTS, 2, {"tensor": 2, "sequence": True}),
    Case(EXPERTS, 2, {"tensor": 2, "expert": 2, "expertTensor": 1, "sequence": True}),
    Case(HYBRID, 2, {"pipeline": 2}),
    Case(HYBRID, 2, {"expert": 2}),
    Case(DENSE, 4, {"tensor": 2}),
    Case(DENSE, 4, {"tensor": 2, "pipeline": 2}),
    Case(DENSE, 4, {"pipeline": 2}),
    Case(EXPERTS, 4, {"tensor": 2, "expert": 2, "sequence": True}, nodes=2),
    Case(EXPERTS, 4, {"pipeline": 2, "expert": 2}),
)


def spec_of(model: str, ranks: int = 1, sizes: dict[str, Any] | None = None, nodes: int = 1, **changes: Any) -> RLJobSpec:
    raw = yaml.safe_load((ROOT / "examples" / "copy.yaml").read_text())["spec"]
    raw["trainer"] |= {"nodes": nodes, "ranksPerNode": ranks // nodes}
    raw["model"]["shape"] |= SHAPES[model]
    raw["parallelism"] = sizes or {}
    raw["algorithm"]["grpo"] |= {"promptsPerStep": 4, "microBatchSize": 4, "generationsPerPrompt": 4}
    raw["generation"]["maxInFlightPrompts"] = 4
    for name, value in changes.items():
        target = raw["algorithm"]["grpo"] if name in raw["algorithm"]["grpo"] else raw["generation"]
        target[name] = value
    verdict = judge("layout", raw)
    assert verdict.spec is not None, verdict.findings
    return verdict.spec


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], ManyRanks]]:
    """Processes by world size; one world at a time, since the machine's cores are few."""
    with contextlib.ExitStack() as stack:
        built: dict[int, ManyRanks] = {}

        def world(size: int) -> ManyRanks:
            if size not in built or built[size].closed:
                built[size] = ManyRanks(size)
                stack.callback(built[size].close)
            return built[size]

        yield world


@dataclass(frozen=True)
class Reference:
    """What one rank did: its batches, its numbers, its checkpoint before the last step, its greedy answers after it."""

    batches: list[TrainBatch]
    losses: list[tuple[float, float]]
    checkpoint: Path
    greedy: dict[int, tuple[int, ...]]


@pytest.fixture(scope="module")
def references(worlds: Callable[[int], ManyRanks], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def reference(model: str) -> Reference:
        if model not in known:
            directory = tmp_path_factory.mktemp(model)
            with Trainer.of(spec_of(model), worlds(1), directory) as one:
                losses = []
                for step in range(STEPS):
                    if step == STEPS - 1:
                        one.save(directory / "saved")
                    stats = one.step()
                    losses.append((stats.loss, stats.grad_norm))
                known[model] = Reference(one.batches, losses, directory / "saved", one.validate(40))
        return known[model]

    return reference


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_compute_what_one_rank_computes(
    case: Case, worlds: Callable[[int], ManyRanks], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """From the seed and from one rank's checkpoint; and one rank goes on from the layout's."""
    one = references(case.model)
    spec = spec_of(case.model, case.ranks, case.sizes, case.nodes)
    with Trainer.of(spec, worlds(case.ranks), tmp_path) as many:
        losses = []
        for step, batch in enumerate(one.batches):
            if step == STEPS - 1:
                many.save(tmp_path / "saved")
            stats = many.train(batch)
            losses.append((stats.loss, stats.grad_norm))
        assert losses == [pytest.approx(numbers, rel=1e-5, abs=1e-7) for numbers in one.losses]
        assert many.validate(40) == one.greedy
        many.load(one.checkpoint, STEPS - 1)
        stats = many.train(one.batches[-1])
        assert (stats.loss, stats.grad_norm) == pytest.approx(one.losses[-1], rel=1e-5, abs=1e-7)
    with Trainer.of(spec_of(case.model), worlds(1), tmp_path) as alone:
        alone.load(tmp_path / "saved", STEPS - 1)
        stats = alone.train(one.batches[-1])
        assert (stats.loss, stats.grad_norm) == pytest.approx(one.losses[-1], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_hand_over_with_answers_in_flight(case: Case, worlds: Callable[[int], ManyRanks], tmp_path: Path) -> None:
    """Every few tokens the ranks train; the learning rate is 0, so every answer must have the log-probs of training."""
    changes = {"learningRate": "0", "maxInFlightPrompts": 8, "maxTrajectoryAgeSteps": 8, "steps": 1000}
    spec = spec_of(case.model, case.ranks, case.sizes, case.nodes, **changes)
    with Trainer.of(spec, worlds(case.ranks), tmp_path) as many:
        worst, flying, trained = 0.0, 0, 0
        while many.version < CYCLES:
            flying += many.generate(1) > 0
            taken = many.rollouts.take(many.version + 1, many.version)
            if taken is None:
                continue
            worst = max(worst, many.train(taken[0]).largest_logprob_change)
            many.rollouts.commit(taken[0].step, taken[0].ordinals)
            trained += taken[1].spanning
        many.rollouts.ledger.check()
    assert worst < 1e-5
    assert flying > 0
    assert trained > 0
