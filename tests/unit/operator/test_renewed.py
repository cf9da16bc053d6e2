"""An edit before an attempt's pods were ready: nobody waits out a wrong image, and what reaches a run disturbs none."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_operator.decide import decide
from rljob_operator.plan import DeleteCluster, SubmitDriver

from .builders import UNKNOWN, apply, cluster, counted, job, kinds, outcome, pod, running, spec, training, world
from .fakes import FakeCluster, FakeRay, later
from .life import Operator, state

EDIT = spec(trainer__image="example.test/mended:1")


def starting(edited: dict[str, Any], **changes: Any) -> Any:
    held = (pod(ready=False, trouble="ImagePullBackOff: not found"), pod("worker", ready=False))
    return world(20, **{"job": job(counted(), edited), "clusters": (cluster(provisioned=None),), "pods": held, **changes})


def test_an_attempt_without_ready_pods_gives_way_to_an_edit_and_is_no_failure() -> None:
    before = starting(EDIT)
    plan, conditions = outcome(before)
    after = apply(plan, before)
    assert kinds(plan) == [DeleteCluster]
    assert (after.attempt_end_time is not None, after.last_failure, after.restarts) == (True, None, 0)
    words = "the spec was edited before the pods of attempt 1 were ready; attempt 2 begins with it"
    assert conditions["Succeeded"] == ("Unknown", "Restarting", words)
    assert [(one.type, one.reason, one.message) for one in plan.events if one.reason != "Valid"] == [
        ("Normal", "AttemptRenewed", words)
    ]


@pytest.mark.parametrize(
    "edit",
    [
        spec(),
        spec(deadlines__provisioningSeconds=900),
        spec(failurePolicy={"maxRestarts": 1}),
        spec(prompts__maxSkipped=9),
        spec(ttlSecondsAfterFinished=9),
        spec(generation__parallelism={"tensor": 2}),
    ],
    ids=["none", "deadlines", "failurePolicy", "maxSkipped", "ttl", "invalid"],
)
def test_an_edit_that_reaches_a_run_or_is_refused_renews_nothing(edit: dict[str, Any]) -> None:
    plan, conditions = outcome(starting(edit))
    assert plan.actions == ()
    assert conditions["Succeeded"][1:] == ("Provisioning", "waiting for pods; copy-1-head: ImagePullBackOff: not found")


def test_an_attempt_whose_pods_were_ready_goes_on_with_the_spec_that_it_began_with() -> None:
    assert kinds(decide(world(job=job(running(), EDIT), driver=UNKNOWN))) == [SubmitDriver]
    assert decide(training(job=job(running(), EDIT))).actions == ()


async def test_a_mended_image_is_taken_at_once_without_backoff(operator: Operator, kube: FakeCluster, ray: FakeRay) -> None:
    await operator.step()
    kube.kuberay_makes_pods()
    await operator.step()
    kube.edit("copy", EDIT)
    await operator.step()
    kube.pods_without_cluster_go()
    later(kube, 1)
    await operator.step()
    assert (list(kube.clusters), state(kube), kube.status()["attempt"]) == (["copy-2"], "Provisioning", 2)
    head = kube.clusters["copy-2"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "example.test/mended:1"
    assert len(kube.secrets) == 1
