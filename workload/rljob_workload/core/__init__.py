"""The trainer's pure heart: bookkeeping of prompts, sources, windows and checkpoint directories.

Nothing in this package imports Ray, torch or Megatron, so every rule can be tested without them.
"""
