"""First weights that depend on the seed and not on the layout.

Megatron draws each rank's weights from one stream of random numbers, so another layout starts from other weights, and with CPU
initialisation the experts of different ranks start equal. Here every tensor of the whole model has a stream of its own, named
by the seed and the tensor's name in a checkpoint; a rank draws the whole tensor and keeps its part. Pretrained weights are
taken over in the same way: a rank looks at the whole tensor and keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from rljob_workload.huggingface.weights import PretrainedWeights
from rljob_workload.megatron.errors import WeightsError

#: Tensors with a row for each word.
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
#: Layers that write to the residual stream start smaller, the smaller the more of them there are.
_WRITES_BACK = ("linear_proj.weight", "linear_fc2.weight")


def draw_weights(model: Any, *, seed: int, vocabulary: int) -> None:
    """Fill the matrices of this rank's model; vectors (the norms' weights) stay as they are, padding rows are zero."""
    filled = set()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for part in _parts(model):
            if part.data.dim() < 2:
                continue
            shape = list(part.global_shape[part.prepend_axis_num :])
            if part.key in _VOCABULARY:
                shape[0] = vocabulary
            torch.manual_seed(_stream(seed, part.key, part.global_offset[: part.prepend_axis_num]))
            whole = torch.empty(shape)
            config = model.config
            (config.output_layer_init_method if part.key.endswith(_WRITES_BACK) else config.init_method)(whole)
            _keep(part, whole)
            filled.add(part.data.untyped_storage().data_ptr())
    missed = [name for name, p in model.named_parameters() if p.dim() > 1 and p.untyped_storage().data_ptr() not in filled]
    if missed:
        raise RuntimeError(f"no first weights for {', '.join(missed)}: they are in no checkpoint")


def take_weights(model: Any, source: PretrainedWeights) -> None:
    """Fill every parameter of this rank's model, vectors too, from a whole model. Raises WeightsError."""
    filled = set()
    with torch.no_grad():
        for part in _parts(model):
            try:
                whole = source.whole(part.key)
            except KeyError:
                raise WeightsError(f"the pretrained model has no {part.key}") from None
            _keep(part, whole[part.global_offset[: part.prepend_axis_num]])
            filled.add(part.data.untyped_storage().data_ptr())
    missed = [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in filled]
    if missed:
        raise WeightsError(f"no pretrained weights for {', '.join(missed)}: they are in no checkpoint")


def _keep(part: Any, whole: torch.Tensor) -> None:
    """This rank's part of a tensor; what goes beyond it (the vocabulary's padding) is zero."""
    own = whole[tuple(map(slice, part.global_offset[part.prepend_axis_num :], _ends(part)))]
    part.data.zero_()
    part.data[tuple(slice(0, size) for size in own.shape)] = own.to(part.data)


def _parts(model: Any) -> Iterator[Any]:
    """This rank's tensors, each with its name and place in the whole model."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict()
    apply_factories(state)
    yield from (part for part in nested_values(state) if isinstance(part, ShardedTensor))


def _ends(part: Any) -> Iterator[int]:
    offset = part.global_offset[part.prepend_axis_num :]
    return (start + size for start, size in zip(offset, part.data.shape, strict=True))


def _stream(seed: int, name: str, place: tuple[int, ...]) -> int:
    """A seed for one tensor."""
    digest = hashlib.sha256(f"{seed}/{name}/{place}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
