"""Llama and Mixtral as Hugging Face's config.json describes them, from the published formulas alone: an independent reader."""

from __future__ import annotations

import json
from pathlib import Path

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
    assert config["tie_word_embeddings"]
    return _norm(config, x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def _norm(config: dict[str, float], x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])


def _attention(config: dict[str, int], own: dict[str, Tensor], x: Tensor) -> Tensor:
    size, count = config["head_dim"], len(x)
    q, k, v = ((x @ own[f"self_attn.{one}_proj.weight"].T).view(count, -1, size).transpose(0, 1) for one in "qkv")
    angles = torch.arange(count)[:, None] / config["rope_theta"] ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(t: Tensor) -> Tensor:
        low, high = t.chunk(2, -1)
        return t * cos + torch.cat([-high, low], -1) * sin

    repeats = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = turned(k).repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = turned(q) @ k.transpose(1, 2) / size**0.5
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return mixed.transpose(0, 1).reshape(count, -1) @ own["self_attn.o_proj.weight"].T


def _feed_forward(config: dict[str, int], own: dict[str, Tensor], x: Tensor) -> Tensor:
    if "mlp.gate_proj.weight" in own:
        return _gated(x, *(own[f"mlp.{one}_proj.weight"] for one in ("gate", "up", "down")))
    shares = (x @ own["block_sparse_moe.gate.weight"].T).softmax(-1)
    best, chosen = shares.topk(config["num_experts_per_tok"], -1)
    best = best / best.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(config["num_local_experts"]):
        weights = (own[f"block_sparse_moe.experts.{expert}.{one}.weight"] for one in ("w1", "w3", "w2"))
        out += (best * (chosen == expert)).sum(-1, keepdim=True) * _gated(x, *weights)
    return out


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T
