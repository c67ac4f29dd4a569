"""One service whose ledgers are small, and topics of it as DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.service import Service
from support.spark_kit import spark
from support.spark_topics import Topics

__all__ = ["spark"]

# A topic has many ledgers soon, and what nobody needs is gone soon.
SMALL_LEDGERS = (
    "broker.max_ledger_entries=4",
    "broker.min_ledger_age_ms=0",
    "broker.maintenance_interval_s=0.2",
    "broker.max_lease_ms=20000",
    "broker.staged_ttl_ms=60000",
    "broker.attach_min_bytes=1048576",
)


def arguments(settings: tuple[str, ...]) -> list[str]:
    """As the command line wants them."""
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For tests that leave it running; each has topics of its own."""
    data = tmp_path_factory.mktemp("service") / "data"
    service = Service(data, arguments=arguments(SMALL_LEDGERS), pulsar=True)
    service.start()
    yield service
    service.stop()


@pytest.fixture
def topics(service: Service) -> Topics:
    """What the tests do to topics without Spark."""
    return Topics(service)


@pytest.fixture
def read(spark: Any, service: Service) -> Callable[..., Any]:
    """`read("orders", start="latest")`: a DataFrame of a topic."""

    def dataframe(topic: str = "", schema: str = "", **options: str) -> Any:
        reader = spark.read.format("magnetar").option("service_url", service.url).options(**options)
        if topic:
            reader = reader.option("topic", topic)
        return (reader.schema(schema) if schema else reader).load()

    return dataframe


@pytest.fixture
def stream(spark: Any, service: Service) -> Callable[..., Any]:
    """The same for `readStream`."""

    def dataframe(topic: str = "", schema: str = "", **options: str) -> Any:
        reader = spark.readStream.format("magnetar").option("service_url", service.url).options(**options)
        if topic:
            reader = reader.option("topic", topic)
        return (reader.schema(schema) if schema else reader).load()

    return dataframe
