"""A fake cluster, a fake Ray, and an operator between them."""

from __future__ import annotations

import pytest

from .builders import spec
from .fakes import FakeCluster, FakeRay
from .life import Operator


@pytest.fixture
def kube() -> FakeCluster:
    return FakeCluster(spec())


@pytest.fixture
def ray(kube: FakeCluster) -> FakeRay:
    return FakeRay(kube)


@pytest.fixture
def operator(kube: FakeCluster, ray: FakeRay) -> Operator:
    return Operator(kube, ray)
