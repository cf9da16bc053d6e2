"""Where an exported model is from: for programs, and as the README.md that is shown with it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from rljob_workload.core.checkpoint import Checkpoint
from rljob_workload.core.store.manifest import Manifest
from rljob_workload.huggingface.architecture import Architecture


def source_of(checkpoint: Checkpoint, manifest: Manifest, of: Architecture, dtype: str) -> dict[str, Any]:
    """What tells this export from another one."""
    writer = manifest.writer
    return {
        "checkpoint": checkpoint.name,
        "step": checkpoint.step,
        "token": checkpoint.token,
        "job": f"{writer.namespace}/{writer.name}",
        "uid": writer.uid,
        "attempt": writer.attempt,
        "parent": manifest.parent,
        "weightDigest": manifest.weight_digest,
        "family": of.family,
        "maxLength": of.max_length,
        "dtype": dtype,
    }


def readme(source: dict[str, Any], of: Architecture, parameters: int) -> str:
    """The model card."""
    shape = of.shape
    experts = f", {shape.experts} experts" if shape.experts else ""
    return f"""---
library_name: transformers
tags: [reinforcement-learning, rljob]
---
# {source["job"]}, step {source["step"]}

Post-trained by RLJob {version("rljob")} and exported from its checkpoint `{source["checkpoint"]}`.

| | |
|---|---|
| job | {source["job"]} (uid {source["uid"]}), attempt {source["attempt"]} |
| step, token | {source["step"]}, {source["token"]} |
| descends from | {source["parent"] or "the first weights of the run"} |
| weight digest | `{source["weightDigest"]}` |
| architecture | {of.family}: {shape.layers} layers, {shape.hidden_size} wide, {shape.attention_heads} heads{experts} |
| parameters | {parameters:,}, {source["dtype"]} |
| longest sequence trained on | {of.max_length} tokens |

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
```

`rljob-export.json` lists where it is from and the SHA-256 of the weights.
"""
