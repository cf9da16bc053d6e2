"""Saving in two parts: copies are taken while the engine is down, files are written while it generates again.

`stage` is collective (Megatron plans which rank writes what) and ends with copies of everything that will be written, compared
with the live parameters. From there on no rank waits for another one: a thread of each writes its file, the driver carries
what the writers report to rank 0, and rank 0 writes the index. Megatron's own asynchronous save would gather that report in
a collective later, under the feet of a running engine, and it does not copy CPU tensors at all.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rljob_workload.core.weight_digest import Staged, WeightDigest
from rljob_workload.megatron.buffers import Buffers
from rljob_workload.megatron.digest import digest_of
from rljob_workload.megatron.errors import WeightsError
from rljob_workload.megatron.policy import Policy


class StagedSave:
    """One save of one rank, from its copies to its file."""

    def __init__(self, policy: Policy, state: dict[str, Any], target: Path, buffers: Buffers) -> None:
        """Copy and plan. Collective. Raises WeightsError when the copies are not the live parameters.

        `buffers`: lent to this save, which gives them back when its file is written.
        """
        from megatron.core import dist_checkpointing

        use_thread_queue()
        model = list(model_shards(state["model"]))
        names = {shard.key for shard in model}
        self._buffers = buffers
        strategy = _planning_strategy(buffers)
        dist_checkpointing.save(state, str(target), sharded_strategy=strategy, async_sharded_save=True, async_strategy="mcore")
        self._target = target
        self._strategy = strategy
        self._writer = strategy.writer
        self._metadata = strategy.metadata
        self.staged = _checked(self._writer.write_buckets, model, names, policy, buffers)
        self._results: bytes | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint writer", daemon=True)

    def start(self) -> None:
        """Write in the background. What a write needs is in memory that nobody else uses."""
        self._thread.start()

    def written(self) -> bytes:
        """Wait for the writer. Returns its report for `finish`; raises what it met."""
        if self._thread.is_alive() or self._thread.ident is not None:
            self._thread.join()
        else:
            self._write()
        if self._failure is not None:
            raise self._failure
        assert self._results is not None
        return self._results

    def finish(self, reports: Sequence[bytes]) -> None:
        """Write the index of all ranks' files. Rank 0 only."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        # Our own processes' objects, from memory to memory: nothing of it comes from a file.
        self._writer.finish(self._metadata, [pickle.loads(report) for report in reports])  # noqa: S301
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self._target))

    def _write(self) -> None:
        """Each file by Megatron's own function, one after the other; called directly, it names the error that it met."""
        try:
            found: list[Any] = []
            for number, bucket in enumerate(self._writer.write_buckets):
                _, results = self._writer.write_preloaded_data([self._writer.transforms], number, bucket, None, None, True)
                if isinstance(results, BaseException):
                    raise results
                found += results
            self._results = pickle.dumps(found)
        except BaseException as err:  # noqa: BLE001 - raised again by whoever waits for the writer
            self._failure = err
        finally:
            self._writer.write_buckets = []
            self._buffers.give_back()


def model_shards(state: Any) -> Iterator[Any]:
    """The parts of a sharded model state that this rank may have to write: Megatron's ShardedTensors and factories."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(state, dict):
        for part in state.values():
            yield from model_shards(part)
    elif isinstance(state, list | tuple):
        for part in state:
            yield from model_shards(part)
    elif isinstance(state, ShardedTensor | ShardedTensorFactory):
        yield state


def live_digest(policy: Policy, shards: Sequence[Any]) -> WeightDigest:
    """Digest of the live parameters that this rank speaks for. Raises WeightsError for a shard that is not one of them."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    live = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters().values()}
    mine = [shard for shard in shards if is_main_replica(shard.replica_id)]
    for shard in mine:
        if shard.data.untyped_storage().data_ptr() not in live:
            raise WeightsError(f"{shard.key}: what would be saved is not the parameter that is trained")
    return digest_of(shard.data for shard in mine)


def copied(shard: Any, buffers: Buffers) -> Any:
    """A ShardedTensor over a copy in this memory; others, and replicas that another rank writes, as they are.

    Each copy has a storage of its own, since Megatron copies views once more. On a CPU it would write the very tensors that the
    next step changes. What the optimizer gathered lies in this memory already. Raises WeightsError for what has no data here.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    if not isinstance(shard, ShardedTensor) or not is_main_replica(shard.replica_id):
        return shard
    data = shard.data.detach()
    if data.is_meta:
        raise WeightsError(f"{shard.key}: this rank would have to write what another one has gathered")
    if buffers.owns(data) and data.is_contiguous():
        return replace(shard, data=torch.from_numpy(data.numpy()))
    return replace(shard, data=buffers.take((shard.key, shard.global_offset), data.shape, data.dtype).copy_(data))


def _checked(buckets: Sequence[Any], model: Sequence[Any], names: set[str], policy: Policy, buffers: Buffers) -> Staged:
    tensors = [(item.index.fqn, tensor) for _, _, (_, data) in buckets for item, tensor in data]
    for name, tensor in tensors:
        if not buffers.owns(tensor):
            raise WeightsError(f"{name}: what would be written is not the copy; the next step may change it")
    staged = digest_of(tensor for name, tensor in tensors if name in names)
    live = live_digest(policy, model)
    if staged != live:
        raise WeightsError(
            f"the copies taken for the checkpoint of step {policy.version} are not the live parameters (digest {staged}, "
            f"live {live}): these are stale tensors, and nothing is saved"
        )
    return Staged(staged, sum(tensor.numel() * tensor.element_size() for _, tensor in tensors))


def _planning_strategy(buffers: Buffers) -> Any:
    """Megatron's strategy over copies, which keeps what it planned instead of closing over it."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class Planning(TorchDistSaveShardedStrategy):  # type: ignore[misc]
        writer: Any = None
        metadata: Any = None

        def async_save(self, state: Any, target: Path, async_strategy: str) -> Any:
            copies = dict_list_map_outplace(lambda shard: copied(shard, buffers), state)
            return super().async_save(copies, target, async_strategy)

        def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> Any:
            self.writer, self.metadata = writer, planned[1]
            return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)

    return Planning()


def use_thread_queue() -> None:
    """A queue inside the process is enough for a thread.

    Megatron would start a multiprocessing manager for it at the first save: 3 seconds, and a process that outlives a
    killed rank.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
