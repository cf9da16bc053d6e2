"""The engine's key/value cache: sized for the layers that have keys and values.

Megatron counts a hybrid model's attention layers only when it has Mamba layers too. Ours are hybrid models of attention and
feed-forward, so it would set memory aside for every layer: twice what a dense model needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def build_context(model: Any, config: Any, inference: Any) -> Any:
    """Megatron's dynamic context for this rank's layers. `inference`: its InferenceConfig."""
    from megatron.core.inference.contexts import DynamicInferenceContext

    places = attention_places(model)
    with _counting(max(1, len(places))):  # a stage without attention keeps one: Megatron refuses none
        context = DynamicInferenceContext(config, inference)
    context.layer_map = {place: number for number, place in enumerate(places)}
    return context


def attention_places(model: Any) -> list[int]:
    """Where this stage's attention layers stand among its layers, from 0."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

    return [place for place, symbol in enumerate(model.decoder.layer_type_list) if symbol == Symbols.ATTENTION]


@contextmanager
def _counting(layers: int) -> Iterator[None]:
    """The context asks this function, and imports it when it asks."""
    import megatron.core.transformer.transformer_block as block

    original = block.get_num_layers_to_build
    block.get_num_layers_to_build = lambda *_, **__: layers
    try:
        yield
    finally:
        block.get_num_layers_to_build = original
