"""The webhook's verdict: what it refuses, what it warns of, and what it leaves alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rljob_operator.webhook_review import MAX_WARNING, ReviewError, review

from .builders import SPEC


def job(name: str = "copy", attempt: int = 0, **spec: Any) -> dict[str, Any]:
    made = {"metadata": {"name": name}, "spec": {**copy.deepcopy(SPEC), **spec}}
    return {**made, "status": {"attempt": attempt}} if attempt else made


def ask(new: Any, old: Any = None, **request: Any) -> dict[str, Any]:
    asked = {
        "uid": "42",
        "kind": {"group": "rljob.dev", "version": "v1alpha1", "kind": "RLJob"},
        "operation": "CREATE" if old is None else "UPDATE",
        "object": new,
        "oldObject": old,
        **request,
    }
    answer = review({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked})
    assert answer["apiVersion"] == "admission.k8s.io/v1"
    assert answer["kind"] == "AdmissionReview"
    assert answer["response"]["uid"] == "42"
    return dict(answer["response"])


def test_a_good_job_is_allowed_without_a_word() -> None:
    assert ask(job()) == {"uid": "42", "allowed": True}


def test_every_fault_is_in_one_message() -> None:
    wrong = job(
        "4copy", parallelism={"tensor": 5}, generation={"maxNewTokens": 9, "maxSequenceLength": 9, "parallelism": {"tensor": 4}}
    )
    answer = ask(wrong)
    assert not answer["allowed"]
    assert answer["status"]["code"] == 422
    message = answer["status"]["message"]
    assert message.count("\n* ") >= 5
    for words in (
        "'4copy' must start",
        "world size 1",
        "4 differs from training's spec.parallelism.tensor 5",
        "9 leaves no room",
    ):
        assert words in message


def test_what_is_allowed_but_doubtful_is_a_warning() -> None:
    answer = ask(job(generation={"maxNewTokens": 4, "maxSequenceLength": 16, "parallelism": {"context": 2}}))
    assert answer["allowed"]
    assert answer["warnings"] == [
        "spec.generation.parallelism.context: 2 has no effect: decoding does not split the sequence; training's "
        "spec.parallelism.context is 1"
    ]


def test_what_this_version_does_not_honour_is_stored_with_a_warning() -> None:
    answer = ask(job(queueName="team"))
    assert answer["allowed"]
    assert answer["warnings"] == ["spec.queueName: team is not supported yet by this version; unset is"]


def test_a_warning_fits_into_what_kubectl_shows() -> None:
    answer = ask(job(queueName="q" * 63, data={"jsonl": {"path": "/x" * 500}}))
    assert all(len(text) <= MAX_WARNING for text in answer["warnings"])


def test_an_edit_of_a_job_that_has_ended_is_warned_of_unless_it_still_counts() -> None:
    old = {**job(), "status": {"attempt": 1, "finishTime": "2026-11-29T12:00:00Z"}}
    answer = ask({**old, "spec": {**old["spec"], "suspend": True}}, old)
    assert answer["allowed"]
    (warning,) = answer["warnings"]
    assert warning.startswith("spec: the job has ended, and an edit of its spec changes nothing but ttlSecondsAfterFinished")
    assert "delete the RLJob and create it again" in warning
    assert "warnings" not in ask({**old, "spec": {**old["spec"], "ttlSecondsAfterFinished": 60}}, old)
    assert "warnings" not in ask({**job(suspend=True), "status": {"attempt": 1}}, job(attempt=1))


def test_a_change_is_judged_by_what_it_changes() -> None:
    old = job(parallelism={"tensor": 5})  # as an older version let it in
    assert ask({**old, "spec": {**old["spec"], "suspend": True}}, old)["allowed"]
    assert ask({**old, "metadata": {"name": "copy", "labels": {"a": "b"}}}, old) == {"uid": "42", "allowed": True}
    answer = ask({**old, "spec": {**old["spec"], "parallelism": {"tensor": 3}}}, old)
    assert "tensor 3" in answer["status"]["message"]


def test_sizes_change_before_the_first_attempt_or_while_suspended() -> None:
    batch = {"grpo": {**SPEC["algorithm"]["grpo"], "promptsPerStep": 16}}
    assert ask(job(algorithm=batch), job())["allowed"]
    assert ask(job(algorithm=batch, attempt=2), job(attempt=2, suspend=True))["allowed"]
    message = ask(job(algorithm=batch, attempt=2), job(attempt=2))["status"]["message"]
    assert message.startswith("spec.algorithm.grpo.promptsPerStep: can't change while attempts run (status.attempt 2)")


def test_a_models_shape_never_changes() -> None:
    shape = {"layers": 4, "hiddenSize": 64, "attentionHeads": 4, "ffnHiddenSize": 128, "vocabSize": 64}
    message = ask(job(model={"preset": "tiny", "shape": shape}), job(suspend=True))["status"]["message"]
    assert message == "spec.model.shape: can never change: create a new RLJob for another model"


@pytest.mark.parametrize("request_", [{"operation": "DELETE"}, {"operation": "CONNECT"}, {"subResource": "status"}])
def test_other_requests_are_none_of_its_business(request_: dict[str, Any]) -> None:
    assert ask(job(parallelism={"tensor": 5}), None, **request_)["allowed"]


def test_a_job_that_is_being_deleted_is_let_go() -> None:
    old = job(parallelism={"tensor": 5})
    going = job(parallelism={"tensor": 7})
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert ask(going, old)["allowed"]


def test_a_generated_name_is_judged_by_its_prefix() -> None:
    made = job()
    made["metadata"] = {"generateName": "copy-"}
    assert ask(made)["allowed"]
    made["metadata"] = {"generateName": "c" * 36}
    assert "41 characters" in ask(made)["status"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "x",
        {},
        {"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "1"}},
        {"apiVersion": "admission.k8s.io/v1"},
    ],
)
def test_what_is_no_review_is_refused_as_such(body: Any) -> None:
    with pytest.raises(ReviewError):
        review(body)


def test_a_review_of_another_kind_is_no_answer_at_all() -> None:
    with pytest.raises(ReviewError, match="asked about 'Pod' of ''"):
        ask(job(), kind={"group": "", "kind": "Pod"})
