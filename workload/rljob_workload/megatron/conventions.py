"""What every model of the trainer has in common and its weights rely on, whoever reads them. Without torch."""

from __future__ import annotations

#: Added to the mean square in an RMS norm.
NORM_EPSILON = 1e-6
#: Base period of the rotary position embedding.
ROTARY_BASE = 10_000
