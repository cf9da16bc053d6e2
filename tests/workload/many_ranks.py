"""Several ranks without Ray: processes that drive the product's own `Rank`, and a trainer's loop over them.

The processes import Megatron once and then play one layout after the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rljob_api.layout import layout_of
from rljob_api.spec import RLJobSpec
from rljob_workload.algorithm.batch import Answer, DecodeSlice, TrainBatch, TrainStats
from rljob_workload.core.rollouts import Rollouts, StepInfo
from rljob_workload.core.slices import SliceGoal
from rljob_workload.core.weight_digest import WeightDigest, contradict
from rljob_workload.data.builtin import TaskData, load_builtin
from rljob_workload.environments import load_environment
from rljob_workload.runtime.rank import Rank, RankPlace, RankStep
from rljob_workload.runtime.rollouts_of import build_rollouts
from rljob_workload.runtime.step import validation_prompts

#: Seconds for one call of all ranks; far above what any takes, so that a hang is a failure and not a stuck test.
CALL_SECONDS = 120
#: Beside saved weights: their digest.
DIGEST = "digest"


class RankFailedError(Exception):
    """A rank raised; the text has its traceback."""


def serve(connection: Connection) -> None:
    """One rank's process: build and call a `Rank` as asked."""
    rank: Rank | None = None
    while True:
        method, arguments = connection.recv()
        if method == "exit":
            return
        try:
            if method == "begin":
                rank, result = Rank(*arguments), None
            else:
                result = getattr(rank, method)(*arguments)
            connection.send((True, result))
        except BaseException:  # noqa: BLE001 - sent to the test, which raises it
            connection.send((False, traceback.format_exc()))


class ManyRanks:
    """The processes of one world size; new ones for each layout, so that what a rank leaves (groups, threads) ends with it.

    They are forked from a process that has imported torch and Megatron once, and has done nothing else.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.closed = True
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def start(self) -> None:
        """Begin with new processes."""
        self.close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.workload.imports"])
        self.closed = False
        for _ in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The same call on every rank."""
        return self.call_each(method, [arguments] * self.world)

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One call on the first ranks, with arguments of its own for each; raises the first rank's error, or names who did not
        answer."""
        pipes = self._pipes[: len(arguments)]
        for pipe, own in zip(pipes, arguments, strict=True):
            pipe.send((method, own))
        results = []
        for number, pipe in enumerate(pipes):
            if not pipe.poll(CALL_SECONDS):
                raise RankFailedError(f"{method}: rank {number} of {self.world} did not answer")
            fine, result = pipe.recv()
            if not fine:
                raise RankFailedError(f"{method}: rank {number} of {self.world}: {result}")
            results.append(result)
        return results

    def close(self) -> None:
        """End the processes, hung ones too."""
        patience = 0 if self.closed else 5
        self.closed = True
        pipes, self._pipes = self._pipes, []
        processes, self._processes = self._processes, []
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(("exit", ()))
        for process in processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass
class Trainer:
    """The trainer's loop over many ranks: what driver and collector do, without their processes."""

    spec: RLJobSpec
    ranks: ManyRanks
    rollouts: Rollouts
    task: TaskData
    version: int = 0
    infos: list[StepInfo] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def of(cls, spec: RLJobSpec, ranks: ManyRanks, directory: Path) -> Iterator[Trainer]:
        """The ranks of a spec, set up; torn down at the end, for the next layout."""
        layout = layout_of(spec)
        assert layout.world == ranks.world
        raw = spec.to_wire()
        places = [
            (RankPlace(rank, layout.world, rank % layout.ranks_per_node, 1, str(directory)), raw)
            for rank in range(layout.world)
        ]
        task = load_builtin(str(spec.data.builtin))
        try:
            ranks.start()
            ranks.call_each("begin", places)
            (address,) = ranks.call_each("address", [("127.0.0.1",)])
            ranks.call("setup", address)
            yield cls(spec, ranks, build_rollouts(spec, task), task)
        finally:
            ranks.close()

    def step(self, *, iterations: int = 64) -> TrainStats:
        """Generate until a step's groups are there, and train them."""
        while (taken := self.rollouts.take(self.version + 1, self.version)) is None:
            self.generate(iterations)
        batch, info = taken
        stats = self.train(batch)
        self.rollouts.commit(batch.step, batch.ordinals)
        self.infos.append(info)
        self.batches.append(batch)
        return stats

    def generate(self, iterations: int, *, fresh: bool = True) -> int:
        """One decode slice on every rank, with `fresh` prompts too. Returns the answers that are still in flight."""
        sets = layout_of(self.spec).replicas()
        requests = self.rollouts.dispatch(self.version, 0.0) if fresh else []
        arguments: list[tuple[Any, ...]] = [()] * self.ranks.world
        for index, members in enumerate(sets):
            for rank in members:
                arguments[rank] = (requests[index :: len(sets)], SliceGoal(10**6, iterations=iterations))
        slices: list[DecodeSlice] = self.ranks.call_each("decode", arguments)
        self._accept([answer for result in slices for answer in result.answers])
        return sum(slices[members[0]].left for members in sets)

    def train(self, batch: TrainBatch) -> TrainStats:
        """One step on all ranks; the sums of those that speak."""
        results: list[RankStep] = self.ranks.call("train", batch, True)
        self.version += 1
        speaking = [result.stats for result in results if result.stats.speaks]
        return TrainStats(
            loss=sum(stats.loss for stats in speaking) / batch.answer_tokens,
            entropy=sum(stats.entropy for stats in speaking) / batch.answer_tokens,
            clipped=sum(stats.clipped for stats in speaking),
            largest_logprob_change=max(stats.largest_logprob_change for stats in speaking),
            grad_norm=max(result.stats.grad_norm for result in results),
            speaks=True,
        )

    def validate(self, limit: int) -> dict[int, tuple[int, ...]]:
        """Greedy answers by prompt."""
        sets = layout_of(self.spec).replicas()
        prompts = validation_prompts(self.task, limit)
        arguments: list[tuple[Any, ...]] = [()] * self.ranks.world
        for index, members in enumerate(sets):
            for rank in members:
                arguments[rank] = (prompts[index :: len(sets)],)
        answers = [answer for part in self.ranks.call_each("validate", arguments) for answer in part]
        return {answer.tag[1]: answer.tokens for answer in answers}

    def save(self, directory: Path) -> None:
        """Write a checkpoint's weights, and go on."""
        directory.mkdir(parents=True)
        self.ranks.call("sleep")
        staged = self.ranks.call("save", str(directory))
        self.ranks.call("wake")
        reports = self.ranks.call("written")
        self.ranks.call("finish_save", reports)
        # What the manifest holds in a run: the digest of all ranks' parameters.
        (directory / DIGEST).write_text(str(sum((part.digest for part in staged), WeightDigest())))

    def load(self, directory: Path, version: int) -> None:
        """Take over a checkpoint's weights."""
        loaded = self.ranks.call("load", str(directory), version, {})
        found, saved = str(sum(loaded, WeightDigest())), (directory / DIGEST).read_text()
        assert not contradict(saved, found), f"the same weights in another layout: {saved}, then {found}"
        self.version = version

    def _accept(self, answers: Sequence[Answer]) -> None:
        environment = load_environment("exactMatch", fixed_length=self.task.eos is None)
        for group in self.rollouts.arrive(answers):
            expected = self.rollouts.expected(group.ordinal)
            scores = [environment.score(self.task.tokenizer.decode(a.tokens), expected) for a in group.answers]
            self.rollouts.scored(group, [(score.reward, score.correct) for score in scores])
