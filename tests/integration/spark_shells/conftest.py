"""Spark as its users start it: programs of their own, each with its JVM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.service import Service
from support.spark_topics import Topics


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests here; each has topics of its own."""
    service = Service(tmp_path_factory.mktemp("service") / "data")
    service.start()
    yield service
    service.stop()


@pytest.fixture
def topics(service: Service) -> Topics:
    """What was written is looked at without Spark."""
    return Topics(service)
