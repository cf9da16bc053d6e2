"""Saves of a whole run: the ranks' copies are taken while the engines are down, the rest happens while they generate again.

A save has two parts. `begin` is called between `train` and `wake`: every rank copies what it will write, which needs the last
collective. Then a thread of the driver waits for the ranks' writers, has rank 0 write the index, and publishes the directory.
Only then is there a checkpoint. At most one save is pending, and a run ends only after its last one has been published.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rljob_api.exitcodes import ExitCode
from rljob_workload.core.checkpoint import Checkpoint, CheckpointError, FencedError, Origin, Owner, RunDirectory
from rljob_workload.core.store.facts import facts_of
from rljob_workload.core.weight_digest import Staged, StaleGuard, WeightDigest
from rljob_workload.runtime.calls import Calls
from rljob_workload.runtime.errors import RunError
from rljob_workload.runtime.settings import Attempt

log = logging.getLogger("rljob.driver")

#: Told of a checkpoint that has just become one. Called in the writing thread.
Published = Callable[[Checkpoint], None]


class Saves:
    """All saves of one attempt."""

    def __init__(self, attempt: Attempt, token: int, directory: RunDirectory) -> None:
        self._attempt = attempt
        self._token = token
        self._directory = directory
        self._deadline = float(attempt.spec.deadlines.save_seconds)
        self._guard = StaleGuard(float(attempt.spec.algorithm.grpo.learning_rate))
        self._parent: str | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._saving = 0

    def resumed(self, checkpoint: Checkpoint) -> None:
        """The weights are this checkpoint's: the next save descends from it, and must differ from it."""
        self._parent = checkpoint.name
        digest = checkpoint.manifest.weight_digest if checkpoint.manifest is not None else None
        self._guard.digest, self._guard.step = digest, checkpoint.step

    def stepped(self, gradient: float) -> None:
        """A step with this gradient norm was trained."""
        self._guard.stepped(gradient)

    def begin(self, calls: Calls, step: int, state: Mapping[str, Any], published: Published) -> None:
        """Copy what belongs to the checkpoint of this step; returns when the engines may go on. `published` is told the end.

        Waits for the save before, if it is still being written. Raises RunError: SAVE_FAILED, FENCED.
        """
        self.wait()
        tmp = self._guarded(lambda: self._directory.begin(step, self._token))
        with self._given_back(tmp):
            staged: list[Staged] = calls.ranks("save", self._deadline, ExitCode.SAVE_FAILED, str(tmp))
            digest = str(sum((part.digest for part in staged), WeightDigest()))
            if problem := self._guard.problem(step, digest):
                raise RunError(ExitCode.SAVE_FAILED, problem)
        origin = self._origin(state, digest)
        self._saving = step
        self._thread = threading.Thread(
            target=self._end, args=(calls, tmp, step, state, origin, published), name=f"save of step {step}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises what went wrong with a save in the background: RunError (SAVE_FAILED, FENCED, RANK_LOST)."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """The pending save, if there is one, has been published. Raises RunError."""
        if self._thread is not None:
            # The ranks' writers have `saveSeconds`; what is left is to digest and publish what they wrote.
            self._thread.join(2 * self._deadline)
            if self._thread.is_alive():
                raise RunError(
                    ExitCode.SAVE_FAILED,
                    f"the checkpoint of step {self._saving} was not published within {2 * self._deadline:g} s (twice "
                    "deadlines.saveSeconds)",
                )
            self._thread = None
        self.check()

    def settle(self) -> None:
        """The attempt is ending, well or badly: a save that can still be published is; one that cannot is only logged."""
        try:
            self.wait()
        except RunError as err:
            log.warning("the checkpoint of step %d was not published: %s", self._saving, err)

    def _end(self, calls: Calls, tmp: Path, step: int, state: Mapping[str, Any], origin: Origin, published: Published) -> None:
        """In a thread of its own: from the ranks' files to the checkpoint."""
        try:
            with self._given_back(tmp):
                saved = self._guarded(lambda: self._publish(calls, tmp, step, state, origin))
            self._parent = saved.name
            published(saved)
            log.info("step %d: saved %s", step, saved.name)
            # After the report: whoever reads it must find the checkpoint, and the old ones are in nobody's way.
            self._guarded(lambda: self._directory.prune(self._attempt.spec.checkpoint.keep_last, self._token))
        except BaseException as err:  # noqa: BLE001 - raised again in the driver's own thread, at its next step
            self._failure = err

    def _publish(self, calls: Calls, tmp: Path, step: int, state: Mapping[str, Any], origin: Origin) -> Checkpoint:
        ranks = calls.actors.ranks
        reports = _in_background(calls, [(rank.written, ()) for rank in ranks], self._deadline, "has written its file")
        ends: list[tuple[Any, tuple[Any, ...]]] = [(rank.finish_save, (reports if rank is ranks[0] else [],)) for rank in ranks]
        _in_background(calls, ends, self._deadline, "has ended the save")
        return self._directory.publish(tmp, step, self._token, state, origin)

    def _origin(self, state: Mapping[str, Any], digest: str) -> Origin:
        attempt = self._attempt
        source = state["collector"].get("source", {})
        return Origin(
            writer=Owner(namespace=attempt.namespace, name=attempt.name, uid=attempt.uid, attempt=attempt.number),
            parent=self._parent,
            facts=facts_of(attempt.spec, attempt.model),
            fingerprint=source.get("fingerprint"),
            weight_digest=digest,
        )

    @contextmanager
    def _given_back(self, tmp: Path) -> Iterator[None]:
        """A save that fails gives its room back: on a full volume the next attempt could not even take its token."""
        try:
            yield
        except RunError as err:
            if err.code is not ExitCode.FENCED:  # who is overtaken deletes nothing
                self._directory.discard(tmp)
            raise

    def _guarded[Result](self, work: Callable[[], Result]) -> Result:
        """What the volume refuses, as the way the run ends."""
        try:
            return work()
        except FencedError as err:
            raise RunError(ExitCode.FENCED, str(err)) from err
        except CheckpointError as err:
            raise RunError(ExitCode.SAVE_FAILED, str(err)) from err
        except OSError as err:
            where = err.filename or self._directory.root
            raise RunError(ExitCode.SAVE_FAILED, f"cannot write {where}: {err.strerror or err}") from err


def _in_background(calls: Calls, work: list[tuple[Any, tuple[Any, ...]]], seconds: float, what: str) -> list[Any]:
    """Call the ranks beside whatever they are doing, and wait for all."""
    refs = [method.options(concurrency_group="control").remote(*arguments) for method, arguments in work]
    try:
        results: list[Any] = ray.get(refs, timeout=seconds)
    except GetTimeoutError as err:
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        late = ", ".join(str(refs.index(ref)) for ref in refs if ref not in done)
        raise RunError(ExitCode.SAVE_FAILED, f"rank {late}: not within {seconds:g} s: {what} (deadlines.saveSeconds)") from err
    except RayTaskError as err:
        raise calls.classified(err) from err
    except RayActorError as err:
        raise calls.lost(err) from err
    return results
