"""Tiny Hugging Face model directories with random weights, one of each architecture that the trainer can begin from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rljob_api.model_details import Details, RopeScaling
from rljob_api.spec import Shape
from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.architecture import Architecture, config, family_of
from rljob_workload.huggingface.names import table
from rljob_workload.huggingface.pretrained import CONFIG, part_sizes

DENSE = Shape(layers=2, hidden_size=64, attention_heads=4, query_groups=2, ffn_hidden_size=96, vocab_size=65)
EXPERTS = DENSE.model_copy(update={"experts": 4, "top_k": 2})
#: Short enough waves that the longest are slowed down and some lie on the ramp.
STRETCHED = RopeScaling(8.0, 1.0, 4.0, 16)
MODELS = {
    "llama": (DENSE, Details()),
    "llama-3": (DENSE, Details(head_size=32, rotary_base=500.0, rope_scaling=STRETCHED, tied=False, norm_epsilon=1e-5)),
    "mixtral": (EXPERTS, Details(rotary_base=1_000_000.0, tied=False)),
    "qwen2": (DENSE, Details(rotary_base=1_000_000.0, tied=False, qkv_bias=True)),
    "qwen3": (DENSE, Details(head_size=32, query_norm=True)),
    "qwen3_moe": (EXPERTS, Details(head_size=32, query_norm=True, tied=False)),
}


def architecture(name: str) -> Architecture:
    shape, details = MODELS[name]
    return Architecture(family_of(shape, details), shape, 256, details)


def make(name: str, directory: Path, *, scale: float = 0.2) -> Architecture:
    """Write a model; norms and biases are not 1 and 0, so that a wrong place of anything shows."""
    of = architecture(name)
    directory.mkdir(parents=True, exist_ok=True)
    write(directory, weights(of, scale))
    (directory / CONFIG).write_text(json.dumps(config(of, dtype="float32", special={})))
    return of


def weights(of: Architecture, scale: float = 0.2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    found = {}
    for entry in table(of):
        for part, size in zip(entry.parts, part_sizes(of, entry), strict=True):
            found[part] = float("norm" in part) + scale * torch.randn(size, generator=draw)
    return found


def write(directory: Path, found: dict[str, Tensor]) -> None:
    tensors.write(directory / "model.safetensors", found)


def change(directory: Path, **values: Any) -> None:
    """Other values in config.json; None removes a key."""
    path = directory / CONFIG
    told = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
