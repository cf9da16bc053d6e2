"""One job's life with the real reconciler over a fake cluster and a fake Ray."""

from __future__ import annotations

import contextlib

from rljob_operator.access import Access
from rljob_operator.api import ApiError, ApiUnreachableError, RayError
from rljob_operator.reconciler import Reconciler
from rljob_operator.settings import Settings
from rljob_operator.store import Store

from .fakes import FakeCluster, FakeRay, later

KEY = ("default", "copy")
ACCESS = Access(b"a key of the tests, long enough to be one")


class Ended(BaseException):
    """The process is killed here."""


class Operator:
    """One process' life; `restart` begins another that remembers nothing."""

    def __init__(self, kube: FakeCluster, ray: FakeRay, *, preflight: bool = False) -> None:
        self.kube, self.ray = kube, ray
        kube.preflight = preflight
        self.appeared = 0
        self.image = "example.test/rljob-operator:1" if preflight else ""
        self.restart()

    def restart(self) -> None:
        self.store = Store()
        self.kube.tell(self.store)
        self.reconciler = Reconciler(
            kube=self.kube,
            ray=self.ray,
            store=self.store,
            settings=Settings(status_seconds=15, preflight_image=self.image),
            access=ACCESS,
            clock=lambda: self.kube.now,
            kuberay_present=self.kube.kuberay,
            on_kuberay=self._kuberay_came,
        )

    def _kuberay_came(self) -> None:
        self.appeared += 1

    async def step(self, *, told: bool = True) -> float | None:
        """One pass; failures of requests are survived, as the service does."""
        if told:
            self.kube.tell(self.store)
        try:
            return await self.reconciler.reconcile(KEY)
        except (ApiError, ApiUnreachableError, RayError):
            return 1.0

    async def count(self) -> None:
        """An attempt is counted, and the process ends before anything is made."""
        event = self.kube.create_event

        async def end(*_: object) -> None:
            raise Ended

        self.kube.create_event = end  # type: ignore[method-assign]
        with contextlib.suppress(Ended):
            await self.step()
        self.kube.create_event = event  # type: ignore[method-assign]
        self.restart()

    async def until_training(self) -> None:
        """From nothing to a running driver."""
        for _ in range(3):
            await self.step()
        self.kube.kuberay_makes_pods()
        later(self.kube, 10)
        await self.step()
        self.kube.pods_get_ready()
        for _ in range(3):
            await self.step()


def state(kube: FakeCluster) -> str:
    return str(kube.condition("Succeeded")["reason"])
