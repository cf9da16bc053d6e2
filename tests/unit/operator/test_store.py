"""The store keeps the newest, remembers departed pods, and drops ghosts."""

from __future__ import annotations

from typing import Any

from rljob_operator.api import Listing
from rljob_operator.store import Store

KEY = ("default", "copy")


def obj(name: str, version: int, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "default",
            "name": name,
            "uid": name,
            "resourceVersion": str(version),
            "creationTimestamp": "2026-11-29T12:00:00Z",
            "labels": {"rljob.dev/job": "copy", **labels},
        }
    }


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = Store()
    store.take("rljobs", obj("copy", 9) | {"spec": {"new": 1}})
    store.take("rljobs", obj("copy", 8) | {"spec": {"old": 1}})
    kept = store.jobs.get(KEY)
    assert kept is not None
    assert kept.spec == {"new": 1}


def test_children_concern_the_job_of_their_label() -> None:
    store = Store()
    assert store.take("rayclusters", obj("copy-1", 1)) == KEY
    assert [one.name for one in store.clusters.owned_by(KEY)] == ["copy-1"]
    stray = obj("stray", 2)
    del stray["metadata"]["labels"]
    assert store.take("pods", stray) is None


def test_a_deleted_pod_is_remembered_as_it_was_last_seen() -> None:
    store = Store()
    store.take("rljobs", obj("copy", 1))
    pod = obj("copy-1-head", 3, **{"ray.io/cluster": "copy-1", "ray.io/node-type": "head"})
    sidecar = {"name": "logs", "state": {"running": {}}}
    pod["status"] = {
        "containerStatuses": [sidecar, {"name": "trainer", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]
    }
    store.take("pods", pod)
    store.take("pods", pod, deleted=True)
    assert store.pods.owned_by(KEY) == []
    (gone,) = store.departed(KEY)
    assert (gone.name, gone.head, gone.last_words) == ("copy-1-head", True, "OOMKilled, exit code 137")
    store.forget_departed(KEY)
    assert store.departed(KEY) == []


def test_pods_that_outlive_their_job_are_not_remembered() -> None:
    store = Store()
    store.take("rljobs", obj("copy", 1))
    store.take("rljobs", obj("copy", 1), deleted=True)
    store.take("pods", obj("copy-1-head", 3), deleted=True)
    assert store.departed(KEY) == []


def test_a_complete_list_drops_ghosts_but_not_what_is_newer_than_it() -> None:
    store = Store()
    store.take("rayclusters", obj("ghost", 5))
    store.take("rayclusters", obj("just-created", 50))
    assert store.resync("rayclusters", None, Listing([obj("seen", 7)], "20")) == {KEY}
    assert [one.name for one in store.clusters.owned_by(KEY)] == ["just-created", "seen"]


def test_a_list_of_one_namespace_says_nothing_of_another() -> None:
    store = Store()
    store.take("rljobs", obj("copy", 5))
    store.resync("rljobs", "other", Listing([], "20"))
    assert store.jobs.get(KEY) is not None
    assert store.resync("rljobs", "default", Listing([], "20")) == {KEY}
    assert store.jobs.get(KEY) is None


def test_pods_that_are_made_anew_for_days_are_not_all_remembered() -> None:
    store = Store()
    store.take("rljobs", obj("copy", 1))
    for number in range(3000):
        store.take("pods", obj(f"copy-1-head-{number}", number + 2), deleted=True)
    departed = store.departed(KEY)
    assert len(departed) < 2100
    assert departed[-1].name == "copy-1-head-2999"
