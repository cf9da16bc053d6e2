"""Sampling with seeds of requests: such an answer has a generator of its own and does not depend on its neighbours.

Megatron's sampler has one generator for all requests, whose draws depend on everything that was sampled before. This one
samples with it and then draws again for the requests that came with a seed. All ranks of a replica draw the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SeededSampling:
    """Stands in for the controller's sampler, and passes everything else on to it."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._generators: dict[int, torch.Generator] = {}

    @classmethod
    def of(cls, controller: Any) -> SeededSampling:
        """Install it in a controller of Megatron's."""
        controller._sampling = seeded = cls(controller._sampling)
        return seeded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def add(self, number: int, seed: int) -> None:
        """The engine's request of this number is sampled with this seed."""
        where = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._generators[number] = torch.Generator(device=where).manual_seed(seed)

    def forget(self, number: int) -> None:
        """The request is answered."""
        self._generators.pop(number, None)

    def sample_kernel(self, logits: Tensor, n: int, context: Any, **options: Any) -> Tensor:
        """Token ids [n]; the sampler's own contract."""
        sampled: Tensor = self._sampler.sample_kernel(logits, n, context, **options)
        if not self._generators:
            return sampled
        first, last = context.paused_request_count, context.total_request_count
        numbers = context.request_ids[first:last].tolist()
        settings = context.active_request_metadata
        gather = options.get("gather_indices")
        for row, number in enumerate(numbers[:n]):
            if number in self._generators:
                where = row if gather is None else int(gather[row])
                sampled[row] = self._sampler.sample_from_logits(
                    logits[where : where + 1],
                    float(settings["temperature"][row]),
                    int(settings["top_k"][row]),
                    float(settings["top_p"][row]),
                    generator=self._generators[number],
                    vocab_size=self._sampler._vocab_size,
                )[0]
        return sampled
