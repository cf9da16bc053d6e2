"""A Hugging Face model directory to begin from: what it must hold, checked by its headers. Without torch.

Weights are read from safetensors only. Pickled ones are programs that run when they are loaded, so they are never opened.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

from rljob_api.findings import errors
from rljob_api.model_config import MAX_BYTES, ModelFacts, check_model, read_config
from rljob_api.model_details import ModelConfigError
from rljob_api.spec import RLJobSpec
from rljob_workload.huggingface.architecture import Architecture, family_of
from rljob_workload.huggingface.headers import BYTES, FormatError, Slot, read_headers
from rljob_workload.huggingface.names import Entry, table

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
#: Computed from config.json; old files hold them all the same.
_NOT_WEIGHTS = ".rotary_emb.inv_freq"


class PretrainedError(Exception):
    """A directory that a run cannot begin from; says what is missing or wrong, and what would do.

    `there` is False where nothing is at the path: it may be mounted yet.
    """

    def __init__(self, message: str, *, there: bool = True) -> None:
        super().__init__(f"spec.model.huggingFace.path: {message}")
        self.there = there


def describe(spec: RLJobSpec) -> ModelFacts:
    """What config.json says, checked against the spec. Raises PretrainedError."""
    directory = _directory(spec)
    path = directory / CONFIG
    try:
        with path.open("rb") as file:
            facts = read_config(file.read(MAX_BYTES).decode())
    except FileNotFoundError:
        what = f"has no {CONFIG}" if directory.is_dir() else "does not exist; mount it in head and workers (trainer.template)"
        raise PretrainedError(f"{directory} {what}", there=directory.is_dir()) from None
    except OSError as err:
        raise PretrainedError(f"cannot read {path}: {err.strerror or err}", there=False) from err
    except (ModelConfigError, UnicodeDecodeError) as err:
        raise PretrainedError(f"{path}: {err}") from err
    if wrong := errors(check_model(spec, facts)):
        raise PretrainedError("; ".join(f"{finding.path}: {finding.message}" for finding in wrong))
    return facts


def architecture_of(facts: ModelFacts) -> Architecture:
    """The architecture of a model that `describe` accepts."""
    shape, details = facts.shape, facts.details
    return Architecture(family_of(shape, details), shape, facts.max_length or 1, details)


def find_weights(spec: RLJobSpec, of: Architecture) -> dict[str, Slot]:
    """Where each tensor of the architecture is: every one is there, of the right size, and no other. Raises PretrainedError."""
    directory = _directory(spec)
    found: dict[str, Slot] = {}
    for file in _files(directory):
        try:
            slots = read_headers(file)
        except FileNotFoundError:
            raise PretrainedError(f"{file} does not exist, and {INDEX} names it") from None
        except OSError as err:
            raise PretrainedError(f"cannot read {file}: {err.strerror or err}", there=False) from err
        except FormatError as err:
            raise PretrainedError(f"{file}: {err}") from err
        if twice := found.keys() & slots.keys():
            raise PretrainedError(f"{file} and {found[min(twice)].file.name} both hold {min(twice)}")
        found |= slots
    wanted = {part: size for entry in table(of) for part, size in zip(entry.parts, part_sizes(of, entry), strict=True)}
    _compare(directory, wanted, {name: slot for name, slot in found.items() if not name.endswith(_NOT_WEIGHTS)}, of)
    return {name: found[name] for name in wanted}


def part_sizes(of: Architecture, entry: Entry) -> Iterable[tuple[int, ...]]:
    """The size of each tensor that an entry becomes."""
    match entry.how.value:
        case "qkv":
            rows = (of.shape.attention_heads, of.groups, of.groups)
            return [(heads * of.head_size, *entry.size[1:]) for heads in rows]
        case "gated":
            return [(entry.size[0] // 2, *entry.size[1:])] * 2
        case "experts":
            return [entry.size[1:]] * entry.size[0]
        case "gated experts":
            return [(entry.size[1] // 2, *entry.size[2:])] * (2 * entry.size[0])
        case _:
            return [entry.size]


def _directory(spec: RLJobSpec) -> Path:
    if spec.model.hugging_face is None:
        raise ValueError("the spec has no model.huggingFace")
    return Path(spec.model.hugging_face.path)


def _files(directory: Path) -> list[Path]:
    """The weights files. Raises PretrainedError."""
    index = directory / INDEX
    if not index.exists():
        if files := sorted(directory.glob("*.safetensors")):
            return files
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        also = f" ({pickled[0]} is pickled: loading it would run its program; convert it to safetensors)" if pickled else ""
        raise PretrainedError(f"{directory} has no *.safetensors{also}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise PretrainedError(f"{index} is no index of weights: {type(err).__name__}: {err}") from err
    if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise PretrainedError(f"{index} names {bad[0]!r}, which is no file beside it")
    return [directory / name for name in names]


def _compare(directory: Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Slot], of: Architecture) -> None:
    if missing := [name for name in wanted if name not in found]:
        raise PretrainedError(f"{directory} lacks {_some(missing)}; a {of.family} of its {CONFIG} has them")
    for name, size in wanted.items():
        if found[name].shape != size:
            raise PretrainedError(f"{found[name].file}: {name} has the size {found[name].shape}; by {CONFIG} it is {size}")
    extra = sorted(found.keys() - wanted.keys())
    if extra == ["lm_head.weight"] and _same(found["lm_head.weight"], found["model.embed_tokens.weight"]):
        return  # tied, and written down twice
    if extra:
        raise PretrainedError(f"{directory} holds {_some(extra)}, for which a {of.family} of its {CONFIG} has no place")


def _same(one: Slot, other: Slot) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and _bytes(one) == _bytes(other)


def _bytes(slot: Slot) -> memoryview:
    with slot.file.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return memoryview(mapped)[slot.begin : slot.begin + slot.count * BYTES[slot.dtype]]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
