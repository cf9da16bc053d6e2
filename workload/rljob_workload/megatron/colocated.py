"""The real parts of a hand-over: the policy and the engine that share one rank's device, its memory and its weights."""

from __future__ import annotations

from rljob_workload.core.handover import Phase
from rljob_workload.megatron import device
from rljob_workload.megatron.engine import ResidentEngine
from rljob_workload.megatron.policy import Policy


class Colocated:
    """`core.handover.Parts` of one rank. Starts in decode: the engine runs, training buffers are put away if asked."""

    def __init__(self, policy: Policy, engine: ResidentEngine, barrier: device.RankBarrier, *, offload: bool) -> None:
        self._policy = policy
        self._engine = engine
        self._barrier = barrier
        self._offload = offload
        if offload:
            self._put_away()

    def stop_intake(self) -> None:
        """No request is taken and no step begun from here on."""
        self._engine.close()

    def suspend_engine(self) -> None:
        """Free what the KV mode frees; requests in flight stay."""
        self._engine.suspend()

    def synchronize(self) -> None:
        """Drain the device of LOCAL_RANK, whichever device the calling thread has selected."""
        device.synchronize()

    def barrier(self, phase: Phase) -> None:
        """Meet the other ranks."""
        self._barrier.wait(phase)

    def enter_train(self) -> None:
        """Training buffers back, model into training."""
        if self._offload:
            self._policy.optimizer.restore_from_cpu()
            self._policy.ddp.restore_grad_buffers(synchronize=False)
        self._policy.enter_train()

    def leave_train(self) -> None:
        """Model into inference, training buffers away."""
        self._policy.enter_generate()
        if self._offload:
            self._put_away()

    def resume_engine(self) -> None:
        """Weight sync and signal: the parameters are the engine's own, so taking them over is a new version number."""
        self._engine.resume(self._policy.version)

    def _put_away(self) -> None:
        """Free the gradients' memory (their content is worth nothing after a step) and move the optimizer's state to the host.

        On a CPU rank that state is in host memory already and stays; the gradients' memory is freed there too.
        """
        self._policy.ddp.offload_grad_buffers(synchronize=False)
        self._policy.optimizer.offload_to_cpu()
