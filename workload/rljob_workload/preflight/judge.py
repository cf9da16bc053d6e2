"""What an attempt begins with. One function, `preflight`; its report is the attempt's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_api.findings import errors
from rljob_api.model_config import MAX_BYTES as MAX_CONFIG_BYTES
from rljob_api.model_config import ModelFacts, check_model, read_config
from rljob_api.model_details import ModelConfigError
from rljob_api.preflight import Chosen, Outcome, PassedOver, PreflightReport
from rljob_api.spec import CheckpointSource, RLJobSpec
from rljob_workload.core.checkpoint import (
    Checkpoint,
    CheckpointError,
    Choice,
    InvalidCheckpointError,
    Owner,
    RunDirectory,
    open_checkpoint,
)
from rljob_workload.core.ledger import LedgerError
from rljob_workload.core.ledger_file import ledger_from_json
from rljob_workload.core.store.facts import compare
from rljob_workload.core.store.filesystem import components
from rljob_workload.core.store.lineage import Name
from rljob_workload.core.store.verify import verified_level
from rljob_workload.huggingface.pretrained import PretrainedError, architecture_of, find_weights
from rljob_workload.preflight.report import fitted

#: How often a checkpoint may turn out to be gone between being chosen and the token being taken.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Order:
    """Whose attempt it is, and where to look."""

    spec: RLJobSpec
    name: str
    namespace: str
    uid: str
    attempt: int
    #: The run's directory.
    directory: Path
    #: What the paths in the report are below: the root of the claim, or the run's directory itself under `rljob local`.
    volume: Path
    #: The root of the claim of `checkpoint.from`; None: that is not mounted.
    source_volume: Path | None = None
    #: Checkpoints that earlier attempts could not load.
    unloadable: frozenset[str] = frozenset()
    #: RFC 3339; for people.
    now: str = ""

    @property
    def owner(self) -> Owner:
        """The attempt as the fence names it."""
        return Owner(namespace=self.namespace, name=self.name, uid=self.uid, attempt=self.attempt)


class _RefusedError(Exception):
    """The attempt must not start."""

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        passed_over: Sequence[PassedOver] = (),
        differs: Sequence[str] = (),
        checkpoint: Chosen | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome
        self.passed_over = passed_over
        self.differs = differs
        self.checkpoint = checkpoint


@dataclass(frozen=True, slots=True)
class _Found:
    """What the attempt goes on from; `checkpoint` None: from scratch."""

    checkpoint: Checkpoint | None
    #: Its name in this directory; None for another run's.
    name: str | None = None
    #: Another run's, below its volume.
    source: str | None = None
    passed_over: list[PassedOver] = field(default_factory=list)


def preflight(order: Order) -> PreflightReport:
    """Look, choose, compare, take the token. Never raises for what is on the volume: the report says it.

    No token is taken unless the attempt may start.
    """
    try:
        return _admitted(order)
    except _RefusedError as no:
        report = PreflightReport(outcome=no.outcome, checkpoint=no.checkpoint)
        return fitted(report, message=str(no), passed_over=no.passed_over, differs=no.differs)
    except CheckpointError as err:
        return fitted(PreflightReport(outcome="Unusable"), message=f"{order.directory}: {err}")


def checkpoint_path(chosen: Chosen, order: Order) -> Path:
    """Where the chosen checkpoint is mounted. Raises CheckpointError when the claim of `checkpoint.from` is not."""
    origin = order.spec.checkpoint.from_
    root = _source_root(order, origin) if chosen.source and origin is not None else order.volume
    return root / chosen.path


def _admitted(order: Order) -> PreflightReport:
    run = RunDirectory(order.directory)
    run.create()
    model = _model(order.spec)
    for _ in range(_TRIES):
        found = _find(order, run)
        reshard = _compared(order, found, model)
        _check_weights(order, found, model)
        entry = run.take_token(order.owner, found.name, found.source, order.now)
        if found.name is None or run.still_there(found.name):
            return fitted(_accepted(order, found, entry.token, reshard=reshard), passed_over=found.passed_over)
    raise _RefusedError(
        "Unusable", f"{order.directory}: the checkpoints change while they are looked at; is another run writing?"
    )


# ---- choosing --------------------------------------------------------------------------------


def _find(order: Order, run: RunDirectory) -> _Found:
    choice = run.choose(order.spec.checkpoint.verify, order.unloadable, _books_of, order.owner)
    passed_over = [PassedOver(name=one.name, why=one.why[:512]) for one in choice.passed_over]
    _check_owner(order, choice)
    if choice.name is not None:
        return _Found(run.load(choice.name, buffer=False), choice.name, None, passed_over)
    newest = choice.fence.newest
    # A run that went on from a checkpoint which is gone has not begun afresh, as long as others are there.
    broken = [one for one in choice.passed_over if one.on_lineage or (newest is not None and newest.resumed_from)]
    if broken:
        raise _RefusedError(
            "Corrupt",
            f"none of the {len(broken)} checkpoints in {order.directory} is valid, and starting over would lose their steps. "
            "Repair one, or move them away to start from scratch",
            passed_over,
        )
    origin = order.spec.checkpoint.from_
    if origin is None:
        return _Found(None, passed_over=passed_over)
    checkpoint, path = _source(order, origin)
    return _Found(checkpoint, None, path, passed_over)


def _check_owner(order: Order, choice: Choice) -> None:
    """Whose directory it is. Raises Foreign or OnExisting."""
    last: Owner | None = choice.fence.newest
    if last is None and choice.manifest is not None:
        last = choice.manifest.writer
    if last is not None and last.name and (last.namespace, last.name) != (order.namespace, order.name):
        raise _RefusedError(
            "Foreign",
            f"{order.directory} belongs to the job {last.namespace}/{last.name}, not to {order.namespace}/{order.name}; use "
            "another spec.checkpoint.volume.subPath, or spec.checkpoint.from to begin with one of its checkpoints",
        )
    there = choice.name is not None or bool(choice.passed_over)
    if order.spec.checkpoint.on_existing == "Refuse" and there and (last is None or last.uid != order.uid):
        newest = choice.name or choice.passed_over[0].name
        whose = f"uid {last.uid}" if last is not None and last.uid else "an earlier job"
        raise _RefusedError(
            "OnExisting",
            f"{order.directory} has checkpoints of {whose} of this name (newest: {newest}) and spec.checkpoint.onExisting is "
            "Refuse; set it to Resume to go on from them, or move them away",
        )


def _source(order: Order, origin: CheckpointSource) -> tuple[Checkpoint, str]:
    """The checkpoint of `checkpoint.from` and its path below its volume. A run's directory stands for its newest one."""
    root, where = _source_root(order, origin), f"spec.checkpoint.from.path {origin.path}"
    path = origin.path.strip("/")
    try:
        named = Name.parse(components(path)[-1]) is not None
        _inside(root, path)
    except (OSError, IndexError) as err:
        raise _RefusedError("Unusable", f"{where}: {err}") from err
    try:
        if not named:
            choice = RunDirectory(root / path).choose(order.spec.checkpoint.verify, check=_books_of)
            if choice.name is None:
                why = "; ".join(f"{one.name}: {one.why}" for one in choice.passed_over) or "no checkpoint is in it"
                raise _RefusedError("Corrupt", f"{where}: {why}; name another run, or leave spec.checkpoint.from out")
            path = f"{path}/{choice.name}"
        checkpoint = open_checkpoint(root / path, order.spec.checkpoint.verify, buffer=False)
        _books_of(checkpoint)
        return checkpoint, path
    except CheckpointError as err:
        raise _RefusedError("Corrupt", f"{where}: {err}; name another checkpoint, or leave spec.checkpoint.from out") from err


def _source_root(order: Order, origin: CheckpointSource) -> Path:
    if order.source_volume is not None:
        return order.source_volume
    if origin.claim_name == order.spec.checkpoint.volume.claim_name:
        return order.volume
    raise CheckpointError(f"the claim {origin.claim_name!r} of spec.checkpoint.from is not mounted here")


def _inside(root: Path, path: str) -> None:
    """Raises OSError where there is no such directory, or links on the way lead out of the volume."""
    try:
        real = (root / path).resolve(strict=True)
    except OSError as err:
        raise OSError(
            f"{err.strerror or err} (looked for at {err.filename}); `rljob checkpoints DIR` lists what is there"
        ) from err
    if not real.is_dir():
        raise OSError(f"{real} is not a directory; name a checkpoint or a run's directory")
    if not real.is_relative_to(root.resolve()):
        raise OSError(f"it leads out of the volume, to {real}")


# ---- comparing -------------------------------------------------------------------------------


def _model(spec: RLJobSpec) -> ModelFacts | None:
    """What the model's config.json says, if that is mounted here. Raises Incompatible where it contradicts the spec."""
    if spec.model.hugging_face is None:
        return None
    path = Path(spec.model.hugging_face.path) / "config.json"
    try:
        with path.open("rb") as file:
            facts = read_config(file.read(MAX_CONFIG_BYTES).decode())
    except OSError:
        return None  # the ranks look at it, where it is mounted
    except (ModelConfigError, UnicodeDecodeError) as err:
        raise _RefusedError("Incompatible", f"{path}: {err}") from err
    if wrong := errors(check_model(spec, facts)):
        lines = [f"{finding.path}: {finding.message}" for finding in wrong]
        raise _RefusedError("Incompatible", f"the model in {path.parent} does not fit the spec", differs=lines)
    return facts


def _check_weights(order: Order, found: _Found, model: ModelFacts | None) -> None:
    """A run from scratch finds its pretrained weights, where they are mounted here: names and sizes. Raises Incompatible."""
    if model is None or found.checkpoint is not None:
        return
    try:
        find_weights(order.spec, architecture_of(model))
    except PretrainedError as err:
        if err.there:
            raise _RefusedError("Incompatible", str(err)) from err


def _compared(order: Order, found: _Found, model: ModelFacts | None) -> bool:
    """Whether it is loaded in another layout. Raises Incompatible."""
    if found.checkpoint is None or found.checkpoint.manifest is None:
        return False
    result = compare(found.checkpoint.manifest.facts, order.spec, found.checkpoint.step, model)
    if result.differs:
        chosen = _chosen(order, found, found.checkpoint, reshard=result.reshard)
        message = f"{found.name or found.source} does not fit the spec"
        raise _RefusedError("Incompatible", message, found.passed_over, result.differs, chosen)
    return result.reshard


# ---- reporting -------------------------------------------------------------------------------


def _books_of(checkpoint: Checkpoint) -> tuple[bool, int, int]:
    """Whether a checkpoint has a ledger, the prompts it had handed out, and those at risk. Raises InvalidCheckpointError."""
    collector: Any = checkpoint.state.get("collector")
    if not isinstance(collector, dict) or "ledger" not in collector:
        return False, 0, 0
    try:
        ledger = ledger_from_json(collector["ledger"])
    except LedgerError as err:
        raise InvalidCheckpointError(checkpoint.name, "collector.json", str(err)) from err
    return True, ledger.next_ordinal, ledger.at_risk


def _accepted(order: Order, found: _Found, token: int, *, reshard: bool) -> PreflightReport:
    checkpoint = found.checkpoint
    if checkpoint is None or checkpoint.manifest is None:
        return PreflightReport(
            outcome="Fresh", token=token, message=f"no checkpoint in {order.directory}: starting from step 0"
        )
    chosen = _chosen(order, found, checkpoint, reshard=reshard)
    how = ", resharded for another layout" if reshard else ""
    return PreflightReport(outcome="Resume", token=token, checkpoint=chosen, message=f"going on from {chosen.path}{how}")


def _chosen(order: Order, found: _Found, checkpoint: Checkpoint, *, reshard: bool) -> Chosen:
    kept, handed_out, at_risk = _books_of(checkpoint)
    manifest, level = checkpoint.manifest, order.spec.checkpoint.verify
    return Chosen(
        path=found.source or str((order.directory / checkpoint.name).relative_to(order.volume)),
        step=checkpoint.step,
        token=checkpoint.token,
        verified="Sizes" if manifest is None else verified_level(manifest, level),
        ledger=kept,
        handed_out=handed_out,
        at_risk=at_risk if kept else _at_risk(order.spec, checkpoint.step),
        source=found.source is not None,
        reshard=reshard,
    )


def _at_risk(spec: RLJobSpec, step: int) -> int:
    """Upper bound of what a run without a ledger may have lost: what it could have had under way."""
    grpo = spec.algorithm.grpo
    return grpo.prompts_per_step * min(step, grpo.max_trajectory_age_steps + 1)
