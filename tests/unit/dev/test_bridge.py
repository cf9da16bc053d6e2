"""What our names are for the parameters of the model that megatron-bridge builds."""

from __future__ import annotations

import pytest
from dev.bridge import our_name

from rljob_workload.huggingface.names import table
from tests.unit.workload.hf_models import MODELS, architecture

GPT = {
    "embedding.word_embeddings.weight": ("embedding.word_embeddings.weight", None),
    "decoder.final_layernorm.weight": ("decoder.final_norm.weight", None),
    "decoder.layers.1.input_layernorm.weight": ("decoder.layers.2.input_layernorm.weight", None),
    "decoder.layers.1.self_attention.q_layernorm.weight": ("decoder.layers.2.self_attention.q_layernorm.weight", None),
    "decoder.layers.1.pre_mlp_layernorm.weight": ("decoder.layers.3.pre_mlp_layernorm.weight", None),
    "decoder.layers.0.mlp.linear_fc1.weight": ("decoder.layers.1.mlp.linear_fc1.weight", None),
    "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight": (
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight",
        3,
    ),
}


@pytest.mark.parametrize("name", GPT)
def test_a_parameter_of_gptmodel_has_its_place_among_the_trainers_layers(name: str) -> None:
    assert our_name(name) == GPT[name]
    known = {one for model in MODELS for entry in table(architecture(model)) for one in entry.names}
    assert our_name(name)[0] in known
