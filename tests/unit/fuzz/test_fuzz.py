"""Damaged manifests against the command line and the webhook: an answer each time, never a traceback, and in bounded time.

RLJOB_FUZZ sets how many (`make test-slow`: many more), RLJOB_FUZZ_SEED which.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from rljob_api.manifest import judge
from rljob_cli.main import main
from rljob_operator.webhook_review import ReviewError, review

from .mutate import Mutator

COUNT = int(os.environ.get("RLJOB_FUZZ", "10000"))
REVIEWS, TEXTS = COUNT * 4 // 5, COUNT // 5
SEED = int(os.environ.get("RLJOB_FUZZ_SEED", "1"))
#: Of processor time, for one. They take milliseconds; what grows with a power of the text takes more than this.
SLOWEST_SECONDS = 30.0
MEMORY_MIB = 200


def request(job: Any, operation: str = "CREATE", old: Any = None) -> dict[str, Any]:
    kind = {"group": "rljob.dev", "version": "v1alpha1", "kind": "RLJob"}
    asked = {"uid": "u", "kind": kind, "operation": operation, "object": job, "oldObject": old}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.timeout(60 + COUNT // 50)
def test_the_webhook_answers_every_damaged_manifest() -> None:
    mutator = Mutator(SEED)
    before, slowest = peak_mib(), 0.0
    allowed = 0
    for number in range(REVIEWS):
        job, old = mutator.manifest(), mutator.manifest()
        began = time.process_time()
        try:
            answer = review(request(job, "UPDATE", old) if number % 2 else request(job))
        except ReviewError:
            continue
        slowest = max(slowest, time.process_time() - began)
        text = json.dumps(answer)
        assert len(text) < 60_000
        allowed += answer["response"]["allowed"]
        if not answer["response"]["allowed"]:
            assert answer["response"]["status"]["message"]
    assert slowest < SLOWEST_SECONDS
    assert peak_mib() - before < MEMORY_MIB
    assert REVIEWS // 50 < allowed < REVIEWS


@pytest.mark.timeout(60 + COUNT // 50)
def test_the_command_line_answers_every_damaged_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mutator = Mutator(SEED + 1)
    before, slowest = peak_mib(), 0.0
    statuses = dict.fromkeys((0, 1, 2), 0)
    file = tmp_path / "job.yaml"
    for number in range(TEXTS):
        file.write_bytes(mutator.text().encode("utf-8", "surrogatepass"))
        began = time.process_time()
        status = main(["validate", str(file), *(["-o", "json"] if number % 2 else [])])
        slowest = max(slowest, time.process_time() - began)
        statuses[status] += 1
        shown = capsys.readouterr()
        assert "Traceback" not in shown.out + shown.err
        if status == 2:
            assert shown.err.count("\n") == 1
        elif number % 2:
            assert any(row["severity"] == "error" for row in json.loads(shown.out)) == bool(status)
        shown.out.encode()
    assert slowest < SLOWEST_SECONDS
    assert peak_mib() - before < MEMORY_MIB
    assert min(statuses.values()) > TEXTS // 100, statuses


def test_aliases_that_multiply_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stand for 10**39 names: whoever follows them never gets here."""
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 40)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    assert main(["validate", str(file)]) == 2
    assert "aliases multiply" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000, "\x1b[31m", "", "名"])
def test_a_name_of_any_kind_is_only_refused(name: str) -> None:
    assert judge(name, None).findings[0].rule == "name"


def test_a_text_without_end_is_not_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "/dev/zero"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
