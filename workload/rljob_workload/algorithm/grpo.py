"""The GRPO loss on behaviour log-probs.

Answers are trained one or more versions after they were sampled. The importance ratio is therefore taken against the
log-probs that were recorded *at sampling time*, whichever versions of the policy sampled the tokens, and clipped on both
sides with separate limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The loss's hyper-parameters."""

    clip_low: float
    clip_high: float
    entropy_coefficient: float
    #: What answers were sampled with; the policy that is trained is the one that sampled.
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Sums over the tokens of one micro-batch; divide by the global token count for means."""

    policy: Tensor
    entropy: Tensor
    clipped: Tensor
    largest_logprob_change: Tensor
    #: The same over the rows that were sampled by the weights at hand: there it is the engine's error, not the policy's change.
    largest_logprob_error: Tensor

    def total(self, settings: LossSettings) -> Tensor:
        """The quantity to minimise: policy loss minus the entropy bonus."""
        return self.policy - settings.entropy_coefficient * self.entropy


def grpo_terms(
    logits: Tensor,
    targets: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    advantages: Tensor,
    settings: LossSettings,
    *,
    current: Tensor | None = None,
) -> LossTerms:
    """The loss of one micro-batch.

    logits [B, S, V]; targets, behaviour log-probs and mask [B, S] (mask 1 on answer tokens); advantages [B];
    current [B], 1 on rows that these very weights sampled.
    """
    logprobs = torch.log_softmax(logits.float() / settings.temperature, dim=-1)
    new = logprobs.gather(2, targets.unsqueeze(-1)).squeeze(-1)
    # Outside the answer there is no behaviour log-prob; a zero difference keeps exp() finite there.
    change = torch.where(mask > 0, new - behaviour, torch.zeros_like(new))
    ratio = change.exp()
    advantage = advantages.unsqueeze(1)
    clipped_ratio = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    policy = -(torch.min(ratio * advantage, clipped_ratio * advantage) * mask).sum()
    entropy = (-(logprobs.exp() * logprobs).sum(-1) * mask).sum()
    with torch.no_grad():
        clipped = ((ratio != clipped_ratio) * mask).sum()
        changes = (change.abs() * mask).amax(1)
        error = changes.new_zeros(()) if current is None else torch.where(current > 0, changes, 0.0).max()
    return LossTerms(policy, entropy, clipped, changes.max(), error)
