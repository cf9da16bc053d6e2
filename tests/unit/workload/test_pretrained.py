"""What a Hugging Face directory must hold for a run to begin from it, and what is said where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rljob_api.manifest import judge
from rljob_api.spec import RLJobSpec
from rljob_workload.core.store.facts import LENGTH, compare, facts_of
from rljob_workload.huggingface import tensors
from rljob_workload.huggingface.architecture import architecture
from rljob_workload.huggingface.headers import FormatError, read_headers
from rljob_workload.huggingface.pretrained import INDEX, PretrainedError, architecture_of, describe, find_weights

from . import hf_models
from .hf_models import MODELS, change, make, weights, write

EXAMPLE = Path(__file__).parents[3] / "examples" / "copy.yaml"
Break = Callable[[Path], object]


def spec_from(directory: Path, *, shape: dict[str, Any] | None = None) -> RLJobSpec:
    raw = yaml.safe_load(EXAMPLE.read_text())["spec"]
    raw["model"] = {"huggingFace": {"path": str(directory)}} | ({"shape": shape} if shape else {})
    verdict = judge("copy", raw)
    assert verdict.spec is not None, verdict.findings
    return verdict.spec


def opened(directory: Path) -> object:
    spec = spec_from(directory)
    return find_weights(spec, architecture_of(describe(spec)))


@pytest.mark.parametrize("name", MODELS)
def test_a_config_says_the_architecture_that_wrote_it_and_a_checkpoint_keeps_it(name: str, tmp_path: Path) -> None:
    of = make(name, tmp_path / "hf")
    spec = spec_from(tmp_path / "hf")
    facts = describe(spec)
    assert architecture_of(facts) == of
    assert len(find_weights(spec, of)) == len(weights(of))
    saved = json.loads(json.dumps(facts_of(spec, facts)))
    assert architecture(saved | {LENGTH: 256}) == of
    assert compare(saved, spec, 1, facts).differs == ()


def test_a_checkpoint_of_another_models_details_is_refused(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "a")
    make("qwen3", tmp_path / "b")
    change(tmp_path / "b", rms_norm_eps=1e-5)
    one, other = spec_from(tmp_path / "a"), spec_from(tmp_path / "b")
    saved = facts_of(one, describe(one))
    assert compare(saved, other, 1, describe(other)).differs == (
        "model.normEpsilon: checkpoint has 1e-06, the model that spec.model names has 1e-05; name the one it began with",
    )


def test_weights_in_several_files_are_found_by_the_index(tmp_path: Path) -> None:
    of = make("llama", tmp_path)
    found = weights(of)
    (tmp_path / "model.safetensors").unlink()
    names = {key: f"model-{number % 2 + 1:05d}-of-00002.safetensors" for number, key in enumerate(found)}
    for file in set(names.values()):
        tensors.write(tmp_path / file, {key: found[key] for key in found if names[key] == file})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    (tmp_path / "consolidated.safetensors").write_text("not named by the index, not looked at")
    assert {key: slot.file.name for key, slot in find_weights(spec_from(tmp_path), of).items()} == names
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names | {"x": "../model.safetensors"}}))
    with pytest.raises(PretrainedError, match=r"names '../model.safetensors', which is no file beside it"):
        opened(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names | {"x": "gone.safetensors"}}))
    with pytest.raises(PretrainedError, match=r"gone.safetensors does not exist, and model.safetensors.index.json names it"):
        opened(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(PretrainedError, match="is no index of weights"):
        opened(tmp_path)


def test_a_tied_head_that_is_written_down_twice_is_no_stranger(tmp_path: Path) -> None:
    found = weights(make("llama", tmp_path))
    head = found["model.embed_tokens.weight"]
    write(tmp_path, found | {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    opened(tmp_path)
    write(tmp_path, found | {"lm_head.weight": head + 1})
    with pytest.raises(PretrainedError, match=r"holds lm_head.weight, for which a llama of its config.json has no place"):
        opened(tmp_path)


def without(name: str) -> Break:
    return lambda at: write(at, {key: t for key, t in weights(hf_models.architecture("qwen2")).items() if key != name})


def with_size(name: str, *size: int) -> Break:
    return lambda at: write(at, weights(hf_models.architecture("qwen2")) | {name: torch.zeros(size)})


def pickled(at: Path) -> None:
    (at / "model.safetensors").rename(at / "pytorch_model.bin")


def cut(at: Path) -> None:
    data = (at / "model.safetensors").read_bytes()
    (at / "model.safetensors").write_bytes(data[:-100])


@pytest.mark.parametrize(
    ("broken", "message", "there"),
    [
        (lambda at: (at / "config.json").unlink(), r"hf has no config.json", True),
        (lambda at: at.rename(at.parent / "away"), r"hf does not exist; mount it in head and workers", False),
        (lambda at: (at / "config.json").write_text("{"), r"config.json: not JSON", True),
        (lambda at: change(at, rms_norm_eps=0), r"rms_norm_eps is 0; it has to be a number above 0", True),
        (lambda at: change(at, hidden_act="gelu"), r"not supported yet by this version: hidden_act is 'gelu'; silu is", True),
        (lambda at: change(at, use_sliding_window=True), r"sliding windows of attention", True),
        (lambda at: change(at, quantization_config={"bits": 4}), r"its weights are quantized", True),
        (lambda at: change(at, rope_parameters={"rope_type": "yarn"}), r"rope_type is 'yarn'; default and llama3 are", True),
        (lambda at: change(at, num_attention_heads=3), r"attentionHeads 3 are not divisible by queryGroups 2", True),
        (
            without("model.layers.1.self_attn.k_proj.bias"),
            r"hf lacks model.layers.1.self_attn.k_proj.bias; a qwen2 of its",
            True,
        ),
        (with_size("model.norm.weight", 65), r"model.norm.weight has the size \(65,\); by config.json it is \(64,\)", True),
        (with_size("model.extra", 3), r"hf holds model.extra, for which a qwen2 of its config.json has no place", True),
        (pickled, r"has no \*.safetensors \(pytorch_model.bin is pickled: loading it would run its program", True),
        (lambda at: (at / "model.safetensors").unlink(), r"hf has no \*.safetensors$", True),
        (cut, r"model.safetensors: lm_head.weight of the size \(65, 64\) does not lie in the bytes", True),
    ],
)
def test_a_directory_that_a_run_cannot_begin_from_is_refused_by_name(
    broken: Break, message: str, there: bool, tmp_path: Path
) -> None:
    make("qwen2", tmp_path / "hf")
    broken(tmp_path / "hf")
    with pytest.raises(PretrainedError, match=message) as raised:
        opened(tmp_path / "hf")
    assert str(raised.value).startswith("spec.model.huggingFace.path: ")
    assert raised.value.there is there


def test_a_shape_beside_the_path_is_compared(tmp_path: Path) -> None:
    make("llama", tmp_path / "hf")
    shape = {"layers": 2, "hiddenSize": 64, "attentionHeads": 4, "queryGroups": 2, "ffnHiddenSize": 96, "vocabSize": 64}
    with pytest.raises(PretrainedError, match=r"spec.model.shape.vocabSize: 64 differs from 65 in the model's config.json"):
        describe(spec_from(tmp_path / "hf", shape=shape))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "cut off, or no safetensors"),
        (b"\xff" * 16, "cut off, or no safetensors"),
        (b"\x02" + b"\0" * 7 + b"[]", "its header is malformed"),
        (b"\x04" + b"\0" * 7 + b'{"a"', "its header is malformed"),
    ],
)
def test_files_that_are_no_safetensors_are_told(header: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(header)
    with pytest.raises(FormatError, match=message):
        read_headers(tmp_path / "x")


def test_tensors_of_other_types_are_told(tmp_path: Path) -> None:
    text = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"ab")
    with pytest.raises(FormatError, match="w has the type F8_E4M3; F32, BF16, F16 are read"):
        read_headers(tmp_path / "x")
