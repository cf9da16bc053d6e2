"""Weights, optimizer and random state to disk and back, through Megatron's distributed checkpoints.

Sharded by Megatron, so that a checkpoint can be read in another layout. Random states travel beside it in our own file,
as hexadecimal JSON: nothing of ours is pickled.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rljob_workload.core.weight_digest import WEIGHTS, Staged, WeightDigest
from rljob_workload.megatron.buffers import Buffers
from rljob_workload.megatron.errors import WeightsError, reason_of
from rljob_workload.megatron.policy import Policy
from rljob_workload.megatron.shim import optimizer as fixes
from rljob_workload.megatron.staging import StagedSave, live_digest, model_shards

#: float32 weights and Adam's two moments.
_BYTES_PER_PARAMETER = 12
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


class Saver:
    """One rank's saves: `stage` while the engine is down, then its file is written by a thread; one at a time."""

    def __init__(self, policy: Policy, sampler: torch.Generator | None) -> None:
        self._policy = policy
        self._sampler = sampler
        self._pending: tuple[Path, StagedSave] | None = None
        self._buffers = Buffers()
        # Megatron collects garbage at every save: 0.3 s over all that was imported, with the engine down. Modules, model and
        # engine live as long as the process, so the collector need not look at them again.
        gc.freeze()

    def stage(self, directory: Path) -> Staged:
        """Take copies and begin to write. Collective, and the last collective of this save.

        Weights that compute no numbers are refused: they would push the last good checkpoint out. Raises WeightsError.
        """
        policy = self._policy
        policy.check_usable()
        fixes.prepare_for_save(policy.optimizer)
        if self._pending is not None:
            raise WeightsError(f"the save into {self._pending[0]} has not been ended")
        self._buffers.lend()
        try:
            if dist.get_rank() == 0:
                (directory / WEIGHTS).mkdir()
            dist.barrier()
            with fixes.gathering_into(self._buffers):
                state = _state(policy, loading=False)
            save = StagedSave(policy, state, directory / WEIGHTS, self._buffers)
            _save_random_state(policy, self._sampler, directory)
        except BaseException as err:  # CheckpointException is no Exception
            self._buffers.give_back()
            if isinstance(err, Exception | CheckpointException) and not isinstance(err, WeightsError):
                raise self._not_written(directory, err) from err
            raise
        self._pending = directory, save
        save.start()
        return save.staged

    def written(self) -> bytes:
        """Wait for this rank's file. Returns the writer's report, which `finish` wants of every rank."""
        directory, save = self._staged()
        try:
            return save.written()
        except BaseException as err:
            self._pending = None
            raise self._not_written(directory, err) from err

    def finish(self, reports: Sequence[bytes]) -> None:
        """Every rank's file is written: rank 0 writes the index. Not collective."""
        directory, save = self._staged()
        self._pending = None
        if dist.get_rank() == 0:
            try:
                save.finish(reports)
            except (Exception, CheckpointException) as err:
                raise self._not_written(directory, err) from err

    def _staged(self) -> tuple[Path, StagedSave]:
        if self._pending is None:
            raise WeightsError("no save is under way")
        return self._pending

    def _not_written(self, directory: Path, err: BaseException) -> WeightsError:
        return WeightsError(f"cannot write the weights to {directory}: {_why_not_written(self._policy, directory, err)}")


def save(policy: Policy, sampler: torch.Generator | None, directory: Path) -> Staged:
    """A whole save in one call, for one rank (tests, benches): staged, written, indexed."""
    saver = Saver(policy, sampler)
    staged = saver.stage(directory)
    saver.finish([saver.written()])
    return staged


def verify(directory: Path, digests: Mapping[str, str], part: int, parts: int) -> None:
    """Compare this rank's share of the files (by path below `directory`) with their SHA-256. Raises WeightsError."""
    for path in sorted(digests)[part::parts]:
        try:
            with (directory / path).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as err:
            raise WeightsError(f"cannot load {directory / path}: {err.strerror or err}") from err
        if found != digests[path]:
            raise WeightsError(
                f"cannot load {directory / path}: it has SHA-256 {found[:12]}..., the manifest says {digests[path][:12]}..."
            )


def load(policy: Policy, sampler: torch.Generator | None, directory: Path) -> WeightDigest:
    """Read this rank's part. Collective. Returns the digest of the parameters that this rank speaks for, as they are now."""
    from megatron.core import dist_checkpointing

    fixes.prepare_for_load(policy.optimizer)
    try:
        state = dist_checkpointing.load(_state(policy, loading=True), str(directory / WEIGHTS))
        policy.model.load_state_dict(state["model"])
        policy.optimizer.load_state_dict(_in_this_layout(policy, state["optimizer"]))
    except (Exception, CheckpointException) as err:
        raise WeightsError(f"cannot load the weights in {directory}: {reason_of(err)}") from err
    _check_rates(policy)
    fixes.unshare_steps(policy.optimizer)
    _load_random_state(policy, sampler, directory)
    return live_digest(policy, list(model_shards(policy.model.sharded_state_dict(metadata=dict(_METADATA)))))


def _why_not_written(policy: Policy, directory: Path, err: BaseException) -> str:
    """The cause; Megatron's writer hides a full volume behind a nameless RuntimeError, so the volume is asked."""
    reason = reason_of(err)
    needed = _BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in policy.parameters().values())
    free = shutil.disk_usage(directory).free
    if free >= needed or "No space left" in reason:
        return reason
    return f"No space left on device ({free:,} bytes are free, a checkpoint takes about {needed:,}): {reason}"


def _in_this_layout(policy: Policy, loaded: dict[Any, Any]) -> Any:
    """The loaded optimizer state with the parameter groups of this layout and spec; from the checkpoint: the step count.

    Megatron pairs groups by their rates, which the spec may have changed, and makes an optimizer of their own for experts that
    are shared out, so that another layout has another number of optimizers.
    """
    steps = {group["step"] for group in _saved_groups(loaded)}
    if len(steps) != 1:
        raise ValueError(f"the saved optimizers are at the steps {sorted(steps)}")
    current = policy.optimizer.state_dict()
    parts = [(loaded, current)] if isinstance(current, dict) else [(loaded[i], part) for i, part in enumerate(current)]
    for part, now in parts:
        for group in now["optimizer"]["param_groups"]:
            group["step"] = next(iter(steps))
        part.update(now, param_state_sharding_type=_METADATA["distrib_optim_sharding_type"])
    return loaded if isinstance(current, dict) else {index: loaded[index] for index in range(len(current))}


def _saved_groups(saved: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameter groups of a loaded optimizer state; several optimizers are numbered."""
    if "optimizer" in saved:
        yield from saved["optimizer"]["param_groups"]
        return
    for part in saved.values():
        if isinstance(part, dict):
            yield from _saved_groups(part)


def _check_rates(policy: Policy) -> None:
    used, wanted = {group["lr"] for group in policy.optimizer.param_groups}, policy.settings.learning_rate
    if used != {wanted}:
        raise WeightsError(f"the loaded optimizer uses the learning rates {sorted(used)}, the spec says {wanted}")


def _state(policy: Policy, *, loading: bool) -> dict[str, Any]:
    model = policy.model.sharded_state_dict(metadata=dict(_METADATA))
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(_METADATA)),
    }


def _random_file(policy: Policy, directory: Path) -> Path:
    return directory / f"random-{dist.get_rank():05d}.json"


def _save_random_state(policy: Policy, sampler: torch.Generator | None, directory: Path) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {name: _to_hex(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    data = {
        "layout": asdict(policy.settings.layout),
        "torch": _to_hex(torch.get_rng_state()),
        "tracker": states,
        "sampler": _to_hex(sampler.get_state()) if sampler is not None else None,
    }
    _random_file(policy, directory).write_text(json.dumps(data))


def _load_random_state(policy: Policy, sampler: torch.Generator | None, directory: Path) -> None:
    """Random states belong to a rank of a layout: in another one the fresh seeds stay.

    The ranks of one copy of the model sample with equal generators; those of other copies have others, and in a layout that
    gives a rank another copy they would drift apart, each going on with tokens that the others never saw.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    path = _random_file(policy, directory)
    if not path.exists():
        return
    data = json.loads(path.read_text())
    if data.get("layout") != asdict(policy.settings.layout):
        return
    torch.set_rng_state(_from_hex(data["torch"]))
    get_cuda_rng_tracker().set_states({name: _from_hex(text) for name, text in data["tracker"].items()})
    if sampler is not None and data["sampler"] is not None:
        sampler.set_state(_from_hex(data["sampler"]))


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy().tobytes()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
