"""One rank: a Ray actor process that owns a policy and its resident engine.

All work methods run one after the other in the actor's default concurrency group, so a rank is either generating or training,
never both; the way from one to the other is the hand-over (`core.handover`), in which all ranks meet. `status` runs in the
`control` group and answers while work, or a hand-over that waits for another rank, is going on. torch and Megatron are
imported in `setup`, in this process only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import HTTP, Answer, DecodeSlice, Request, TrainBatch, TrainStats
from rljob_workload.core.handover import Handover, Passage, Phase
from rljob_workload.core.slices import SliceGoal
from rljob_workload.core.weight_digest import Staged, WeightDigest
from rljob_workload.data.builtin import load_builtin
from rljob_workload.megatron import meeting
from rljob_workload.runtime.concurrency import control
from rljob_workload.runtime.logs import log_to_file

if TYPE_CHECKING:
    from rljob_workload.megatron.engine import ResidentEngine
    from rljob_workload.megatron.memory import PeakMemory
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
    train_seconds: float
    suspend: Passage
    #: None where a save follows: the engine stays down.
    wake: Passage | None
    #: Engines built in this rank's process so far.
    engines: int = 1
    #: Most bytes by phase (generate, train, save), of those that ended since the last step (`megatron.memory`).
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def handover_seconds(self) -> float:
        """Both directions, as far as they belong to this step's call."""
        return self.suspend.seconds + (self.wake.seconds if self.wake else 0.0)


def woken(steps: Sequence[RankStep], wakes: Sequence[Passage]) -> list[RankStep]:
    """The ranks' steps with the ways back to decode that came after a save."""
    return [replace(step, wake=wake) for step, wake in zip(steps, wakes, strict=True)]


class Rank:
    """The actor's class; `launch.py` wraps it."""

    def __init__(self, place: RankPlace, spec: dict[str, Any]) -> None:
        self._place = place
        self._spec = RLJobSpec.model_validate(spec)
        #: What the rank does beside what its hand-over's phase says; empty: just that.
        self._activity = "Starting"
        self._handover: Handover | None = None
        self._policy: Policy | None = None
        self._engine: ResidentEngine | None = None
        self._saver: Saver | None = None
        self._memory: PeakMemory | None = None
        self._remaining: Counter[tuple[int, int]] = Counter()
        self._stash: list[Answer] = []
        os.environ["LOCAL_RANK"] = str(place.local_rank)
        directory = Path(place.directory)
        log_to_file(directory / "logs" / f"rank-{place.rank:05d}-attempt-{place.attempt:06d}.log")
        self._record = directory / "trained" / f"rank-{place.rank:05d}.jsonl"
        #: Whether the record's directory is known to be there.
        self._recorded = False
        #: Rank 0's, until the ranks have met.
        self._listener: socket.socket | None = None

    def address(self, host: str | None = None) -> str:
        """An address on this rank's node, where the ranks meet (asked of rank 0, which holds it from now on).

        `host`: of this node; the one that Ray knows unless given.
        """
        if host is None:
            import ray

            host = str(ray.util.get_node_ip_address())
        self._listener = meeting.listen(host)
        return meeting.address_of(self._listener)

    def setup(self, address: str, fresh: bool = True) -> dict[str, float]:
        """Join the other ranks, build the policy and, once for the whole run, the engine.

        `address`: what rank 0's `address` has named. `fresh` False: a checkpoint will be loaded, so pretrained weights are not
        read.
        """
        self._activity = "Loading"
        began = time.monotonic()
        from rljob_workload.megatron import device
        from rljob_workload.megatron.colocated import Colocated
        from rljob_workload.megatron.engine import ResidentEngine
        from rljob_workload.megatron.memory import PeakMemory
        from rljob_workload.megatron.policy import Policy, init_process_groups, quiet_megatron
        from rljob_workload.megatron.settings import engine_settings, model_settings

        quiet_megatron()
        settings = model_settings(self._spec, fresh=fresh)
        timeout = float(self._spec.deadlines.first_step_seconds)
        place = self._place
        listener, self._listener = self._listener, None
        store = meeting.meet(address, rank=place.rank, world=place.world, timeout=timeout, listener=listener)
        init_process_groups(settings, rank=place.rank, world=place.world, store=store, timeout=timeout)
        imported = time.monotonic()
        task = load_builtin(str(self._spec.data.builtin))
        self._policy = Policy(settings)
        self._engine = ResidentEngine(self._policy, engine_settings(self._spec, task), task.tokenizer)
        barrier = device.RankBarrier(float(self._spec.deadlines.handover_seconds))
        parts = Colocated(self._policy, self._engine, barrier, offload=self._spec.generation.offload_training_buffers)
        self._handover = Handover(place.rank, parts)
        device.settle()
        built = time.monotonic()
        self._memory = PeakMemory()
        self._memory.enter("generate")
        whose = "by phase" if self._memory.by_phase else "of the whole life (this kernel resets no mark)"
        log.info("key/value cache: %d bytes in blocks of %d; peaks of memory are told %s",
                 self._engine.cache_bytes, self._engine.block_bytes, whose)  # fmt: skip
        log.info("rank %d of %d is ready: imports %.1f s, model and engine %.2f s", place.rank, place.world,
                 imported - began, built - imported)  # fmt: skip
        self._activity = ""
        return {"import_seconds": imported - began, "build_seconds": built - imported}

    # ---- generation -------------------------------------------------------------------------

    def decode(self, requests: Sequence[Request], goal: SliceGoal) -> DecodeSlice:
        """Take in new prompts and generate until the goal is reached.

        All ranks of a replica run this in lockstep, which is why it is bounded by iterations and not by a clock.
        """
        self._ready_handover().expect(Phase.DECODE)
        engine = self._ready_engine()
        for request in engine.submit(requests):
            self._remaining[request.tag] = request.answers
        answers, self._stash = self._stash, []
        complete, served = self._count_complete(answers)
        iterations = goal.iterations
        while True:
            done, left, urgent = engine.agree(complete, engine.in_flight, served)
            if iterations <= 0 or goal.reached(done, left, urgent):
                break
            fresh = engine.step()
            more, also = self._count_complete(fresh)
            complete, served = complete + more, served + also
            answers.extend(fresh)
            iterations -= 1
        return DecodeSlice(tuple(answers) if self._speaks() else (), left)

    def _count_complete(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """Requests that these answers complete: groups, and those that came over HTTP."""
        complete = served = 0
        for answer in answers:
            self._remaining[answer.tag] -= 1
            if not self._remaining[answer.tag]:
                del self._remaining[answer.tag]
                served += answer.tag[0] == HTTP
                complete += answer.tag[0] != HTTP
        return complete, served

    def validate(self, prompts: Sequence[Request]) -> list[Answer]:
        """Greedy answers through the same engine. Training answers that finish meanwhile go out with the next decode."""
        self._ready_handover().expect(Phase.DECODE)
        self._activity = "Validate"
        validated, training = self._ready_engine().validate(prompts)
        self._stash.extend(training)
        self._activity = ""
        return validated if self._speaks() else []

    # ---- training ---------------------------------------------------------------------------

    def train(self, batch: TrainBatch, wake: bool) -> RankStep:
        """Hand over to training, take one optimizer step, and hand back to decode unless a save follows."""
        policy, handover = self._ready_policy(), self._ready_handover()
        memory = self._ready_memory()
        memory.enter("train")
        suspend = handover.to_train()
        began = time.monotonic()
        rows = batch.shard(policy.data_rank, policy.data_size)
        stats = policy.train_step(rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
        self._record_step(batch)
        trained = time.monotonic()
        memory.enter("generate" if wake else "save")
        passage = handover.to_decode() if wake else None
        return RankStep(stats, trained - began, suspend, passage, _engines_built(), memory.take())

    def sleep(self) -> Passage:
        """Hand over to training without a step (a save outside the usual place follows)."""
        self._ready_memory().enter("save")
        return self._ready_handover().to_train()

    def wake(self) -> Passage:
        """Hand back to decode, with the new weights."""
        self._ready_memory().enter("generate")
        return self._ready_handover().to_decode()

    def _record_step(self, batch: TrainBatch) -> None:
        """An independent record of what was trained, for auditors: not read by the trainer."""
        line = {"attempt": self._place.attempt, "step": batch.step, "ordinals": batch.ordinals}
        try:
            if not self._recorded:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                self._recorded = True
            with self._record.open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as err:  # a refused write does not say which file it was
            raise OSError(err.errno, err.strerror, str(self._record)) from err

    # ---- checkpoints ------------------------------------------------------------------------

    def save(self, directory: str) -> Staged:
        """Take copies of this rank's part of a checkpoint and begin to write them; called between `train` and `wake`.

        What is said of a save from here on needs no other rank: `written`, then `finish_save`.
        """
        with self._ready_handover().saving():
            return self._ready_saver().stage(Path(directory))

    @control
    def written(self) -> bytes:
        """Wait for this rank's file, beside whatever else the rank does. Returns the writer's report."""
        return self._ready_saver().written()

    @control
    def finish_save(self, reports: Sequence[bytes]) -> None:
        """All ranks have written: rank 0 writes the index of their files."""
        self._ready_saver().finish(reports)

    def load(self, directory: str, version: int, digests: Mapping[str, str]) -> WeightDigest:
        """Take over a checkpoint's weights, optimizer and random state. `digests`: of files that are to be compared first.

        Returns the digest of the parameters that this rank speaks for.
        """
        from rljob_workload.megatron import weights

        self._activity = "Loading"
        policy, engine, handover = self._ready_policy(), self._ready_engine(), self._ready_handover()
        handover.to_train()
        weights.verify(Path(directory), digests, self._place.rank, self._place.world)
        loaded = weights.load(policy, engine.sampler, Path(directory))
        policy.version = version
        handover.to_decode()
        self._activity = ""
        return loaded

    # ---- reading ----------------------------------------------------------------------------

    @control
    def status(self) -> dict[str, Any]:
        """Where this rank is; answers while work is going on.

        `step`: the step of a hand-over under way. `engine_steps` tells which rank a replica's others wait for.
        """
        engine, handover = self._engine, self._handover
        return {
            "rank": self._place.rank,
            "pid": os.getpid(),
            "phase": self._activity or (str(handover.phase) if handover else ""),
            "step": handover.now.step if handover else "",
            "phase_seconds": round(handover.lasting(), 3) if handover else 0.0,
            "in_flight_answers": engine.in_flight if engine else 0,
            "engine_steps": engine.steps if engine else 0,
            "tokens_in_flight": engine.tokens_in_flight() if engine else {},
            "engine/constructions": _engines_built() if engine else 0,
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

    def _ready_memory(self) -> PeakMemory:
        if self._memory is None:
            raise RuntimeError("setup() must come first")
        return self._memory

    def _ready_engine(self) -> ResidentEngine:
        if self._engine is None:
            raise RuntimeError("setup() must come first")
        return self._engine

    def _ready_handover(self) -> Handover:
        if self._handover is None:
            raise RuntimeError("setup() must come first")
        return self._handover


def _engines_built() -> int:
    """The count of this process, without importing torch where there is no engine."""
    from rljob_workload.megatron.engine import engines_built

    return engines_built()
