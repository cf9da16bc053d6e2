"""`make bench-export`: does an exported model compute in transformers what the trained one does? Writes
build/bench/export.json.

python -m benchmarks.export MODEL DIR     train, save and export one model; prints one JSON object
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Row, child, python, table, write

#: What the models' shapes add to the example's; 65 is a vocabulary that two tensor ranks would pad.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"vocabSize": 65, "queryGroups": 2},
    "experts": {"experts": 4, "topK": 2},
}
IDS = [1, 5, 9, 3, 3, 12, 2, 7, 11, 4, 6]


def exported(model: str, directory: Path) -> dict[str, Any]:
    """Train a few steps, save, export to `directory`/hf; the trainer's logits of IDS."""
    import torch
    from benchmarks.loop import Loop, one_rank, spec_of

    from rljob_workload.core.checkpoint import Origin, Owner, RunDirectory
    from rljob_workload.core.store.facts import facts_of
    from rljob_workload.huggingface.export import export
    from rljob_workload.megatron import weights

    spec = spec_of({"model.shape": MODELS[model], "algorithm.grpo": {"promptsPerStep": 8, "microBatchSize": 64}})
    one_rank(spec)
    loop = Loop(spec)
    for _ in range(3):
        loop.step()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():  # norms that are not 1 and larger logits, so that a wrong place of anything shows
        for parameter in loop.policy.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter), alpha=0.2)
    run = RunDirectory(directory / "run")
    run.create()
    token = run.take_token(Owner(namespace="default", name="bench", uid="bench", attempt=1), None).token
    tmp = run.begin(3, token)
    weights.save(loop.policy, None, tmp)
    checkpoint = run.publish(tmp, 3, token, {}, Origin(facts=facts_of(spec)))
    began = time.process_time()
    done = export(checkpoint, directory / "hf")
    seconds = time.process_time() - began
    positions = torch.arange(len(IDS))[None]
    causal = torch.triu(torch.ones(len(IDS), len(IDS), dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = loop.policy.model(torch.tensor([IDS]), positions, causal, runtime_gather_output=True)[0]
    return {
        "logits": logits[:, : loop.policy.settings.shape.vocab_size].tolist(),
        "cpu_seconds": seconds,
        "parameters": done.parameters,
    }


def difference(ours: list[list[float]], theirs: list[list[float]]) -> tuple[float, float]:
    """Largest difference, and largest logit."""
    pairs = [(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return max(abs(a - b) for a, b in pairs), max(abs(a) for a, _ in pairs)


def main() -> int:
    """Both models, ours and theirs. Status 1 when the numbers differ by more than float32 rounds."""
    if len(sys.argv) == 3:
        print(json.dumps(exported(sys.argv[1], Path(sys.argv[2]))))
        return 0
    found = subprocess.run(["benchmarks/trl-venv.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    other = [found.stdout.strip(), "-W", "ignore", "benchmarks/export_transformers.py"]
    rows, wrong = [], False
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="rljob-export-") as directory:
            ours = child(model, python("benchmarks.export", model, directory), 300)
            theirs = child(f"{model} in transformers", [*other, f"{directory}/hf", json.dumps(IDS)], 300)
        error, largest = difference(ours["logits"], theirs["logits"])
        wrong |= not error < 2e-5 * max(1.0, largest) or bool(theirs["unread"])
        note = f"float32, {theirs['class']}, logits up to {largest:.1f}; not read: {theirs['unread'] or 'nothing'}"
        rows.append(Row(f"{model}: largest difference of a logit", "", error, None, "lower", note))
        what = f"{ours['parameters']:,} parameters, read back and compared"
        rows.append(Row(f"{model}: export", "cpu s", ours["cpu_seconds"], None, "lower", what))
    print(table(rows))
    print(f"written to {write('export', rows)}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
