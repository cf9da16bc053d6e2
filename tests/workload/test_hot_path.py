"""What makes generation and training fast on a CPU computes the same as what it replaces."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rljob_workload.algorithm.batch import Answer, Request
from rljob_workload.data.builtin import load_builtin
from rljob_workload.megatron.engine import ResidentEngine
from rljob_workload.megatron.errors import EngineError
from rljob_workload.megatron.policy import Policy
from rljob_workload.megatron.settings import engine_settings, model_settings
from rljob_workload.megatron.shim import admission, attention, gemm

from .conftest import copy_spec

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.filterwarnings("ignore")]

#: Blocks of 4 tokens: prompts and answers of these tests take several.
BLOCK = 4


@pytest.fixture(scope="module")
def policy(ranks: None) -> Policy:
    return Policy(model_settings(copy_spec()))


@pytest.fixture
def engine(policy: Policy) -> Callable[..., ResidentEngine]:
    """An engine with few slots and small blocks, over contexts of 64 tokens."""

    def build(**changes: Any) -> ResidentEngine:
        spec, task = copy_spec(maxSequenceLength=64, maxNewTokens=3), load_builtin("copy3")
        settings = dataclasses.replace(
            engine_settings(spec, task), block_tokens=BLOCK, longest_prompt=24, max_requests=8, **changes
        )
        return ResidentEngine(policy, settings, task.tokenizer)

    return build


def requests(count: int, seed: int) -> list[Request]:
    """Prompts of 1 to 24 tokens, one to three answers each of 1 to 30 tokens."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        tokens = tuple(rng.randrange(3, 18) for _ in range(rng.randint(1, 24)))
        limits = tuple(rng.randint(1, 30) for _ in range(rng.randint(1, 3)))
        made.append(Request((number, 0), tokens, len(limits), limits))
    return made


def context_state(engine: Any) -> dict[str, Any]:
    """Every tensor and number of the engine's context that admission may write."""
    context = engine._engine.context
    active, rows = context.active_token_count, context.total_request_count
    state: dict[str, Any] = {
        "waiting": list(engine._engine.waiting_request_ids),
        "counts": (active, rows, context.num_prefill_requests, context.lifetime_prefill_token_count),
        "free": context.kv_block_allocator.total_avail,
    }
    for name, value in vars(context).items():
        if isinstance(value, Tensor) and name.startswith("token_to_"):
            state[name] = value[:active].tolist()
        elif isinstance(value, Tensor) and name.startswith("request_"):
            state[name] = value[:rows].tolist()
    state |= {label: values[:rows].tolist() for label, values in context.request_metadata.items()}
    return state


def run(engine: ResidentEngine, asked: list[Request], schedule: Callable[[Any], None]) -> tuple[list[Any], list[Answer]]:
    """Answer everything; the states right after each admission, and the answers."""
    states = []

    def scheduled(inner: Any) -> None:
        schedule(inner)
        states.append(context_state(engine))

    engine._engine.schedule_non_chunked_prefill = lambda: scheduled(engine._engine)
    answers: list[Answer] = []
    for index in range(0, len(asked), 5):
        engine.submit(asked[index : index + 5])
        answers += engine.step()
    while engine.in_flight:
        answers += engine.step()
    return states, answers


@pytest.mark.parametrize("seed", [1, 2])
def test_admitting_requests_together_leaves_the_state_that_megatron_leaves(
    engine: Callable[..., ResidentEngine], seed: int
) -> None:
    asked = requests(40, seed)
    ours, answers = run(engine(), asked, admission.schedule)
    theirs, expected = run(engine(), asked, admission._original)
    assert len(ours) == len(theirs) > 40
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == other, f"admission {index}"
    assert any(state["waiting"] for state in ours), "nothing ever had to wait"
    assert answers == expected


def test_admission_stops_where_the_cache_is_full(engine: Callable[..., ResidentEngine]) -> None:
    """Two requests of 64 tokens fill this cache; the others wait, and all are answered."""
    kv_bytes = (2 * 64 + BLOCK) * 2048  # 2 KiB a token, and the block that the engine keeps for itself
    built = engine(kv_bytes=kv_bytes)
    states, answers = run(built, requests(12, 3), admission.schedule)
    other, expected = run(engine(kv_bytes=kv_bytes), requests(12, 3), admission._original)
    assert states == other
    assert answers == expected
    assert len(answers) == sum(request.answers for request in requests(12, 3))


def test_a_cache_that_is_put_away_comes_back_with_the_blocks_in_use(engine: Callable[..., ResidentEngine]) -> None:
    built = engine(kv_mode="offload")
    context = built._engine.context
    built.submit(requests(5, 7))
    for _ in range(6):
        built.step()
    before, table = context.memory_buffer.clone(), context.request_to_kv_block_ids[: context.total_request_count].clone()
    used = sorted(set(table.flatten().tolist()) - {-1})
    built.suspend()
    built.suspend()
    assert context.memory_buffer.numel() == 0
    built.resume(1)
    after = context.memory_buffer
    assert after.shape == before.shape
    assert torch.equal(after[:, :, used], before[:, :, used])
    after[:, :, used] = 0.0
    assert len(used) > 5
    assert not after.any()


def test_every_answer_has_the_length_that_its_request_imposes(engine: Callable[..., ResidentEngine]) -> None:
    asked = requests(20, 4)
    built = engine()
    built.submit(asked)
    lengths: dict[int, list[int]] = {}
    while built.in_flight:
        for answer in built.step():
            lengths.setdefault(answer.tag[0], []).append(len(answer.tokens))
            assert len(answer.logprobs) == len(answer.tokens)
    assert {tag: sorted(found) for tag, found in lengths.items()} == {
        request.tag[0]: sorted(request.limits) for request in asked
    }


@pytest.mark.parametrize("limits", [(3,), (3, 0), (3, 62)])
def test_lengths_that_do_not_fit_are_refused(engine: Callable[..., ResidentEngine], limits: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="prompt 7 "):
        engine().submit([Request((7, 0), (3, 4, 5), 2, limits)])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("spread", [1, 9])
def test_decoding_block_by_block_equals_attention_over_the_whole_context(heads: tuple[int, int], spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    (count, key_heads), width = heads, 8
    lengths = torch.tensor([5, 0, 17, 4, 1, 30], dtype=torch.int32)
    table = torch.full((6, 8), -1, dtype=torch.int32)
    free = torch.randperm(20, generator=generator).int() * spread
    for request, length in enumerate(lengths.tolist()):
        blocks = -(-length // BLOCK)
        table[request, :blocks], free = free[:blocks], free[blocks:]
    keys, values = (torch.randn(20 * spread, BLOCK, key_heads, width, generator=generator) for _ in range(2))
    # What nobody has written yet may be anything.
    for cache in (keys, values):
        cache[sorted(set(range(20 * spread)) - set(table.flatten().tolist()))] = float("nan")
    for step in range(3):  # the plan of a step must not serve the next
        lengths = torch.where(lengths > 0, lengths + (step > 0) * (lengths % BLOCK > 0), lengths)
        q = torch.randn(6, 1, count, width, generator=generator)
        found = attention.flash_attn_with_kvcache(q, keys, values, lengths, causal=True, block_table=table)
        for request, length in enumerate(lengths.tolist()):
            pages = table[request, : -(-length // BLOCK)].long()
            k, v = (c[pages].flatten(0, 1)[:length].repeat_interleave(count // key_heads, 1) for c in (keys, values))
            scores = torch.einsum("hd,lhd->hl", q[request, 0], k) / width**0.5
            expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
            torch.testing.assert_close(found[request, 0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(256, 96, 96), (300, 64, 200), (17, 3, 5)])
def test_products_by_onednn_equal_torchs(shape: tuple[int, int, int]) -> None:
    """Forward, gradient of the input, gradient of the weight: the three that a linear layer asks for."""
    rows, inner, outer = shape
    x, w, g = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    for a, b in ((x, w.t()), (x.view(1, rows, inner), w.t()), (g, w), (g.t(), x)):
        torch.testing.assert_close(gemm.matmul(a, b), torch.matmul(a, b), atol=1e-4, rtol=1e-4)


def test_a_product_that_needs_a_gradient_keeps_it() -> None:
    x, w = torch.randn(256, 96), torch.randn(96, 96, requires_grad=True)
    gemm.matmul(x, w).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad, x.sum(0).unsqueeze(1).expand(96, 96), atol=1e-4, rtol=1e-4)


def test_only_megatrons_linear_layers_multiply_by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gemm, "_product", lambda a, b: asked.append("onednn") or torch.einsum("ik,kj->ij", a, b))
    x = torch.randn(256, 128)
    _ = x.matmul(x.t())
    assert asked == []
    from megatron.core.tensor_parallel import layers

    assert layers.torch.matmul is gemm.matmul
    layers.torch.matmul(x, x.t())
    assert asked == ["onednn"]
