"""Tasks and drivers that take longer than staged ledgers last: a healthy job loses nothing. Without a session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from magnetar.spark.options import WriteOptions
from magnetar.spark.sink import attach, write_task
from support.service import Service
from support.spark_topics import Topics

from .conftest import arguments

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

TTL_S = 1.5


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """Staged ledgers expire soon."""
    settings = (f"broker.staged_ttl_ms={round(TTL_S * 1000)}", "broker.maintenance_interval_s=0.1")
    service = Service(tmp_path / "data", arguments=arguments(settings))
    service.start()
    yield service
    service.stop()


def batch(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary())})


def slow(*values: bytes) -> Iterator[pa.RecordBatch]:
    """As behind a sort: the first row comes when all others have been looked at."""
    time.sleep(2 * TTL_S)
    yield batch(*values)


def test_a_task_that_waits_for_its_first_row_keeps_what_others_wrote(
    service: Service, topics: Topics
) -> None:
    options = WriteOptions.parse({"service_url": service.url, "topic": "slow"})
    topics.create("slow")
    written = [write_task(options, "q", 0, rows) for rows in (iter([batch(b"a")]), slow(b"b"))]
    assert attach(options, written)
    assert topics.values("slow") == [b"a", b"b"]


def test_a_writer_says_how_long_its_ledgers_wait_for_the_commit(service: Service, topics: Topics) -> None:
    topics.create("patient")
    for staged_ttl_s, lives in (("0", False), ("30", True)):
        given = {"service_url": service.url, "topic": "patient", "staged_ttl_s": staged_ttl_s}
        options = WriteOptions.parse(given)
        written = write_task(options, f"q{staged_ttl_s}", 0, iter([batch(b"a")]))
        asyncio.run(asyncio.sleep(2 * TTL_S))  # the driver plans, or collects garbage
        if lives:
            assert attach(options, [written])
        else:
            with pytest.raises(Exception, match="was not renewed in time"):
                attach(options, [written])
    assert topics.values("patient") == [b"a"]
