"""What the watches delivered: the newest version of each object, with the pods of an attempt remembered after they are gone.

The store answers what exists; it is never trusted for what does *not* exist (the reconciler asks the API server then).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rljob_api import names

from .api import Listing, Object
from .reading import read_cluster, read_job, read_pod
from .world import Cluster, Job, Key, Pod

_MOST_DEPARTED = 2048
"""Of one attempt: more than a run has pods (1,025)."""


@dataclass(frozen=True)
class _Entry[T]:
    version: int
    owner: Key
    value: T


class Table[T]:
    """Objects of one kind by namespace and name, and by the job that they belong to."""

    def __init__(self) -> None:
        self._rows: dict[Key, _Entry[T]] = {}
        self._by_owner: dict[Key, set[Key]] = {}

    def put(self, key: Key, owner: Key, version: int, value: T) -> bool:
        """Keep the newer one. Returns whether this one was."""
        row = self._rows.get(key)
        if row is not None and row.version > version:
            return False
        if row is not None and row.owner != owner:
            self.drop(key)
        self._rows[key] = _Entry(version, owner, value)
        self._by_owner.setdefault(owner, set()).add(key)
        return True

    def drop(self, key: Key) -> Key | None:
        """Forget one; returns the job that it belonged to."""
        row = self._rows.pop(key, None)
        if row is None:
            return None
        siblings = self._by_owner[row.owner]
        siblings.discard(key)
        if not siblings:
            del self._by_owner[row.owner]
        return row.owner

    def get(self, key: Key) -> T | None:
        """One, if known."""
        row = self._rows.get(key)
        return row.value if row is not None else None

    def owned_by(self, owner: Key) -> list[T]:
        """All that belong to one job, by name."""
        return [self._rows[key].value for key in sorted(self._by_owner.get(owner, ()))]

    def ghosts(self, known: Iterable[Key], version: int) -> list[Key]:
        """Keys that a complete list of that version does not have, though they are not newer than it."""
        listed = set(known)
        return [key for key, row in self._rows.items() if key not in listed and row.version <= version]

    def keys_now(self) -> list[Key]:
        """All keys."""
        return list(self._rows)


class Store:
    """Jobs, their RayClusters and their pods."""

    def __init__(self) -> None:
        self.jobs: Table[Job] = Table()
        self.clusters: Table[Cluster] = Table()
        self.pods: Table[Pod] = Table()
        self._departed: dict[Key, dict[str, Pod]] = {}

    def take(self, kind: str, obj: Object, *, deleted: bool = False) -> Key | None:
        """Take one object of a watch or of an answer; returns the key of the job that it concerns."""
        metadata = obj["metadata"]
        key = (metadata["namespace"], metadata["name"])
        owner = key if kind == "rljobs" else _owner(metadata)
        if owner is None:
            return None
        if deleted:
            self._delete(kind, key, owner, obj)
            return owner
        self._put(kind, key, owner, obj)
        return owner

    def resync(self, kind: str, namespace: str | None, listing: Listing) -> set[Key]:
        """Take a complete list; returns the jobs that it concerns, those of ghosts (deletions nobody told) included."""
        concerned = {owner for obj in listing.items if (owner := self.take(kind, obj)) is not None}
        tables: dict[str, Table[Any]] = {"rljobs": self.jobs, "rayclusters": self.clusters, "pods": self.pods}
        table = tables[kind]
        known = [(obj["metadata"]["namespace"], obj["metadata"]["name"]) for obj in listing.items]
        for key in table.ghosts(known, int(listing.resource_version)):
            if namespace is None or key[0] == namespace:
                owner = table.drop(key)
                if owner is not None:
                    concerned.add(owner)
        return concerned

    def departed(self, job: Key) -> list[Pod]:
        """Pods of a job that are gone, as they were last seen."""
        return list(self._departed.get(job, {}).values())

    def forget_departed(self, job: Key) -> None:
        """A new attempt began, or the job is gone."""
        self._departed.pop(job, None)

    def _put(self, kind: str, key: Key, owner: Key, obj: Object) -> None:
        version = int(obj["metadata"]["resourceVersion"])
        if kind == "rljobs":
            self.jobs.put(key, owner, version, read_job(obj))
        elif kind == "rayclusters":
            self.clusters.put(key, owner, version, read_cluster(obj))
        else:
            self.pods.put(key, owner, version, read_pod(obj))

    def _delete(self, kind: str, key: Key, owner: Key, obj: Object) -> None:
        if kind == "rljobs":
            self.jobs.drop(key)
            self.forget_departed(key)
        elif kind == "rayclusters":
            self.clusters.drop(key)
        else:
            self.pods.drop(key)
            if self.jobs.get(owner) is not None:
                gone = self._departed.setdefault(owner, {})
                gone[key[1]] = replace(read_pod(obj), ended=True, ready=False)
                if len(gone) > _MOST_DEPARTED:  # KubeRay makes pods anew for as long as they fail to start
                    del gone[next(iter(gone))]


def _owner(metadata: Object) -> Key | None:
    name = (metadata.get("labels") or {}).get(names.LABEL_JOB)
    return (metadata["namespace"], name) if name else None
