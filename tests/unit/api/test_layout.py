"""Which ranks generate together."""

from __future__ import annotations

import pytest

from rljob_api.layout import Layout


@pytest.mark.parametrize(
    ("sizes", "sets"),
    [
        ({"world": 4, "tensor": 2}, [[0, 1], [2, 3]]),
        ({"world": 4, "pipeline": 2}, [[0, 2], [1, 3]]),  # stages are the outermost
        ({"world": 8, "tensor": 2, "pipeline": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"world": 2, "expert": 2}, [[0, 1]]),  # two copies that share experts
        ({"world": 4, "expert": 2}, [[0, 1], [2, 3]]),
        ({"world": 2, "tensor": 2, "expert": 2, "expert_tensor": 1}, [[0, 1]]),
        ({"world": 8, "pipeline": 2, "expert": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"world": 8, "tensor": 2, "expert": 2, "expert_tensor": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_ranks_of_one_copy_and_copies_that_share_experts_generate_together(
    sizes: dict[str, int], sets: list[list[int]]
) -> None:
    world = sizes.pop("world")
    layout = Layout(
        nodes=1,
        ranks_per_node=world,
        context=1,
        **{"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": sizes.get("tensor", 1)} | sizes,
    )
    assert layout.replicas() == sets
