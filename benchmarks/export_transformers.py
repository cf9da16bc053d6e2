"""Logits of an exported model by transformers: run by `benchmarks.export` with the interpreter of TRL's own environment.

    python export_transformers.py DIR '[1, 5, 9]'     prints one JSON line: the logits [tokens, vocabulary], and the class

Imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main() -> None:
    """Load, compute, print."""
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True)
    unread = {name: sorted(map(str, keys)) for name, keys in told.items() if keys and "tied" not in name}
    with torch.no_grad():
        logits = model.eval()(torch.tensor([json.loads(sys.argv[2])])).logits[0]
    print(json.dumps({"class": type(model).__name__, "unread": unread, "logits": logits.tolist()}))


main()
