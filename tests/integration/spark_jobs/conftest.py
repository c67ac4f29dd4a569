"""Jobs of the data pipeline on a real Spark session and a real service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from magnetar.client import connect
from support.service import Service
from support.spark_kit import spark

__all__ = ["produce", "service", "spark", "url"]

# Small ledgers, so that a topic of a test has several.
LEDGER_ENTRIES = 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for the tests of a module; each uses topics of its own."""
    running = Service(
        tmp_path_factory.mktemp("service") / "data",
        arguments=(
            "--set",
            f"broker.max_ledger_entries={LEDGER_ENTRIES}",
            "--set",
            "broker.min_ledger_age_ms=0",
        ),
    )
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def url(service: Service) -> str:
    """For the option service_url."""
    return service.url


@pytest.fixture
def produce(url: str) -> Callable[..., None]:
    """produce(topic, [(key, value), (key, value, {named arguments of send}), ...], flush_every=N).

    A flush ends an entry, so `flush_every` messages make one.
    """

    async def run(topic: str, messages: list[tuple[Any, ...]], flush_every: int) -> None:
        async with connect(url) as client, client.create_producer(topic) as producer:
            for number, (key, value, *more) in enumerate(messages, 1):
                producer.send_nowait(value, key=key, **(more[0] if more else {}))
                if number % flush_every == 0:
                    await producer.flush()
            await producer.flush()

    def call(topic: str, messages: list[tuple[Any, ...]], *, flush_every: int = 10) -> None:
        asyncio.run(run(topic, messages, flush_every))

    return call
