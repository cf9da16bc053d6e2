"""What of a spec a checkpoint depends on, and what a difference means: nothing, resharding, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.layout import layout_of, shape_of
from rljob_api.model_config import ModelFacts
from rljob_api.model_details import SEEDED, Details, RopeScaling
from rljob_api.spec import RLJobSpec, Shape
from rljob_workload.core.store.manifest import Facts

#: Paths of the model's sizes begin so.
SHAPE = "spec.model.shape."
#: Names of what only the model's config.json says begin so; for models that begin from a seed it is always the same.
DETAILS = "model."
#: Not compared, a resume may change it: who exports the model is told how long its sequences were.
LENGTH = "spec.generation.maxSequenceLength"
#: Tensors have other names or sizes.
_OTHER_MODEL = frozenset({"spec.model.dtype", "spec.model.transformer"})
#: Which rows come in which order.
_OTHER_DATA = frozenset({"spec.data", "spec.data.seed", "spec.data.shuffle"})
#: Which rank holds which part of a tensor; Megatron's distributed checkpoints are read in any layout.
_OTHER_SHARDS = frozenset(
    {"ranks", *(f"spec.parallelism.{name}" for name in ("tensor", "pipeline", "context", "expert", "expertTensor"))}
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a spec makes of a checkpoint."""

    #: Tensors are loaded in another layout than they were saved in.
    reshard: bool
    #: Why it cannot be gone on from: `path: checkpoint has X, spec says Y; what would do`.
    differs: tuple[str, ...]


def facts_of(spec: RLJobSpec, model: ModelFacts | None = None) -> dict[str, str | int | bool | None]:
    """By path of the spec, for the manifest. `model`: what the config.json of `model.huggingFace` says."""
    shape = model.shape if model is not None else shape_of(spec.model)
    layout, grpo = layout_of(spec), spec.algorithm.grpo
    facts: dict[str, str | int | bool | None] = {}
    if shape is not None:
        full = shape.model_copy(update={"query_groups": shape.query_groups or shape.attention_heads})
        facts |= {SHAPE + str(info.alias): getattr(full, name) for name, info in Shape.model_fields.items()}
    if model is not None or spec.model.hugging_face is None:
        facts |= _details(model.details if model is not None else SEEDED)
    return facts | {
        "spec.model.dtype": spec.model.dtype,
        "spec.model.transformer": spec.model.transformer,
        "ranks": layout.world,
        "spec.parallelism.tensor": layout.tensor,
        "spec.parallelism.pipeline": layout.pipeline,
        "spec.parallelism.context": layout.context,
        "spec.parallelism.expert": layout.expert,
        "spec.parallelism.expertTensor": layout.expert_tensor,
        "spec.data": _data(spec),
        "spec.data.seed": spec.data.seed,
        "spec.data.shuffle": spec.data.shuffle,
        LENGTH: spec.generation.max_sequence_length,
        "spec.algorithm.grpo.promptsPerStep": grpo.prompts_per_step,
        "spec.algorithm.grpo.generationsPerPrompt": grpo.generations_per_prompt,
    }


def _details(details: Details) -> dict[str, str | int | bool | None]:
    scaling = details.rope_scaling
    return {
        DETAILS + "headSize": details.head_size,
        DETAILS + "normEpsilon": repr(details.norm_epsilon),
        DETAILS + "rotaryBase": repr(details.rotary_base),
        DETAILS + "ropeScaling": str(scaling) if scaling is not None else None,
        DETAILS + "tied": details.tied,
        DETAILS + "qkvBias": details.qkv_bias,
        DETAILS + "queryNorm": details.query_norm,
    }


def details_in(facts: Facts) -> Details:
    """The details of the model that facts speak of; older ones say none. Raises ValueError."""
    told = {path.removeprefix(DETAILS): value for path, value in facts.items() if path.startswith(DETAILS)}
    if not told:
        return SEEDED
    try:
        size, scaling = told["headSize"], told["ropeScaling"]
        return Details(
            head_size=None if size is None else int(size),
            norm_epsilon=float(told["normEpsilon"] or 0),
            rotary_base=float(told["rotaryBase"] or 0),
            rope_scaling=None if scaling is None else RopeScaling.parse(str(scaling)),
            tied=bool(told["tied"]),
            qkv_bias=bool(told["qkvBias"]),
            query_norm=bool(told["queryNorm"]),
        )
    except KeyError as err:
        raise ValueError(f"{DETAILS}{err.args[0]} is missing") from None


def compare(saved: Facts, spec: RLJobSpec, step: int, model: ModelFacts | None = None) -> Comparison:
    """What the spec makes of a checkpoint with these facts, at this step. A fact that was not saved is not compared."""
    wanted = facts_of(spec, model)
    changed = {path: (saved[path], wanted[path]) for path in wanted if path in saved and saved[path] != wanted[path]}
    differs = [_line(path, *values) for path, values in changed.items() if path.startswith(SHAPE) or path in _OTHER_MODEL]
    differs += [
        f"{path}: checkpoint has {_shown(had)}, the model that spec.model names has {_shown(has)}; name the one it began with"
        for path, (had, has) in changed.items()
        if path.startswith(DETAILS)
    ]
    if spec.data.on_change == "Refuse":
        differs += [
            f"{_line(path, *values)}, or spec.data.onChange to Restart, which gives up the undone prompts"
            for path, values in changed.items()
            if path in _OTHER_DATA
        ]
    steps = spec.algorithm.grpo.steps
    if step > steps:
        differs.append(f"spec.algorithm.grpo.steps: checkpoint is at step {step}, spec says {steps}; set it to {step} or more")
    return Comparison(not _OTHER_SHARDS.isdisjoint(changed), tuple(differs))


def _line(path: str, saved: object, wanted: object) -> str:
    return f"{path}: checkpoint has {_shown(saved)}, spec says {_shown(wanted)}; set it back"


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _data(spec: RLJobSpec) -> str:
    """Which kind of data; files may move, and what is in them has a fingerprint of its own."""
    kinds: Mapping[str, object] = {"jsonl": spec.data.jsonl, "parquet": spec.data.parquet, "dataset": spec.data.dataset}
    return next((kind for kind, value in kinds.items() if value is not None), f"builtin {spec.data.builtin}")
