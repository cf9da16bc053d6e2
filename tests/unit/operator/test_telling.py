"""What the operator tells about itself and its jobs: health, metrics, log records."""

from __future__ import annotations

import json
import logging

import pytest

from rljob_api.progress import PromptCounts
from rljob_operator.act import Outcome
from rljob_operator.health import Health
from rljob_operator.logs import JsonFormatter, RetryIsNoError, TextFormatter, about
from rljob_operator.metrics import Process, render
from rljob_operator.plan import DeletePod, Plan
from rljob_operator.workqueue import WorkQueue
from rljob_operator.world import World

from .builders import job, running
from .fakes import FakeCluster, FakeRay
from .life import KEY, Operator


def samples(page: str, name: str) -> dict[str, str]:
    """Labels to value of one metric."""
    lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {line.rpartition(" ")[0].removeprefix(name): line.rpartition(" ")[2] for line in lines}


def test_every_series_of_a_job_names_it_and_the_states_of_its_prompts_add_up() -> None:
    prompts = PromptCounts(
        handed_out=36, trained=1, filtered=2, training=3, buffered=4, in_flight=5, pending=6, retryable=7, skipped=8
    )
    page = render([job(running(2, restarts=1, step=7, prompts=prompts.to_wire()))], Process())
    who = 'namespace="default",name="copy"'
    assert samples(page, "rljob_attempt") == {f"{{{who}}}": "2"}
    assert samples(page, "rljob_step") == {f"{{{who}}}": "7"}
    assert samples(page, "rljob_restarts_total") == {f"{{{who}}}": "1"}
    states = samples(page, "rljob_prompts")
    assert sum(map(int, states.values())) == 36
    assert states[f'{{{who},state="skipped"}}'] == "8"
    assert samples(page, "rljob_reward") == {}, "not reported: no series, instead of a zero"


def test_a_job_that_is_gone_has_no_series_and_the_operators_own_stay() -> None:
    page = render([], Process(queued=3, passes={"done": 5}, requests={("GET", "200"): 9}))
    assert "copy" not in page
    assert samples(page, "rljob_operator_queue_length") == {"": "3"}
    assert samples(page, "rljob_operator_passes_total") == {'{result="done"}': "5"}
    assert samples(page, "rljob_operator_api_requests_total") == {'{method="GET",code="200"}': "9"}


def test_each_family_is_declared_once_before_its_samples() -> None:
    page = render([job(running(), name=name) for name in ("a", "b")], Process())
    declared = [line.split()[2:] for line in page.splitlines() if line.startswith("# TYPE")]
    names = [name for name, _ in declared]
    assert len(names) == len(set(names))
    assert all((kind == "counter") == name.endswith("_total") for name, kind in declared)
    assert len(samples(page, "rljob_attempt")) == 2


def test_a_record_tells_its_job_and_attempt_in_both_forms() -> None:
    about(("ns", "copy"), 3)
    record = logging.LogRecord("rljob.act", logging.INFO, "act.py", 1, 'said "%s"', ("x\ny",), None)
    told = json.loads(JsonFormatter().format(record))
    assert (told["namespace"], told["job"], told["attempt"], told["message"]) == ("ns", "copy", 3, 'said "x\ny"')
    assert TextFormatter().format(record).endswith(" [attempt 3]")


def test_a_request_that_kopf_repeats_is_no_error_in_the_log() -> None:
    def kept(name: str, message: str, least: int = logging.INFO) -> str:
        record = logging.LogRecord(name, logging.ERROR, "api.py", 1, message, None, None)
        return record.levelname if RetryIsNoError(least).filter(record) else ""

    repeated = "Request attempt #1/9 failed; will retry: GET x -> APITooManyRequestsError"
    assert kept("kopf._cogs.clients.watching", repeated) == "INFO"
    assert kept("kopf._cogs.clients.watching", repeated, logging.WARNING) == ""
    assert kept("kopf._cogs.clients.watching", repeated.replace("will retry", "escalating")) == "ERROR"
    assert kept("rljob.act", repeated) == "ERROR"


async def test_the_log_tells_each_deletion_once_and_a_counted_attempt_under_its_own_number(
    kube: FakeCluster, ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(TextFormatter().format(record))

    caplog.set_level(logging.INFO, "rljob.act")
    handler = Lines()
    logging.getLogger("rljob.act").addHandler(handler)
    try:
        operator = Operator(kube, ray, preflight=True)
        await operator.step()
        job_ = operator.store.jobs.get(KEY)
        assert job_ is not None
        pod = kube.pods["copy-1-preflight"]["metadata"]
        gone = Plan((DeletePod(pod["name"], pod["uid"]),) * 2)
        await operator.reconciler._actor.act(World(now=kube.now, job=job_), gone, Outcome())
    finally:
        logging.getLogger("rljob.act").removeHandler(handler)
    assert [one for one in told if "attempt 1 is counted" in one and one.endswith(" [attempt 1]")]
    assert len([one for one in told if "copy-1-preflight is deleted" in one]) == 1


def test_waiting_for_the_cluster_is_not_ready_but_no_reason_to_be_restarted() -> None:
    health = Health(WorkQueue(), 300)
    health.waiting = "the API rljob.dev/v1alpha1 does not exist"
    assert health.problems() == []
    assert health.unready() == ["the API rljob.dev/v1alpha1 does not exist"]


def test_a_pass_that_never_ends_is_a_problem_even_where_no_other_job_waits() -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    health = Health(queue, 100_000, lambda: now[0])
    queue.add(("ns", "copy"))
    assert queue.take() == ("ns", "copy")
    now[0] = 500.0
    assert health.problems() == []
    now[0] = 601.0
    assert health.problems() == ["a pass over a job has been going on for 601 s"]
