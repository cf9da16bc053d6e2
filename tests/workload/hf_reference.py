"""Llama, Qwen and Mixtral as Hugging Face's config.json describes them, from the published formulas: an independent reader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from rljob_workload.huggingface import tensors


def logits(directory: Path, ids: Tensor) -> Tensor:
    """[tokens, vocabulary] of one sequence, from the files of a model directory."""
    config = json.loads((directory / "config.json").read_text())
    w = {name: t for file in directory.glob("*.safetensors") for name, t in tensors.read(file).items()}
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        own = {name.removeprefix(here): t for name, t in w.items() if name.startswith(here)}
        x = x + _attention(config, own, _norm(config, x, own["input_layernorm.weight"]))
        x = x + _feed_forward(config, own, _norm(config, x, own["post_attention_layernorm.weight"]))
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return _norm(config, x, w["model.norm.weight"]) @ head.T


def _norm(config: dict[str, float], x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])


def _attention(config: dict[str, Any], own: dict[str, Tensor], x: Tensor) -> Tensor:
    size, count = config["head_dim"], len(x)

    def projected(one: str) -> Tensor:
        out = x @ own[f"self_attn.{one}_proj.weight"].T + own.get(f"self_attn.{one}_proj.bias", torch.zeros(()))
        heads = out.view(count, -1, size)
        norm = own.get(f"self_attn.{one}_norm.weight")
        return (heads if norm is None else _norm(config, heads, norm)).transpose(0, 1)

    q, k, v = map(projected, "qkv")
    angles = torch.arange(count)[:, None] * _frequencies(config["rope_parameters"], size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(t: Tensor) -> Tensor:
        low, high = t.chunk(2, -1)
        return t * cos + torch.cat([-high, low], -1) * sin

    repeats = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = turned(k).repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = turned(q) @ k.transpose(1, 2) / size**0.5
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    out: Tensor = mixed.transpose(0, 1).reshape(count, -1) @ own["self_attn.o_proj.weight"].T
    return out


def _frequencies(rope: dict[str, Any], size: int) -> Tensor:
    """Radians per token of each pair; Llama 3's long waves are slowed down, with a ramp between."""
    found = []
    for pair in range(size // 2):
        frequency = rope["rope_theta"] ** (-2 * pair / size)
        if rope["rope_type"] == "llama3":
            turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            frequency = kept * frequency + (1 - kept) * frequency / rope["factor"]
        found.append(frequency)
    return torch.tensor(found)


def _feed_forward(config: dict[str, Any], own: dict[str, Tensor], x: Tensor) -> Tensor:
    if "mlp.gate_proj.weight" in own:
        return _gated(x, *(own[f"mlp.{one}_proj.weight"] for one in ("gate", "up", "down")))
    mixtral = "block_sparse_moe.gate.weight" in own
    layer, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    shares = (x @ own[f"{layer}.gate.weight"].T).softmax(-1)
    best, chosen = shares.topk(config["num_experts_per_tok"], -1)
    best = best / best.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(config["num_local_experts" if mixtral else "num_experts"]):
        weights = (own[f"{layer}.experts.{expert}.{one}.weight"] for one in names)
        out += (best * (chosen == expert)).sum(-1, keepdim=True) * _gated(x, *weights)
    return out


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T
