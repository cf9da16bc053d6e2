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

    @property
    def row(self) -> str:
        """The line of the table in docs/layouts.md."""
        sizes = [name if size is True else f"{name} {size}" for name, size in self.sizes.items()]
        return f"| {self.model} | {self.nodes} x {self.ranks // self.nodes} | {', '.join(sizes) or 'data only'} |"


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
    raw["model"].setdefault("dtype", "float32")
    raw["parallelism"] = sizes or {}
    raw["algorithm"]["grpo"] |= {"promptsPerStep": 4, "microBatchSize": 8, "generationsPerPrompt": 4}
    raw["generation"]["maxInFlightPrompts"] = 4
    for name, value in changes.items():
        target = next((part for part in (raw["algorithm"]["grpo"], raw["model"]) if name in part), raw["generation"])
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
            if size not in built:
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


def test_layouts_resume_from_one_another(
    worlds: Callable[[int], ManyRanks], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Tensor, pipeline, data: each goes on from the checkpoint of the one before, and all as one rank did."""
    one = references(DENSE)
    newest = one.checkpoint
    for case in [case for case in CASES if case.model == DENSE and case.ranks == 2]:
        with Trainer.of(spec_of(case.model, case.ranks, case.sizes, case.nodes), worlds(2), tmp_path) as many:
            many.load(newest, STEPS - 1)
            newest = tmp_path / case.name
            many.save(newest)
            stats = many.train(one.batches[-1])
            # Ranks that went on with the random state of another layout's ranks would sample apart.
            generated = many.step()
        assert (stats.loss, stats.grad_norm) == pytest.approx(one.losses[-1], rel=1e-5, abs=1e-7), case.name
        assert generated.largest_logprob_change < 1e-5, case.name


def test_layouts_that_are_tested_are_those_in_the_docs() -> None:
    rows = [case.row for case in CASES]
    listed = [line for line in (ROOT / "docs" / "layouts.md").read_text().splitlines() if line in rows]
    assert listed == rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_hand_over_with_answers_in_flight(case: Case, worlds: Callable[[int], ManyRanks], tmp_path: Path) -> None:
    """The ranks train between any two tokens; the learning rate is 0, so answers must have the log-probs of training."""
    changes = {"learningRate": "0", "maxInFlightPrompts": 8, "maxTrajectoryAgeSteps": 16, "steps": 1000}
    spec = spec_of(case.model, case.ranks, case.sizes, case.nodes, **changes)
    with Trainer.of(spec, worlds(case.ranks), tmp_path) as many:
        first = many.step()
        worst, batch, spanning, cycles = first.largest_logprob_change, many.batches[0], 0, 0
        while cycles < CYCLES:
            cycles += many.generate(1) > 0
            taken = many.rollouts.take(many.version + 1, many.version)
            if taken is not None:
                batch, spanning = taken[0], spanning + taken[1].spanning
                many.rollouts.commit(batch.step, batch.ordinals)
            worst = max(worst, many.train(batch).largest_logprob_change)
        while many.generate(64, fresh=False):
            pass
        counts = many.rollouts.ledger.counts()
    assert (counts.in_flight, counts.retryable, counts.skipped) == (0, 0, 0)
    assert counts.trained > 0
    assert spanning > 0
    assert worst < 1e-5
