"""Exports from checkpoints that several ranks wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_workload.core.store.facts import facts_of
from rljob_workload.huggingface.export import export
from tests.unit.workload.published import copies_of, published

from .many_ranks import ManyRanks, Trainer
from .test_layouts import DENSE, EXPERTS, spec_of


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (DENSE, [{"tensor": 2}, {"pipeline": 2}]),
        (EXPERTS, [{"expert": 2}, {"tensor": 2, "sequence": True}]),
    ],
)
def test_every_layout_exports_the_same_bytes(
    model: str, layouts: list[dict[str, Any]], two_ranks: ManyRanks, tmp_path: Path
) -> None:
    """Trained and saved in one layout, loaded and saved in others. Two tensor ranks pad the 65 rows of vocabulary to 66."""
    found: list[bytes] = []
    for number, sizes in enumerate(layouts):
        spec, saved = spec_of(model, 2, sizes), tmp_path / f"saved-{number}"
        with Trainer.of(spec, two_ranks, tmp_path / "logs") as trainer:
            if number:
                trainer.ranks.call("load", str(tmp_path / "saved-0"), 1, {})
            else:
                trainer.step()
            trainer.save(saved)
        checkpoint = published(tmp_path / f"run-{number}", facts_of(spec), copies_of(saved))
        export(checkpoint, tmp_path / f"hf-{number}")
        found.append((tmp_path / f"hf-{number}/model.safetensors").read_bytes())
    assert all(one == found[0] for one in found)
