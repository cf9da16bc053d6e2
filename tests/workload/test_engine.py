"""The resident engine over the trained parameters: the real Megatron classes, in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from rljob_workload.data.builtin import load_builtin
from rljob_workload.megatron import weights
from rljob_workload.megatron.engine import ResidentEngine, engines_built
from rljob_workload.megatron.errors import EngineError, NonFiniteError, WeightsError
from rljob_workload.megatron.policy import Policy
from rljob_workload.megatron.settings import engine_settings, model_settings
from rljob_workload.megatron.shim import attention
from rljob_workload.megatron.shim.patch_points import PatchPoint, moved

from .conftest import Loop, copy_spec
from .test_layouts import DENSE, EXPERTS, HYBRID
from .test_layouts import spec_of as shaped

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def uneven(ranks: None) -> Loop:
    """Forty steps on answers of uneven length: more prompts in flight than the engine has slots for."""
    loop = Loop.of(copy_spec("copyv", maxInFlightPrompts=16, maxRequests=64, steps=200))
    for _ in range(40):
        loop.step()
    return loop


def test_the_engine_reads_the_trained_parameters_themselves(uneven: Loop) -> None:
    trained = {parameter.data_ptr() for parameter in uneven.policy.parameters().values()}
    assert uneven.engine.parameter_storages() == trained


def test_answers_span_policy_versions_and_none_is_trained_too_old(uneven: Loop) -> None:
    samples = sum(info.samples for info in uneven.infos)
    spanning = sum(info.spanning for info in uneven.infos)
    assert spanning >= 0.1 * samples, f"{spanning} of {samples}"
    assert max(info.oldest_age for info in uneven.infos) == uneven.spec.algorithm.grpo.max_trajectory_age_steps


def test_one_engine_survives_training_validation_and_saves(tmp_path: Path) -> None:
    before = engines_built()
    loop = Loop.of(copy_spec(steps=50))
    loop.step()
    assert loop.validate(200) == 200
    loop.engine.suspend()
    weights.save(loop.policy, loop.engine.sampler, tmp_path)
    loop.engine.resume(loop.policy.version)
    loop.step()
    assert loop.validate(50) == 50
    assert engines_built() - before == 1


def test_validation_keeps_the_training_answers_that_finish_meanwhile(uneven: Loop) -> None:
    version = uneven.policy.version
    uneven.engine.submit(uneven.rollouts.dispatch(version, 0.0))
    in_flight = uneven.engine.in_flight
    assert in_flight > 0
    answers, training = uneven.engine.validate([])
    assert (answers, training) == ([], [])
    uneven.validate(100)
    for _ in range(3):
        uneven.step()
    uneven.rollouts.ledger.check()


def test_training_and_engine_agree_on_the_log_probs_of_fresh_answers() -> None:
    loop = Loop.of(copy_spec(steps=50))
    for _ in range(5):
        loop.step()
    assert all(info.oldest_age == 0 for info in loop.infos)
    errors = [stats.gen_logprob_error for stats in loop.stats]
    assert errors == [stats.largest_logprob_change for stats in loop.stats]
    assert max(error for error in errors if error is not None) < 1e-5


def test_the_log_prob_error_speaks_of_answers_of_the_trained_weights_only(uneven: Loop) -> None:
    """Where answers of older weights are trained too, the policy has moved under those; the engine's error is still small."""
    mixed = [stats for stats, info in zip(uneven.stats, uneven.infos, strict=True) if info.oldest_age]
    errors = [stats.gen_logprob_error for stats in mixed]
    assert max(error for error in errors if error is not None) < 1e-5 < max(stats.largest_logprob_change for stats in mixed)


def test_the_copy_task_improves_within_eighty_steps() -> None:
    loop = Loop.of(copy_spec())
    for _ in range(80):
        loop.step()
    rewards = [info.reward for info in loop.infos]
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert last > 1.5 * first, f"{first:.3f} -> {last:.3f}"


def test_a_loaded_policy_continues_exactly_like_the_saved_one(uneven: Loop, tmp_path: Path) -> None:
    """Also the optimizer's step counts: shared ones change the losses without a word."""
    uneven.engine.suspend()
    weights.save(uneven.policy, uneven.engine.sampler, tmp_path)
    other = Policy(dataclasses.replace(uneven.policy.settings, seed=99))
    sampler = torch.Generator()
    weights.load(other, sampler, tmp_path)
    assert torch.equal(sampler.get_state(), uneven.engine.sampler.get_state())
    for name, parameter in uneven.policy.parameters().items():
        assert torch.equal(parameter, other.parameters()[name]), name

    def losses(policy: Policy) -> list[tuple[float, float]]:
        policy.enter_train()
        stats = [
            policy.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
            for batch in uneven.batches[:3]
        ]
        policy.enter_generate()
        return [(s.loss, s.grad_norm) for s in stats]

    assert losses(uneven.policy) == losses(other)
    uneven.engine.resume(uneven.policy.version)


def test_a_changed_learning_rate_loads_and_is_the_one_that_trains(uneven: Loop, tmp_path: Path) -> None:
    uneven.engine.suspend()
    weights.save(uneven.policy, uneven.engine.sampler, tmp_path)
    uneven.engine.resume(uneven.policy.version)
    other = Policy(dataclasses.replace(uneven.policy.settings, learning_rate=0.0))
    weights.load(other, torch.Generator(), tmp_path)
    before = {name: parameter.clone() for name, parameter in other.parameters().items()}
    batch = uneven.batches[0]
    other.enter_train()
    other.train_step(batch.rows, longest=batch.longest, answer_tokens=batch.answer_tokens)
    for name, parameter in other.parameters().items():
        assert torch.equal(parameter, before[name]), name
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.0}


def test_overwritten_weights_are_one_line_with_the_cause(uneven: Loop, tmp_path: Path) -> None:
    uneven.engine.suspend()
    weights.save(uneven.policy, uneven.engine.sampler, tmp_path)
    uneven.engine.resume(uneven.policy.version)
    for path in (tmp_path / weights.WEIGHTS).glob("*.distcp"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(WeightsError, match=r"cannot load the weights in .*: UnpicklingError: ") as caught:
        weights.load(Policy(uneven.policy.settings), None, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_save_on_a_full_volume_says_so(uneven: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's writer names no cause, and its exception is none that `except Exception` sees."""
    from megatron.core import dist_checkpointing

    def fail(*_: object, **__: object) -> None:
        raise CheckpointException("write", {0: (RuntimeError("Worker failure"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(dist_checkpointing, "save", fail)
    with pytest.raises(WeightsError, match=r": RuntimeError: Worker failure$"):
        weights.save(uneven.policy, None, tmp_path)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    (tmp_path / weights.WEIGHTS).rmdir()
    with pytest.raises(WeightsError, match=r"No space left on device \(4,096 bytes are free"):
        weights.save(uneven.policy, None, tmp_path)


def test_weights_that_compute_no_numbers_are_neither_saved_nor_sampled_from(tmp_path: Path) -> None:
    loop = Loop.of(copy_spec(steps=50, learningRate="1e9"))
    loop.step()
    loop.engine.suspend()
    with pytest.raises(NonFiniteError, match="the weights of step 1 are not saved: the next step with them has loss nan"):
        weights.save(loop.policy, loop.engine.sampler, tmp_path)
    assert list(tmp_path.iterdir()) == []
    loop.engine.resume(loop.policy.version)
    with pytest.raises(NonFiniteError, match="sampling with the weights of step 1"):
        loop.step()


def test_trying_the_weights_changes_nothing(uneven: Loop) -> None:
    before = {name: parameter.clone() for name, parameter in uneven.policy.parameters().items()}
    random = torch.get_rng_state()
    uneven.engine.suspend()
    uneven.policy.check_usable()
    uneven.engine.resume(uneven.policy.version)
    assert torch.equal(torch.get_rng_state(), random)
    for name, parameter in uneven.policy.parameters().items():
        assert torch.equal(parameter, before[name]), name


def test_every_slot_can_take_a_longest_prompt_at_once() -> None:
    """Megatron pads a step's tokens to a multiple of 64, which 96 prompts of 5 tokens are not."""
    loop = Loop.of(copy_spec(steps=50, maxRequests=96))
    assert loop.validate(96) == 96


def test_a_cache_too_small_for_one_request_is_refused_with_both_sizes() -> None:
    spec = copy_spec(steps=50)
    task = load_builtin(str(spec.data.builtin))
    settings = dataclasses.replace(engine_settings(spec, task), kv_bytes=1024)
    with pytest.raises(EngineError, match=r"kvCache.size is 1024 bytes; one request of 16 tokens needs \d+"):
        ResidentEngine(Policy(model_settings(spec)), settings, task.tokenizer)


@pytest.mark.parametrize(("model", "attention"), [(DENSE, [0, 2]), (EXPERTS, [0, 2]), (HYBRID, [0, 2, 4])])
def test_the_cache_has_room_for_attention_layers_and_for_no_other(model: str, attention: list[int]) -> None:
    """Megatron would set memory aside for feed-forward layers too, since the model is a hybrid one without Mamba."""
    spec = shaped(model, learningRate="0")
    loop = Loop.of(spec)
    context, shape = loop.engine._engine.context, loop.policy.settings.shape
    assert context.layer_map == {place: number for number, place in enumerate(attention)}
    width = (shape.query_groups or 0) * shape.hidden_size // shape.attention_heads
    block = 2 * 4 * len(attention) * context.block_size_tokens * width  # keys and values, float32
    assert loop.engine.block_bytes == block
    kept = context.kv_block_allocator.total_count * block
    assert loop.engine.cache_bytes == kept <= engine_settings(spec, loop.task).kv_bytes < kept + block
    for _ in range(2):
        loop.step()
    assert loop.stats[-1].largest_logprob_change < 1e-5


def test_micro_batches_do_not_change_the_step() -> None:
    """Means are over all answer tokens of a step, however it is cut."""
    results = []
    for size in (64, 16):
        loop = Loop.of(copy_spec(microBatchSize=size, steps=50))
        for _ in range(2):
            loop.step()
        results.append([(s.loss, s.entropy, s.grad_norm) for s in loop.stats])
    assert results[0] == [pytest.approx(part, rel=1e-4) for part in results[1]]


def test_a_loss_that_is_no_number_ends_with_its_step_named() -> None:
    loop = Loop.of(copy_spec(steps=50))
    loop.step()
    rows = tuple(row._replace(advantage=float("nan")) for row in loop.batches[0].rows)
    with pytest.raises(NonFiniteError, match="training step 2: loss nan"):
        loop.train(dataclasses.replace(loop.batches[0], rows=rows))


def test_the_shim_finds_everything_that_it_replaces_in_this_megatron() -> None:
    assert moved() == []


def test_a_moved_patch_point_is_named() -> None:
    points = (
        PatchPoint("megatron.core.transformer.attention", "flash_attn_vanished"),
        PatchPoint("megatron.core.vanished", "x"),
        PatchPoint("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", ("state",)),
    )
    assert [problem.split(" takes")[0] for problem in moved(points)] == [
        "megatron.core.transformer.attention has no flash_attn_vanished",
        "megatron.core.vanished does not exist",
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    ]


def test_only_megatron_sees_the_other_torch() -> None:
    import megatron.core.tensor_parallel.random as inside

    assert inside.torch is not torch
    assert inside.torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"


@pytest.mark.parametrize("queries", [1, 3])
def test_the_attention_stand_in_equals_plain_attention(queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, key_heads, width, block = 4, 2, 8, 4
    lengths = torch.tensor([5, 9, 3])
    table = torch.tensor([[4, 0, 7], [1, 2, 3], [6, -1, -1]])
    keys, values = (torch.randn(8, block, key_heads, width, generator=generator) for _ in range(2))
    q = torch.randn(3, queries, heads, width, generator=generator)
    decoded = attention.flash_attn_with_kvcache(q, keys, values, lengths, causal=True, block_table=table)
    starts = torch.arange(4) * queries
    packed = attention.flash_attn_varlen_func(
        q.flatten(0, 1),
        keys,
        values,
        starts,
        torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        queries,
        9,
        causal=True,
        block_table=table,
    )
    for request, length in enumerate(lengths.tolist()):
        pages = table[request, : -(-length // block)]
        k, v = (cache[pages].flatten(0, 1)[:length].repeat_interleave(2, 1) for cache in (keys, values))
        for query in range(queries):
            seen = length - queries + query + 1
            scores = torch.einsum("hd,lhd->hl", q[request, query], k[:seen]) / width**0.5
            expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), v[:seen])
            torch.testing.assert_close(decoded[request, query], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(packed.view_as(decoded)[request, query], expected, atol=1e-5, rtol=1e-5)


def test_tokens_of_unfinished_answers_can_be_asked_for_while_they_are_generated() -> None:
    """What a stall report says of the oldest prompts."""
    loop = Loop.of(copy_spec(steps=50))
    assert loop.engine.tokens_in_flight() == {}
    first, *_ = loop.rollouts.dispatch(0, 0.0)
    loop.engine.submit([first])
    assert loop.engine.tokens_in_flight() == {first.tag: 0}
    seen = []
    while loop.engine.in_flight:
        loop.engine.step()
        seen.append(loop.engine.tokens_in_flight().get(first.tag, 0))
    # Every answer of copy3 has three tokens, and the engine has a slot for all of them.
    assert seen == [first.answers, 2 * first.answers, 0]
