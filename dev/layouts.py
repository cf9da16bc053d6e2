"""Random specs for the questions that are asked of two judges: Megatron and our rules, the API server and our rules.

Sizes that fit each other are drawn first; then, in most specs, some are bent. A spec depends on the generator's state alone.
"""

from __future__ import annotations

import math
import random
from typing import Any

SMALL = (1, 1, 1, 2, 2, 4, 8)
ODD = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


class Draw:
    """Choices from one generator. `odd` is never true for a spec that is meant to fit."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.fits = rng.random() < 0.4

    def of(self, *choices: Any) -> Any:
        """One of them."""
        return self._rng.choice(choices)

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self._rng.random() < probability

    def odd(self, probability: float) -> bool:
        """True so often, where something may be out of place."""
        return self._rng.random() < probability and not self.fits

    def mixed(self, symbols: str, length: int) -> str:
        """A string of so many of these symbols."""
        return "".join(self._rng.choices(symbols, k=max(0, length)))

    def shuffled(self, text: str) -> str:
        """The same symbols in another order."""
        return "".join(self._rng.sample(text, len(text)))


def layout(rng: random.Random, largest_world: int = 64) -> dict[str, Any]:
    """A spec whose layout, model and batch are random; everything else is as in the examples."""
    draw = Draw(rng)
    on_gpus, engine = draw.chance(0.6), draw.chance(0.5)
    engine = engine if on_gpus else draw.odd(0.1)
    tensor, pipeline = draw.of(3, 16) if draw.odd(0.06) else draw.of(*SMALL), draw.of(1, 1, 1, 2, 4)
    context = draw.of(1, 1, 2) if engine else 2 if draw.odd(0.1) else 1
    shape = _shape(draw, tensor, pipeline, mamba=(on_gpus and context == 1) or draw.odd(0.2))
    expert, expert_tensor = _experts(draw, shape, tensor)
    nodes, ranks = _world(draw, tensor, pipeline, context, expert, expert_tensor or tensor, largest_world)
    parallelism: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    if expert_tensor:
        parallelism["expertTensor"] = expert_tensor
    if draw.odd(0.08):
        parallelism["virtualPipeline"] = draw.of(2, 3)
    moe = bool(shape.get("experts"))
    parallelism["sequence"] = draw.odd(0.1) if tensor == 1 else (moe or draw.chance(0.3)) != draw.odd(0.15)
    slots = draw.of(96, 64, 16, 8) if not draw.odd(0.2) else draw.of(7, 12, 30)
    spec: dict[str, Any] = {
        "trainer": {
            "image": "x",
            "nodes": nodes,
            "gpusPerNode": ranks if on_gpus else 0,
            "ranksPerNode": 1 if on_gpus else ranks,
        },
        "model": {
            "preset": "tiny",
            "shape": shape,
            "transformer": "TransformerEngine" if engine else "Local",
            "dtype": draw.of("float32", "bfloat16"),
        },
        "parallelism": parallelism,
        "generation": {"maxNewTokens": 4, "maxSequenceLength": 16, "maxRequests": slots},
        "data": {"builtin": "copy3"},
        "environment": {"builtin": "exactMatch"},
        "algorithm": {"grpo": _batch(draw, nodes * ranks // (tensor * pipeline * context))},
        "checkpoint": {"volume": {"claimName": "c"}},
    }
    if (engine and draw.chance(0.2)) or draw.odd(0.03):
        _optimize(draw, spec)
    return spec


def _experts(draw: Draw, shape: dict[str, Any], tensor: int) -> tuple[int, int | None]:
    """Expert- and expert-tensor-parallel sizes."""
    experts = shape.get("experts")
    if draw.odd(0.2):
        return draw.of(1, 2, 3, 4, 8), draw.of(None, 1, 2, 3, 4)
    if not experts:
        return 1, draw.of(None, None, None, 1, tensor)
    return draw.of(*(size for size in (1, 2, 2, 4, 4, 8) if experts % size == 0)), draw.of(None, 1, tensor)


def _world(
    draw: Draw, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int, largest: int
) -> tuple[int, int]:
    """Nodes and ranks in each: a world that both grids fit into, or any."""
    if draw.odd(0.15):
        ranks = draw.of(1, 2, 3, 4, 8)
        return draw.of(*(nodes for nodes in (1, 2, 3, 4, 8, 16) if nodes * ranks <= largest)), ranks
    dense, sparse = tensor * pipeline * context, expert * expert_tensor * pipeline
    fitting = [world for world in range(1, largest + 1) if world % dense == 0 and world % sparse == 0]
    world = draw.of(*fitting[:4]) if fitting else largest
    ranks = draw.of(*(count for count in (1, 2, 4, 8) if world % count == 0))
    return world // ranks, ranks


def _shape(draw: Draw, tensor: int, pipeline: int, *, mamba: bool) -> dict[str, Any]:
    heads = draw.of(*ODD) if draw.odd(0.2) else tensor * draw.of(1, 1, 2, 4)
    fitting = [g for g in range(1, heads + 1) if heads % g == 0 and (g % tensor == 0 or tensor % g == 0)]
    groups = draw.of(*ODD) if draw.odd(0.15) or not fitting else draw.of(*fitting)
    if draw.odd(0.1):  # a divisor of the heads, whatever the ranks
        heads = tensor * 3
        groups = draw.of(3, heads // 2 or 1, heads)
    head_size = draw.of(1, 2, 3, 6) if draw.odd(0.15) else draw.of(8, 16)
    shape: dict[str, Any] = {
        "layers": draw.of(*ODD) if draw.odd(0.2) else pipeline * draw.of(1, 1, 2, 3),
        "hiddenSize": heads * head_size + draw.odd(0.05),
        "attentionHeads": heads,
        "queryGroups": groups,
        "ffnHiddenSize": draw.of(6, 9, 10, 12, 20, 33) if draw.odd(0.2) else 16 * draw.of(1, 2, 4),
        "vocabSize": draw.of(64, 128, 100, 65),
    }
    if groups == heads and draw.chance(0.5):
        del shape["queryGroups"]
    if draw.chance(0.35):
        shape["experts"] = draw.of(3, 6, 1, 16) if draw.odd(0.2) else draw.of(4, 8, 8)
        if draw.chance(0.7):
            shape["topK"] = draw.of(5, 9) if draw.odd(0.1) else draw.of(1, 2, 2, 4)
    if draw.chance(0.25):
        _make_hybrid(draw, shape, pipeline, mamba=mamba)
    return shape


def _make_hybrid(draw: Draw, shape: dict[str, Any], pipeline: int, *, mamba: bool) -> None:
    symbols = "*-" + ("E" if shape.get("experts") or draw.odd(0.05) else "") + ("MM" if mamba else "")
    per_stage = shape["layers"] // pipeline
    first = "M" if mamba and draw.odd(0.15) else "*"
    pattern = "".join(first + draw.mixed(symbols, per_stage - 1) for _ in range(pipeline))
    pattern = pattern[: shape["layers"]].ljust(shape["layers"], "-")
    if draw.odd(0.2):
        pattern = draw.shuffled(pattern)
    if draw.odd(0.05):
        pattern += "-"
    shape["hybridPattern"] = pattern
    if "M" in pattern and not draw.odd(0.2):
        # Mamba heads in groups, and attention heads of an even size.
        shape["hiddenSize"] = math.lcm(256, 2 * shape["attentionHeads"])


def _batch(draw: Draw, data: int) -> dict[str, Any]:
    micro, prompts = draw.of(1, 2, 4), draw.of(1, 2, 4, 8)
    answers = draw.of(2, 3, 4, 6, 8) if draw.odd(0.15) else max(2, micro * max(1, data) * draw.of(1, 2))
    return {"promptsPerStep": prompts, "generationsPerPrompt": answers, "microBatchSize": micro, "steps": 50}


def _optimize(draw: Draw, spec: dict[str, Any]) -> None:
    """Ask for the dual mode, mostly with what it needs."""
    spec["generation"]["inferenceOptimized"] = True
    spec["model"]["allowInferenceOptimizedTraining"] = not draw.odd(0.1)
    if not draw.odd(0.15):
        spec["model"]["dtype"] = "bfloat16"
    if not draw.odd(0.3):
        spec["parallelism"]["sequence"] = spec["parallelism"]["tensor"] > 1


def whole(rng: random.Random) -> dict[str, Any]:
    """A spec that is random in everything that a rule reads."""
    spec = layout(rng)
    draw = Draw(rng)
    grpo, parallelism = spec["algorithm"]["grpo"], spec["parallelism"]
    if draw.chance(0.3):
        names = ("tensor", "pipeline", "context", "expert")
        wanted = {name: draw.of(*SMALL) if draw.odd(0.2) else parallelism[name] for name in names}
        wanted["expertTensor"] = draw.of(*SMALL) if draw.odd(0.3) else parallelism.get("expertTensor", parallelism["tensor"])
        spec["generation"]["parallelism"] = {name: size for name, size in wanted.items() if draw.chance(0.6)}
    if draw.odd(0.1):
        spec["generation"]["maxNewTokens"] = draw.of(15, 16, 17)
    if draw.odd(0.1):
        spec["model"].pop(draw.of("preset", "shape"))
    if draw.odd(0.05):
        spec["model"]["huggingFace"] = {"path": "/models/x"}
    if draw.odd(0.08):
        spec["data"] = draw.of({}, {"jsonl": {"path": "/d"}}, {"builtin": "copy3", "parquet": {"path": "/d"}})
    if draw.odd(0.05):
        spec["environment"] = {}
    if draw.odd(0.05):
        grpo["generationsPerPrompt"] = draw.of(900, 901, 65536)
    if draw.odd(0.05):
        grpo["microBatchSize"] = draw.of(1_048_576, 3, 5)
    if draw.odd(0.15):
        deadlines = ("stallSeconds", "saveSeconds", "handoverSeconds", "activeSeconds", "provisioningSeconds")
        spec["deadlines"] = {name: draw.of(30, 60, 300, 600) for name in deadlines if draw.chance(0.5)}
    if draw.odd(0.08):
        spec["failurePolicy"] = {"backoffSeconds": draw.of(0, 5, 400), "maxBackoffSeconds": draw.of(0, 5, 300)}
    if draw.odd(0.1):
        spec["checkpoint"]["volume"]["subPath"] = draw.of("a/b", "../a", "a/../..", "a..b", "..", "a/..")
    if draw.odd(0.1):
        spec["checkpoint"]["from"] = {"claimName": "d", "path": draw.of("runs/a", "/etc", "../x", "a/..b")}
    if draw.odd(0.03):
        spec["trainer"] |= {"nodes": 1024, "gpusPerNode": 64}
        spec["parallelism"] |= {"tensor": draw.of(4096, 1), "pipeline": 4096, "context": 4096, "expert": draw.of(1, 4096)}
    if draw.odd(0.1):
        spec.pop("parallelism")
    return spec
