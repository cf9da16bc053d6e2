"""The policy that is trained: a Megatron model in DistributedDataParallel with the DistributedOptimizer."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rljob_workload.algorithm.batch import TrainRow, TrainStats
from rljob_workload.algorithm.grpo import grpo_terms
from rljob_workload.megatron import device
from rljob_workload.megatron.errors import NonFiniteError
from rljob_workload.megatron.model import build_model, parameter_buffers, transformer_config
from rljob_workload.megatron.settings import ModelSettings
from rljob_workload.megatron.shim import optimizer as optimizer_fixes


def init_process_groups(settings: ModelSettings, *, rank: int, world: int, store: Store, timeout: float) -> None:
    """Join the ranks, which have met in the store (`meeting.meet`), and build Megatron's process groups. `timeout`: seconds."""
    device.prepare()
    device.require(settings.transformer, gpus=settings.gpus, inference_optimized=settings.inference_optimized)
    from megatron.core import parallel_state, tensor_parallel

    device.prepare_attention()
    dist.init_process_group(
        device.backend(),
        store=store,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    layout = settings.layout
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed + 1, force_reset_rng=True)


class Policy:
    """Model, gradients and optimizer of this rank. `version` counts the optimizer steps that made the weights."""

    def __init__(self, settings: ModelSettings) -> None:
        from megatron.core import parallel_state

        self.settings = settings
        self.version = 0
        self.rank = dist.get_rank()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        #: Whether this rank speaks for its model-parallel group: it has the last stage's output.
        self.speaks: bool = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        self.config = transformer_config(settings)
        self.model = build_model(settings, self.config)
        self.ddp, self.optimizer = _build_training(settings, self.config, self.model)
        # Sequence parallelism gathers into buffers that Megatron keeps. Those made in inference mode cannot be written to by
        # training, so each side has its own.
        self._memory = parallel_state.get_global_memory_buffer()
        self._generation_buffers, self._training_buffers = self._memory.buffer, dict[Any, Tensor]()
        self._masks: dict[int, tuple[Tensor, Tensor]] = {}
        #: The last step's first micro-batch: what the weights are tried on before they are saved.
        self._sample: _Tensors | None = None
        self._parts = tuple(self.ddp.modules())
        self._switch(training=False)

    def parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return dict(self.model.named_parameters())

    def enter_train(self) -> None:
        """Switch the model to training. The engine must have been suspended."""
        self.clear_rotary_cache()
        self._memory.buffer = self._training_buffers
        self._switch(training=True)

    def enter_generate(self) -> None:
        """Switch the model back before the engine resumes: its loop dies on a model in training mode."""
        self._switch(training=False)
        self._memory.buffer = self._generation_buffers
        self.clear_rotary_cache()

    def _switch(self, *, training: bool) -> None:
        """`train` or `eval` of every part. Those of torch only set a flag, at the price of a walk through the whole tree."""
        for part in self._parts:
            if type(part).train is torch.nn.Module.train:
                part.__dict__["training"] = training
            else:
                part.train(training)

    def clear_rotary_cache(self) -> None:
        """The rotary embedding's cache may hold inference-mode tensors, which a training forward must not see."""
        forward: Any = getattr(getattr(self.model, "rotary_pos_emb", None), "forward", None)
        if hasattr(forward, "cache_clear"):
            forward.cache_clear()

    def train_step(self, rows: Sequence[TrainRow], *, longest: int, answer_tokens: int) -> TrainStats:
        """One optimizer step over this rank's rows; `longest` and `answer_tokens` speak of all ranks' rows."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        size = self.settings.micro_batch_size
        if len(rows) % size:
            raise ValueError(f"{len(rows)} answers on this rank do not divide into micro-batches of {size}")
        count, longest = len(rows) // size, self.settings.padded_length(longest)
        # Micro-batches of like lengths hold little padding.
        batch = _Tensors.of(sorted(rows, key=lambda row: len(row.tokens)), longest, device.current())
        self._sample = batch.slice(0, size)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=self._forward_step(batch, size, count, answer_tokens),
            data_iterator=iter(range(count)),
            model=[self.ddp],
            num_microbatches=count,
            seq_length=longest - 1,
            micro_batch_size=size,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        stats = self._stats(parts, float(grad_norm), any(row.current for row in rows))
        self.version += 1
        return stats

    def check_usable(self) -> None:
        """Raise when the weights, or loss and gradient of the last rows, are not finite. Collective; changes no weights.

        The step's own loss was computed with the weights before it, and huge weights are finite but nothing learns from them.
        """
        broken = [name for name, parameter in self.parameters().items() if not bool(torch.isfinite(parameter).all())]
        self._refuse_if(bool(broken), f"{', '.join(broken[:3])} hold values that are not finite")
        if self._sample is None:
            return
        training = self.ddp.training
        self.enter_train()
        loss = self._loss_of(self._sample)
        norm = sum(float(buffer.grad_data.norm()) for buffer in parameter_buffers(self.ddp))
        self.ddp.zero_grad_buffer()
        if not training:
            self.enter_generate()
        wrong = not (_finite(loss) and _finite(norm))
        self._refuse_if(wrong, f"the next step with them has loss {loss} and gradient norm {norm}")

    def _refuse_if(self, wrong: bool, why: str) -> None:
        """Raise on all ranks when it is wrong on one: the others would wait for it in the next collective."""
        anywhere = torch.tensor(float(wrong), device=device.current())
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        if bool(anywhere):
            raise NonFiniteError(self._unusable(why if wrong else "another rank found values that are not finite"))

    def _unusable(self, why: str) -> str:
        return (
            f"the weights of step {self.version} are not saved: {why}; "
            "a smaller algorithm.grpo.learningRate, from the newest checkpoint on, may help"
        )

    def _loss_of(self, sample: _Tensors) -> float:
        """The loss of one micro-batch (0 on stages that do not see it); leaves its gradients in the buffers."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        size, length = sample.tokens.shape
        self.ddp.zero_grad_buffer()
        parts = get_forward_backward_func()(
            forward_step_func=self._forward_step(sample, size, 1, max(1, int(sample.mask.sum()))),
            data_iterator=iter([0]),
            model=[self.ddp],
            num_microbatches=1,
            seq_length=length - 1,
            micro_batch_size=size,
            forward_only=False,
        )
        return float(sum(float(part["loss"]) for part in parts))

    def _forward_step(self, batch: _Tensors, size: int, count: int, answer_tokens: int) -> Any:
        # Megatron divides the loss by the micro-batches and averages gradients over the data-parallel ranks; the means
        # wanted are over all answer tokens of the step, so that every token weighs the same.
        scale = count * self.data_size / answer_tokens

        def forward_step(iterator: Iterator[int], model: Any) -> tuple[Tensor, Any]:
            start = next(iterator) * size
            part = batch.slice(start, start + size)
            if self.settings.lengths_may_differ:
                part = part.cut(self.settings.padded_length(part.longest))
            positions, causal = self._mask(part.tokens.shape[1] - 1)
            logits = model(part.tokens[:, :-1], positions.expand(size, -1), causal, runtime_gather_output=True)

            def loss_of(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                settings = self.settings.loss
                terms = grpo_terms(
                    logits, part.tokens[:, 1:], part.behaviour, part.mask, part.advantages, settings, current=part.current
                )
                total = terms.total(settings)
                # Megatron divides the returned loss in place: report a copy.
                return total * scale, {
                    "loss": total.detach().clone(),
                    "entropy": terms.entropy.detach(),
                    "clipped": terms.clipped,
                    "largest": terms.largest_logprob_change,
                    "error": terms.largest_logprob_error,
                }

            return logits, loss_of

        return forward_step

    def _stats(self, parts: list[dict[str, Tensor]], grad_norm: float, any_current: bool) -> TrainStats:
        def total(key: str) -> float:
            return float(sum(float(part[key]) for part in parts))

        def largest(key: str) -> float:
            return max((float(part[key]) for part in parts), default=0.0)

        stats = TrainStats(
            loss=total("loss"),
            entropy=total("entropy"),
            clipped=total("clipped"),
            largest_logprob_change=largest("largest"),
            grad_norm=grad_norm,
            speaks=self.speaks,
            gen_logprob_error=largest("error") if any_current and parts else None,
        )
        if not all(map(_finite, (stats.loss, stats.grad_norm))):
            raise NonFiniteError(
                f"training step {self.version + 1}: loss {stats.loss}, gradient norm {stats.grad_norm}; "
                "a smaller algorithm.grpo.learningRate may help"
            )
        return stats

    def _mask(self, length: int) -> tuple[Tensor, Tensor]:
        if length not in self._masks:
            where = device.current()
            positions = torch.arange(length, device=where)[None]
            causal = torch.triu(torch.ones(length, length, dtype=torch.bool, device=where), 1)[None, None]
            self._masks[length] = (positions, causal)
        return self._masks[length]


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Rows as padded tensors: tokens [B, T], behaviour log-probs and mask [B, T-1], advantages and current [B]."""

    tokens: Tensor
    behaviour: Tensor
    mask: Tensor
    advantages: Tensor
    current: Tensor

    @classmethod
    def of(cls, rows: Sequence[TrainRow], length: int, where: torch.device) -> _Tensors:
        tokens, behaviour, mask = [], [], []
        for row in rows:
            pad = length - len(row.tokens)
            before = row.prompt_length - 1
            tokens.append(row.tokens + (0,) * pad)
            if row.spans:
                behaviour.append(_spread(row, row.logprobs, length))
                mask.append(_spread(row, (1.0,) * len(row.logprobs), length))
            else:
                behaviour.append((0.0,) * before + row.logprobs + (0.0,) * pad)
                mask.append((0.0,) * before + (1.0,) * len(row.logprobs) + (0.0,) * pad)
        return cls(
            tokens=torch.tensor(tokens, device=where),
            behaviour=torch.tensor(behaviour, device=where),
            mask=torch.tensor(mask, device=where),
            advantages=torch.tensor([row.advantage for row in rows], device=where),
            current=torch.tensor([float(row.current) for row in rows], device=where),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.mask.any(0).nonzero()[-1]) + 2 if bool(self.mask.any()) else self.tokens.shape[1]

    def cut(self, length: int) -> _Tensors:
        """Without the padding behind so many tokens."""
        width = length - 1
        return dataclasses.replace(
            self, tokens=self.tokens[:, :length], behaviour=self.behaviour[:, :width], mask=self.mask[:, :width]
        )

    def slice(self, start: int, stop: int) -> _Tensors:
        part = slice(start, stop)
        return _Tensors(self.tokens[part], self.behaviour[part], self.mask[part], self.advantages[part], self.current[part])


def _spread(row: TrainRow, values: Sequence[float], length: int) -> tuple[float, ...]:
    """Values of the generated tokens at the places that predict them [length - 1]; zeros elsewhere."""
    spread = [0.0] * (length - 1)
    taken = 0
    for start, stop in row.spans:
        spread[start - 1 : stop - 1] = values[taken : taken + stop - start]
        taken += stop - start
    return tuple(spread)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def _build_training(settings: ModelSettings, config: Any, model: Any) -> tuple[Any, Any]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer_fixes.install()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=settings.dtype is torch.bfloat16,
            params_dtype=settings.dtype,
            use_distributed_optimizer=True,
        ),
        [ddp],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return ddp, optimizer


def quiet_megatron() -> None:
    """Silence the notices that megatron-core prints on every import and every engine step of a normal run."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron\..*")
    for name in ("megatron", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
