"""The resident engine: Megatron's dynamic engine over the parameters that are trained.

Built once per rank, before the first prompt; suspended while training runs and resumed afterwards, with its requests in
flight. It reads the parameters in place, so taking over new weights is a change of the version number. Direct mode: the
ranks of one replica step their engines in lockstep, without a coordinator process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from rljob_workload.algorithm.batch import Answer, Request, Sampling
from rljob_workload.megatron import device
from rljob_workload.megatron.cache import build_context
from rljob_workload.megatron.errors import EngineError, EngineStepError, NonFiniteError, reason_of
from rljob_workload.megatron.lockstep import Lockstep
from rljob_workload.megatron.policy import Policy
from rljob_workload.megatron.seeds import SeededSampling
from rljob_workload.megatron.settings import EngineSettings

#: Tag of requests whose answers are not for training.
VALIDATION = -1

#: How torch's sampler says that it was given NaN.
_NO_PROBABILITIES = "probability tensor contains"

_constructions = 0


def engines_built() -> int:
    """Engines constructed in this process so far; anything but 1 in a run is a bug."""
    return _constructions


@dataclass(slots=True)
class _InFlight:
    """One answer being generated."""

    tag: tuple[int, int]
    #: (answer token index, version): where the policy changed under it.
    stamps: list[tuple[int, int]] = field(default_factory=list)


class ResidentEngine:
    """Generates answers for this rank's replica."""

    def __init__(self, policy: Policy, settings: EngineSettings, tokenizer: Any) -> None:
        from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode
        from megatron.core.inference.contexts import DynamicInferenceContext
        from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
        from megatron.core.inference.text_generation_controllers.text_generation_controller import (
            TextGenerationController,
        )

        global _constructions
        self._settings = settings
        self._policy = policy
        self._version = policy.version
        #: Whether requests and steps are taken: from `resume` to `close`.
        self._open = True
        self._steps = 0
        self._next_id = 0
        self._in_flight: dict[int, _InFlight] = {}
        context = build_context(
            policy.model,
            policy.config,
            InferenceConfig(
                buffer_size_gb=settings.kv_bytes / 2**30,
                block_size_tokens=settings.block_tokens,
                max_sequence_length=settings.max_sequence_length,
                max_requests=settings.max_requests,
                max_tokens=DynamicInferenceContext.round_up_tokens(_step_tokens(settings)),
                num_cuda_graphs=settings.cuda_graphs,  # 0 would mean one, and every step padded to its size
                kv_cache_management_mode=KVCacheManagementMode(settings.kv_mode),
                # Log-probs of the distribution that was really sampled from.
                logprobs_mode="raw_logprobs" if settings.temperature == 1.0 else "processed_logprobs",
            ),
        )
        _check_room(settings, context.block_size_bytes)
        #: Bytes of the key/value cache, and of one of its blocks.
        self.cache_bytes, self.block_bytes = int(context.memory_buffer.nbytes), int(context.block_size_bytes)
        controller = TextGenerationController(GPTInferenceWrapper(policy.model, context), tokenizer)
        self._engine = _engine_class()(controller, context)
        # Answers are used as token ids; decoding each of them to text inside the engine is wasted time.
        controller.detokenize = lambda *_, **__: ""
        self._sampled = _sampling_params(settings, greedy=False)
        self._greedy = _sampling_params(settings, greedy=True)
        self._seeds = SeededSampling.of(controller)
        self._lockstep = Lockstep.join(policy.settings.layout, rank=policy.rank, speaks=policy.speaks)
        _constructions += 1

    # ---- requests ---------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Answers being generated."""
        return len(self._in_flight)

    @property
    def steps(self) -> int:
        """Engine steps taken; ranks of one replica that are not at the same number have lost each other."""
        return self._steps

    def tokens_in_flight(self) -> dict[tuple[int, int], int]:
        """Tokens generated so far by unfinished answers, by tag; may be called from another thread."""
        tokens: dict[tuple[int, int], int] = {}
        for number, flight in self._in_flight.copy().items():
            if flight.tag[0] >= 0 and number in self._engine.requests:
                tokens[flight.tag] = tokens.get(flight.tag, 0) + self._generated(number)
        return tokens

    def _generated(self, number: int) -> int:
        """Tokens of one answer in flight. It is a record of several requests where it was prefilled again."""
        return sum(len(request.generated_tokens) for request in self._engine.requests[number].record.requests)

    @property
    def sampler(self) -> Any:
        """The generator that samples tokens (its state is part of a checkpoint)."""
        return self._engine.controller.sampling_rng

    def submit(self, requests: Sequence[Request], *, greedy: bool = False) -> list[Request]:
        """Ask for answers. Returns the requests that this rank takes; the others are taken by those it generates with."""
        self._require_open()
        params = self._greedy if greedy else self._sampled
        own = self._lockstep.share(requests)
        for request in own:
            self._check_length(request)
            prompt = list(request.tokens)
            wanted = params if request.sampling is None else self._own_params(request.sampling)
            for place, limit in enumerate(request.limits or (None,) * request.answers):
                self._next_id += 1
                self._in_flight[self._next_id] = _InFlight(request.tag, [(0, self._version)])
                if request.sampling is not None and request.sampling.seed is not None:
                    self._seeds.add(self._next_id, request.sampling.seed + place)
                self._engine.add_request(self._next_id, prompt, wanted if limit is None else _limited(wanted, limit))
        return own

    def _own_params(self, sampling: Sampling) -> Any:
        """Megatron's form of a request's own sampling. Tokens of stop texts stay, so that each token has its log-prob."""
        params = _copied(self._sampled)
        params.num_tokens_to_generate = sampling.new_tokens
        params.temperature = 1.0 if sampling.greedy else sampling.temperature
        params.top_k = 1 if sampling.greedy else 0
        params.top_p = 0.0 if sampling.greedy or sampling.top_p == 1.0 else sampling.top_p
        params.stop_words = list(sampling.stop) or None
        params.detokenize_stop_sequence = True
        return params

    def agree(self, *counts: int) -> list[int]:
        """Sums of the counts over the copies of the model that generate together. Call before each step, on all of them."""
        return self._lockstep.agree(*counts)

    def step(self) -> list[Answer]:
        """One iteration over all requests in flight; returns the answers that it finished."""
        self._require_open()
        try:
            records = self._forward()
        except Exception as err:
            raise self._explained(err) from err
        self._steps += 1
        return [self._answer(record) for record in records]

    def _forward(self) -> list[Any]:
        if not self._in_flight:
            # Those it shares experts with have some, and need this rank's experts.
            self._engine.controller.dummy_forward()
            return []
        records: list[Any] = self._engine.step_modern()["finished_request_records"]
        return records

    def _explained(self, err: Exception) -> Exception:
        if isinstance(err, RuntimeError) and _NO_PROBABILITIES in str(err):
            return NonFiniteError(
                f"sampling with the weights of step {self._version}: the next token's probabilities are not finite; a smaller "
                "algorithm.grpo.learningRate, or a generation.temperature nearer to 1, may help"
            )
        oldest = ", ".join(dict.fromkeys(str(flight.tag[0]) for flight in self._in_flight.values() if flight.tag[0] >= 0))
        return EngineStepError(
            f"rank {dist.get_rank()}, Decode: engine step {self._steps + 1} with the weights of step {self._version} failed, "
            f"{len(self._in_flight)} answers in flight (prompts {oldest[:100]}): {reason_of(err)}"
        )

    def _require_open(self) -> None:
        if not self._open:
            raise EngineError("the engine is suspended: it takes requests and steps after the hand-over to decode")

    def _answer(self, record: Any) -> Answer:
        request = record.requests[0] if len(record.requests) == 1 else record.merge()
        flight = self._in_flight.pop(request.request_id)
        self._seeds.forget(request.request_id)
        return Answer(
            tag=flight.tag,
            tokens=tuple(request.generated_tokens),
            logprobs=tuple(request.generated_log_probs or ()),
            versions=tuple(flight.stamps),
        )

    def _check_length(self, request: Request) -> None:
        if request.limits and (len(request.limits) != request.answers or min(request.limits) < 1):
            raise EngineError(f"prompt {request.tag[0]} wants {request.answers} answers of {request.limits} tokens")
        new = max(request.limits, default=self._settings.new_tokens)
        new = new if request.sampling is None else request.sampling.new_tokens
        if len(request.tokens) + new > self._settings.max_sequence_length:
            raise EngineError(
                f"prompt {request.tag[0]} has {len(request.tokens)} tokens; with {new} new ones it "
                f"exceeds generation.maxSequenceLength ({self._settings.max_sequence_length})"
            )

    # ---- life cycle -------------------------------------------------------------------------

    def close(self) -> None:
        """Take no request and no step from here on."""
        self._open = False

    def suspend(self) -> None:
        """Stop before training. Requests in flight stay as they are."""
        self.close()
        self._engine.suspend()

    def resume(self, version: int) -> None:
        """Go on with the weights of `version`; answers in flight remember at which token it took over."""
        self._engine.resume()
        if version != self._version:
            self._version = version
            self._stamp(version)
        self._open = True

    def _stamp(self, version: int) -> None:
        for number, flight in self._in_flight.items():
            generated = self._generated(number)
            if flight.stamps[-1][0] == generated:
                # No token came from the version stamped before.
                flight.stamps[-1] = (generated, version)
            else:
                flight.stamps.append((generated, version))

    def validate(self, prompts: Sequence[Request]) -> tuple[list[Answer], list[Answer]]:
        """Greedy answers, through this very engine. Training answers that finish meanwhile are returned second."""
        wanted = sum(prompt.answers for prompt in self.submit(prompts, greedy=True))
        validated: list[Answer] = []
        training: list[Answer] = []
        while self.agree(wanted - len(validated)) != [0]:
            for answer in self.step():
                (validated if answer.tag[0] == VALIDATION else training).append(answer)
        return validated, training

    def parameter_storages(self) -> set[int]:
        """Addresses of the parameters that the engine reads."""
        model = self._engine.controller.inference_wrapped_model.model
        return {parameter.data_ptr() for parameter in model.parameters()}


def _engine_class() -> Any:
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    class UnreportedEngine(DynamicInferenceEngine):  # type: ignore[misc,unused-ignore]
        """Megatron's engine asks the system for its memory at each suspension and resumption, to log it (0.2 ms)."""

        @staticmethod
        @contextmanager
        def suspend_resume_ctx(key: str, *, unified_memory_level: int) -> Iterator[None]:
            """What is left: no memory is given back or taken while the device still works."""
            device.synchronize()
            yield

    return UnreportedEngine


def _limited(params: Any, tokens: int) -> Any:
    """The same sampling, with another length."""
    other = _copied(params)
    other.num_tokens_to_generate = tokens
    return other


def _copied(params: Any) -> Any:
    """`copy.copy` takes a way of 30 microseconds through pickling; this is done for every answer."""
    other = object.__new__(type(params))
    other.__dict__.update(params.__dict__)
    return other


def _step_tokens(settings: EngineSettings) -> int:
    """Tokens that one engine step may take in: the prompts of all slots, and one answer of full length with its prompt.

    In mode Recompute the latter is prefilled again. The caller rounds up: a step's tokens are padded to a multiple, and
    the last prompts must not go beyond the buffers.
    """
    return max(settings.max_requests * settings.longest_prompt, settings.max_sequence_length, 256)


def _check_room(settings: EngineSettings, block_bytes: int) -> None:
    """One request must fit, beside the block that the engine keeps for itself; else it would wait for ever."""
    needed = (settings.max_sequence_length // settings.block_tokens + 1) * block_bytes
    if settings.kv_bytes < needed:
        raise EngineError(
            f"spec.generation.kvCache.size is {settings.kv_bytes} bytes; one request of "
            f"{settings.max_sequence_length} tokens needs {needed}"
        )


def _sampling_params(settings: EngineSettings, *, greedy: bool) -> Any:
    from megatron.core.inference.sampling_params import SamplingParams

    class SharedSamplingParams(SamplingParams):  # type: ignore[misc,unused-ignore]
        """The engine deep-copies a request's parameters twice; ours hold plain values only."""

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return _copied(self)

    return SharedSamplingParams(
        num_tokens_to_generate=settings.new_tokens,
        temperature=1.0 if greedy else settings.temperature,
        top_k=1 if greedy else 0,
        termination_id=-1 if settings.eos is None else settings.eos,
        return_log_probs=not greedy,
        skip_prompt_log_probs=True,
    )
