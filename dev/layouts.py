"""Random specs for the questions that are asked of two judges: Megatron and our rules, the API server and our rules.

Most are near the edge: sizes that fit are drawn first, then some are bent. A spec depends on the generator's state alone.
"""

from __future__ import annotations

import random
from typing import Any

SMALL = (1, 1, 1, 2, 2, 4, 8)
ODD = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def layout(rng: random.Random, largest_world: int = 64) -> dict[str, Any]:
    """A spec whose layout, model and batch are random; everything else is as in the examples."""
    gpus = rng.choice((0, 0, 1, 2, 4, 8))
    ranks = gpus or rng.choice((1, 1, 2, 3, 4, 8))
    nodes = rng.choice([n for n in (1, 1, 2, 3, 4, 8, 16) if n * ranks <= largest_world])
    tensor, pipeline, context = rng.choice(SMALL), rng.choice((1, 1, 1, 2, 4)), rng.choice((1, 1, 1, 1, 2))
    if rng.random() < 0.7:  # a world that the dense model fits into
        product = tensor * pipeline * context
        nodes, per_node = _fitting(rng, product, largest_world)
        gpus = per_node if gpus else 0
        ranks = per_node
    shape = _shape(rng, tensor, pipeline)
    parallelism: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context}
    if shape.get("experts") or rng.random() < 0.1:
        parallelism["expert"] = rng.choice((1, 1, 2, 4, 8, 3))
    if rng.random() < 0.3:
        parallelism["expertTensor"] = rng.choice((1, 1, 2, 4, 3))
    if rng.random() < 0.05:
        parallelism["virtualPipeline"] = rng.choice((2, 3))
    parallelism["sequence"] = rng.random() < (0.8 if tensor > 1 and shape.get("experts") else 0.3 if tensor > 1 else 0.05)
    engine = (gpus > 0 and rng.random() < 0.5) or rng.random() < 0.03
    spec: dict[str, Any] = {
        "trainer": {"image": "x", "nodes": nodes, "gpusPerNode": gpus, "ranksPerNode": 1 if gpus else ranks},
        "model": {
            "preset": "tiny",
            "shape": shape,
            "transformer": "TransformerEngine" if engine else "Local",
            "dtype": rng.choice(("float32", "bfloat16")),
        },
        "parallelism": parallelism,
        "generation": {"maxNewTokens": 4, "maxSequenceLength": 16, "maxRequests": rng.choice((96, 96, 64, 16, 7, 12))},
        "data": {"builtin": "copy3"},
        "environment": {"builtin": "exactMatch"},
        "algorithm": {"grpo": _batch(rng, nodes * ranks, tensor * pipeline * context)},
        "checkpoint": {"volume": {"claimName": "c"}},
    }
    if engine and rng.random() < 0.2:
        spec["generation"]["inferenceOptimized"] = True
        spec["model"]["allowInferenceOptimizedTraining"] = rng.random() < 0.9
        spec["model"]["dtype"] = rng.choice(("bfloat16", "bfloat16", "bfloat16", "float32"))
    return spec


def _fitting(rng: random.Random, product: int, largest: int) -> tuple[int, int]:
    world = product * rng.choice([f for f in (1, 1, 2, 2, 4, 8) if product * f <= largest] or [1])
    per_node = rng.choice([d for d in (1, 2, 4, 8) if world % d == 0])
    return world // per_node, per_node


def _shape(rng: random.Random, tensor: int, pipeline: int) -> dict[str, Any]:
    heads = tensor * rng.choice((1, 1, 2, 4)) if rng.random() < 0.8 else rng.choice(ODD)
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0]) if rng.random() < 0.85 else rng.choice(ODD)
    head_size = rng.choice((2, 4, 8, 16, 8, 16)) if rng.random() < 0.9 else rng.choice((1, 3, 6))
    layers = pipeline * rng.choice((1, 1, 2, 3)) if rng.random() < 0.8 else rng.choice(ODD)
    shape: dict[str, Any] = {
        "layers": layers,
        "hiddenSize": heads * head_size + (0 if rng.random() < 0.95 else 1),
        "attentionHeads": heads,
        "queryGroups": groups,
        "ffnHiddenSize": 16 * rng.choice((1, 2, 4)) if rng.random() < 0.85 else rng.choice((6, 9, 10, 12, 20, 33)),
        "vocabSize": rng.choice((64, 128, 100, 65)),
    }
    if rng.random() < 0.3:
        del shape["queryGroups"]
    if rng.random() < 0.35:
        shape["experts"] = rng.choice((2, 4, 4, 8, 8, 16, 3, 6))
        if rng.random() < 0.7:
            shape["topK"] = rng.choice((1, 2, 2, 4, 9))
    if rng.random() < 0.25:
        _make_hybrid(rng, shape, pipeline)
    return shape


def _make_hybrid(rng: random.Random, shape: dict[str, Any], pipeline: int) -> None:
    symbols = "*-M" + ("E" if shape.get("experts") or rng.random() < 0.05 else "")
    if rng.random() < 0.4:
        symbols = symbols.replace("M", "")
    stages = ["*" + "".join(rng.choices(symbols, k=max(0, shape["layers"] // pipeline - 1))) for _ in range(pipeline)]
    pattern = list("".join(stages)[: shape["layers"]].ljust(shape["layers"], "-"))
    if rng.random() < 0.2:
        rng.shuffle(pattern)
    if rng.random() < 0.05:
        pattern.append("-")
    shape["hybridPattern"] = "".join(pattern)
    if "M" in pattern and rng.random() < 0.8:
        shape["hiddenSize"] = 256 * (1 + shape["hiddenSize"] // 256)


def _batch(rng: random.Random, world: int, product: int) -> dict[str, Any]:
    data = max(1, world // product)
    micro, prompts = rng.choice((1, 2, 4)), rng.choice((1, 2, 4, 8))
    answers = micro * data * rng.choice((1, 2)) if rng.random() < 0.8 else rng.choice((2, 3, 4, 6, 8))
    return {"promptsPerStep": prompts, "generationsPerPrompt": max(2, answers), "microBatchSize": micro, "steps": 5}


def whole(rng: random.Random) -> dict[str, Any]:
    """A spec that is random in everything that a rule reads."""
    spec = layout(rng)
    grpo, parallelism = spec["algorithm"]["grpo"], spec["parallelism"]
    if rng.random() < 0.3:
        names = ("tensor", "pipeline", "context", "expert", "expertTensor")
        wanted = {name: parallelism.get(name, 1) if rng.random() < 0.7 else rng.choice(SMALL) for name in names}
        spec["generation"]["parallelism"] = {name: size for name, size in wanted.items() if rng.random() < 0.6}
    if rng.random() < 0.2:
        spec["generation"]["maxNewTokens"] = rng.choice((15, 16, 17))
    if rng.random() < 0.2:
        spec["model"].pop(rng.choice(("preset", "shape")))
    if rng.random() < 0.1:
        spec["model"]["huggingFace"] = {"path": "/models/x"}
    if rng.random() < 0.1:
        spec["data"] = rng.choice(({}, {"jsonl": {"path": "/d"}}, {"builtin": "copy3", "parquet": {"path": "/d"}}))
    if rng.random() < 0.05:
        spec["environment"] = {}
    if rng.random() < 0.05:
        grpo["generationsPerPrompt"] = rng.choice((900, 901, 65536))
    if rng.random() < 0.1:
        grpo["microBatchSize"] = rng.choice((1_048_576, 3, 5))
    if rng.random() < 0.2:
        names = ("stallSeconds", "saveSeconds", "handoverSeconds", "activeSeconds", "provisioningSeconds")
        spec["deadlines"] = {name: rng.choice((30, 60, 300, 600)) for name in names if rng.random() < 0.5}
    if rng.random() < 0.1:
        spec["failurePolicy"] = {"backoffSeconds": rng.choice((0, 5, 400)), "maxBackoffSeconds": rng.choice((0, 5, 300))}
    if rng.random() < 0.1:
        spec["checkpoint"]["volume"]["subPath"] = rng.choice(("a/b", "../a", "a/../..", "a..b", "..", "a/.."))
    if rng.random() < 0.1:
        path = rng.choice(("runs/a", "/etc", "../x", "a/..b"))
        spec["checkpoint"]["from"] = {"claimName": "d", "path": path}
    if rng.random() < 0.05:
        spec["trainer"] |= {"nodes": 1024, "gpusPerNode": 64}
        spec["parallelism"] |= {
            "tensor": rng.choice((4096, 1)),
            "pipeline": 4096,
            "context": 4096,
            "expert": rng.choice((1, 4096)),
        }
    if rng.random() < 0.3:
        spec.pop("parallelism")
    return spec
