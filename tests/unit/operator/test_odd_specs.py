"""Whatever a spec holds, its owner finds words about it in the status; and so for defects of the operator itself."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from rljob_api.manifest import MAX_DEPTH, MAX_LENGTH
from rljob_operator.decide import decide, defect
from rljob_operator.plan import Plan
from rljob_operator.service import Service
from rljob_operator.settings import Settings
from rljob_operator.world import Unreachable, World

from .builders import SPEC, apply, at, job, outcome, running, spec, stamp, training, world
from .fakes import FakeCluster, FakeRay, gone
from .life import ACCESS, KEY, Operator


def fresh(template: Any) -> World:
    return world(0, job=job(spec={**SPEC, "trainer": {**SPEC["trainer"], "template": template}}), clusters=(), pods=())


def nested(depth: int, as_list: bool) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return {"a": value}


PATH = "spec.trainer.template.spec"


@pytest.mark.parametrize(
    ("pod_spec", "message"),
    [
        ({"volumes": [{"name": ["x"]}]}, f"{PATH}.volumes[0].name: must be a string; found ['x']"),
        ({"volumes": [{"name": 5}]}, f"{PATH}.volumes[0].name: must be a string; found 5"),
        (
            {"containers": [{"name": "trainer", "env": [{"name": {"a": 1}}]}]},
            f"{PATH}.containers[trainer].env[0].name: must be a string; found {{'a': 1}}",
        ),
        (
            {"containers": [{"name": "trainer", "volumeMounts": [{"mountPath": []}]}]},
            f"{PATH}.containers[trainer].volumeMounts[0].mountPath: must be a string; found []",
        ),
        ({"containers": [{"name": ["trainer"]}]}, f"{PATH}.containers[0].name: must be a string; found ['trainer']"),
    ],
)
def test_a_name_that_is_no_text_is_a_finding(pod_spec: dict[str, Any], message: str) -> None:
    plan, conditions = outcome(fresh({"spec": pod_spec}))
    assert conditions["Validated"] == ("False", "SpecUnreadable", message)
    assert plan.actions == ()


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("depth", [98, 260, 1000, 100_000])
def test_a_spec_that_is_nested_too_deep_is_a_finding(depth: int, as_list: bool) -> None:
    plan, conditions = outcome(fresh(nested(depth, as_list)))
    assert conditions["Validated"] == ("False", "SpecUnreadable", f"spec: is nested more than {MAX_DEPTH} levels deep")
    assert plan.actions == ()


def test_a_spec_that_no_environment_variable_can_carry_is_a_finding() -> None:
    plan, conditions = outcome(fresh({"spec": {"containers": [{"name": "logs", "args": ["x" * MAX_LENGTH]}]}}))
    assert conditions["Validated"][:2] == ("False", "SpecUnreadable")
    assert f"more than the {MAX_LENGTH} that an environment variable of its pods can carry" in conditions["Validated"][2]
    assert plan.actions == ()


def test_a_template_as_deep_as_any_may_be_is_taken() -> None:
    assert outcome(fresh(nested(96, False)))[1]["Validated"][1] == "Valid"


# ---- Defects ----


def test_a_defect_is_in_the_status_and_leaves_alone_what_runs() -> None:
    before = training()
    plan = defect(before, TypeError("unhashable\ntype: 'list'"))
    assert (plan.actions, plan.events) == ((), ())
    after = apply(plan, before)
    (told,) = [one for one in after.conditions if one.type == "Succeeded"]
    assert (told.status, told.reason) == ("Unknown", "OperatorError")
    assert "TypeError: unhashable type: 'list'" in told.message
    assert (after.attempt, after.attempt_start_time) == (1, stamp(0))


def test_a_defect_takes_no_verdict_back() -> None:
    finished = world(60, {**running(), "finishTime": stamp(50)})
    assert defect(finished, ValueError("x")) == Plan()


@pytest.mark.parametrize("writable", [True, False])
async def test_the_service_writes_a_defect_into_the_status_and_goes_on(writable: bool) -> None:
    kube = FakeCluster(spec())
    service = Service(cast(Any, kube), Settings(), ACCESS, with_kuberay=True)
    kube.tell(service.store)
    passes = asyncio.Queue[None]()

    async def broken(_: Any) -> float | None:
        await passes.put(None)
        raise TypeError("unhashable type: 'list'")

    service._reconciler.reconcile = broken  # type: ignore[method-assign]
    if not writable:
        kube.fail_next = [gone()]
    worker = asyncio.create_task(service._work())
    service.queue.add(KEY)
    try:
        async with asyncio.timeout(10):
            await passes.get()
            await passes.get()
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    if writable:
        assert "TypeError: unhashable type" in kube.condition("Succeeded")["message"]
        assert kube.status_writes == 1


# ---- Words that change with every answer ----


def test_words_that_change_with_every_answer_are_written_now_and_then_only() -> None:
    status: dict[str, Any] = running()
    writes = 0
    for seconds in range(60, 120):
        answer = Unreachable(f"500: at {seconds}: internal error")
        moment = training(seconds, job=job(status), driver=answer, written=at(60 + 15 * ((seconds - 61) // 15)))
        plan = decide(moment)
        if plan.status_patch:
            writes += 1
            status = apply(plan, moment).to_wire()
    assert writes <= 5


async def test_the_log_tells_what_was_done_not_what_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rljob")
    kube = FakeCluster(spec())
    operator = Operator(kube, FakeRay(kube))
    create = kube.create_cluster

    async def refuse(*_: Any) -> Any:
        raise gone()

    kube.create_cluster = refuse  # type: ignore[method-assign]
    await operator.step()
    assert "attempt 1 is counted" in caplog.text
    assert "is created" not in caplog.text
    kube.create_cluster = create  # type: ignore[method-assign]
    await operator.step()
    assert "default/copy: RayCluster copy-1 is created" in caplog.text
