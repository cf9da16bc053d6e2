"""Runs megatron-core 0.19.2 on a CPU without changing its files.

Megatron has no CPU path: about 200 call sites ask `torch.cuda.current_device()`, about 90 say `device="cuda"`. Only modules
named `megatron.*` are shown another `torch` (see `torch_proxy`); torch itself, Ray and our own code keep the real one. The
shim leans on private call sites of exactly one release, listed in `patch_points`; a test fails when one of them moves.
"""

from rljob_workload.megatron.shim.torch_proxy import install

__all__ = ["install"]
