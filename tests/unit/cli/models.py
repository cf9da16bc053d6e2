"""config.json of one model of each known family (the fields that are read), and the shape that a spec would give."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def _decoder(family: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocabulary: int, **more: Any) -> Config:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        **more,
    }


def _shape(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hiddenSize": hidden, "attentionHeads": heads, "queryGroups": groups, "ffnHiddenSize": ffn}
    return {**sizes, "vocabSize": vocabulary, **more}


CONFIGS: dict[str, tuple[Config, dict[str, Any]]] = {
    "llama": (
        _decoder("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, attention_bias=False, mlp_bias=False),
        _shape(16, 2048, 32, 8, 8192, 128256),
    ),
    "mixtral": (
        _decoder("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        _shape(32, 4096, 32, 8, 14336, 32000, experts=8, topK=2),
    ),
    "qwen2": (_decoder("qwen2", 24, 896, 14, 2, 4864, 151936), _shape(24, 896, 14, 2, 4864, 151936)),
    "qwen3": (_decoder("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128), _shape(28, 1024, 16, 8, 3072, 151936)),
    "qwen3_moe": (
        _decoder(
            "qwen3_moe", 48, 2048, 32, 4, 6144, 151936,
            head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
            decoder_sparse_step=1, mlp_only_layers=[],
        ),
        _shape(48, 2048, 32, 4, 768, 151936, experts=128, topK=8),
    ),
    "nemotron_h": (
        _decoder(
            "nemotron_h", 52, 2688, 32, 2, 1856, 131072,
            head_dim=128, hybrid_override_pattern=_PATTERN, n_routed_experts=128, num_experts_per_tok=6, n_shared_experts=1,
            moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
            mamba_num_heads=64, mamba_head_dim=64, n_groups=8,
        ),
        _shape(52, 2688, 32, 2, 1856, 131072, experts=128, topK=6, hybridPattern=_PATTERN),
    ),
}  # fmt: skip
