"""One rank: a Ray actor process that owns a policy and its resident engine.

All work methods run one after the other in the actor's default concurrency group, so a rank is either generating or training,
never both. `status` is called in the `control` group and answers while work is going on. torch and Megatron are imported
in `setup`, in this process only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import Answer, DecodeSlice, Request, TrainBatch, TrainStats
from rljob_workload.core.weight_digest import Staged, WeightDigest
from rljob_workload.data.builtin import load_builtin
from rljob_workload.runtime.concurrency import control
from rljob_workload.runtime.logs import log_to_file

if TYPE_CHECKING:
    from rljob_workload.megatron.engine import ResidentEngine
    from rljob_workload.megatron.policy import Policy
    from rljob_workload.megatron.weights import Saver

log = logging.getLogger("rljob.rank")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands."""

    rank: int
    world: int
    local_rank: int
    attempt: int
    directory: str


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank reports of a training step."""

    stats: TrainStats
    handover_seconds: float
    train_seconds: float


class Rank:
    """The actor's class; `launch.py` wraps it."""

    def __init__(self, place: RankPlace, spec: dict[str, Any]) -> None:
        self._place = place
        self._spec = RLJobSpec.model_validate(spec)
        self._phase = "Starting"
        self._policy: Policy | None = None
        self._engine: ResidentEngine | None = None
        self._saver: Saver | None = None
        self._remaining: Counter[tuple[int, int]] = Counter()
        self._stash: list[Answer] = []
        os.environ["LOCAL_RANK"] = str(place.local_rank)
        directory = Path(place.directory)
        log_to_file(directory / "logs" / f"rank-{place.rank:05d}-attempt-{place.attempt:06d}.log")
        self._record = directory / "trained" / f"rank-{place.rank:05d}.jsonl"

    def address(self) -> str:
        """A free address on this rank's node, where the ranks meet (asked of rank 0)."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def setup(self, address: str) -> dict[str, float]:
        """Join the other ranks, build the policy and, once for the whole run, the engine."""
        self._phase = "Loading"
        began = time.monotonic()
        from rljob_workload.megatron.engine import ResidentEngine
        from rljob_workload.megatron.policy import Policy, init_process_groups, quiet_megatron
        from rljob_workload.megatron.settings import engine_settings, model_settings

        quiet_megatron()
        settings = model_settings(self._spec)
        timeout = float(self._spec.deadlines.first_step_seconds)
        place = self._place
        init_process_groups(settings, rank=place.rank, world=place.world, address=address, timeout=timeout)
        imported = time.monotonic()
        task = load_builtin(str(self._spec.data.builtin))
        self._policy = Policy(settings)
        self._engine = ResidentEngine(self._policy, engine_settings(self._spec, task), task.tokenizer)
        built = time.monotonic()
        log.info("rank %d of %d is ready: imports %.1f s, model and engine %.2f s", place.rank, place.world,
                 imported - began, built - imported)  # fmt: skip
        self._phase = "Decode"
        return {"import_seconds": imported - began, "build_seconds": built - imported}

    # ---- generation -------------------------------------------------------------------------

    def decode(self, requests: Sequence[Request], want: int, iterations: int) -> DecodeSlice:
        """Take in new prompts and generate until `want` groups are complete, or for so many engine iterations.

        All ranks of a replica run this in lockstep, which is why it is bounded by iterations and not by a clock.
        """
        engine = self._ready_engine()
        for request in engine.submit(requests):
            self._remaining[request.tag] = request.answers
        answers, self._stash = self._stash, []
        complete = self._count_complete(answers)
        while True:
            done, left = engine.agree(complete, engine.in_flight)
            if done >= want or iterations <= 0 or not left:
                break
            fresh = engine.step()
            complete += self._count_complete(fresh)
            answers.extend(fresh)
            iterations -= 1
        return DecodeSlice(tuple(answers) if self._speaks() else (), left)

    def _count_complete(self, answers: Sequence[Answer]) -> int:
        complete = 0
        for answer in answers:
            self._remaining[answer.tag] -= 1
            if not self._remaining[answer.tag]:
                del self._remaining[answer.tag]
                complete += 1
        return complete

    def validate(self, prompts: Sequence[Request]) -> list[Answer]:
        """Greedy answers through the same engine. Training answers that finish meanwhile go out with the next decode."""
        self._phase = "Validate"
        validated, training = self._ready_engine().validate(prompts)
        self._stash.extend(training)
        self._phase = "Decode"
        return validated if self._speaks() else []

    # ---- training ---------------------------------------------------------------------------

    def train(self, batch: TrainBatch, wake: bool) -> RankStep:
        """Suspend the engine, take one optimizer step, and wake the engine unless a save follows."""
        policy, engine = self._ready_policy(), self._ready_engine()
        began = time.monotonic()
        self._phase = "Train"
        engine.suspend()
        policy.enter_train()
        suspended = time.monotonic()
        rows = batch.shard(policy.data_rank, policy.data_size)
        stats = policy.train_step(rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
        self._record_step(batch)
        trained = time.monotonic()
        if wake:
            self.wake()
        woken = time.monotonic()
        return RankStep(stats, (suspended - began) + (woken - trained), trained - suspended)

    def sleep(self) -> None:
        """Suspend the engine without training (a save outside the usual place follows)."""
        self._ready_engine().suspend()

    def wake(self) -> None:
        """Go back to generating, with the new weights."""
        policy = self._ready_policy()
        policy.enter_generate()
        self._ready_engine().resume(policy.version)
        self._phase = "Decode"

    def _record_step(self, batch: TrainBatch) -> None:
        """An independent record of what was trained, for auditors: not read by the trainer."""
        line = {"attempt": self._place.attempt, "step": batch.step, "ordinals": batch.ordinals}
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            with self._record.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as err:  # a refused write does not say which file it was
            raise OSError(err.errno, err.strerror, str(self._record)) from err

    # ---- checkpoints ------------------------------------------------------------------------

    def save(self, directory: str) -> Staged:
        """Take copies of this rank's part of a checkpoint and begin to write them; called between `train` and `wake`.

        What is said of a save from here on needs no other rank: `written`, then `finish_save`.
        """
        self._phase = "Save"
        return self._ready_saver().stage(Path(directory))

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator,unused-ignore]
    def written(self) -> bytes:
        """Wait for this rank's file, beside whatever else the rank does. Returns the writer's report."""
        return self._ready_saver().written()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator,unused-ignore]
    def finish_save(self, reports: Sequence[bytes]) -> None:
        """All ranks have written: rank 0 writes the index of their files."""
        self._ready_saver().finish(reports)

    def load(self, directory: str, version: int, digests: Mapping[str, str]) -> WeightDigest:
        """Take over a checkpoint's weights, optimizer and random state. `digests`: of files that are to be compared first.

        Returns the digest of the parameters that this rank speaks for.
        """
        from rljob_workload.megatron import weights

        self._phase = "Loading"
        policy, engine = self._ready_policy(), self._ready_engine()
        engine.suspend()
        weights.verify(Path(directory), digests, self._place.rank, self._place.world)
        loaded = weights.load(policy, engine.sampler, Path(directory))
        policy.version = version
        self.wake()
        return loaded

    # ---- reading ----------------------------------------------------------------------------

    @control
    def status(self) -> dict[str, Any]:
        """Where this rank is; answers while work is going on."""
        from rljob_workload.megatron.engine import engines_built

        engine = self._engine
        return {
            "rank": self._place.rank,
            "pid": os.getpid(),
            "phase": self._phase,
            "in_flight_answers": engine.in_flight if engine else 0,
            "engine/constructions": engines_built(),
            "policy_version": self._policy.version if self._policy else 0,
        }

    def _speaks(self) -> bool:
        return self._ready_policy().speaks

    def _ready_policy(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("setup() must come first")
        return self._policy

    def _ready_saver(self) -> Saver:
        if self._saver is None:
            from rljob_workload.megatron.weights import Saver

            self._saver = Saver(self._ready_policy(), self._ready_engine().sampler)
        return self._saver

    def _ready_engine(self) -> ResidentEngine:
        if self._engine is None:
            raise RuntimeError("setup() must come first")
        return self._engine
