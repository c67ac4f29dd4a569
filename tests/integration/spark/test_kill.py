"""kill -9 of a Spark driver and of the service in the middle of a stream: nothing is lost, nothing is there twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import support.spark_child
from magnetar.ledger import LedgerSettings, StaticBookies, TcpTransport
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.connection import ConnectionOptions
from magnetar.spark.options import WriteOptions
from magnetar.spark.sink import write_task
from support.service import Service
from support.spark_topics import Topics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.timeout(400, func_only=True),
    pytest.mark.real,
]

# What nobody renews is swept soon, and bookies forget soon what is not in the metadata.
SETTINGS = (
    "broker.max_ledger_entries=20",
    "broker.min_ledger_age_ms=0",
    "broker.staged_ttl_ms=20000",
    "broker.maintenance_interval_s=0.2",
    "bookie.gc_interval_s=0.5",
)
KILL_AT = 3  # the batch whose commit kills the driver
SENT = [b"%d" % n for n in range(2000)]


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[Service]:
    """One to be killed."""
    service = Service(tmp_path / "data", arguments=[word for one in SETTINGS for word in ("--set", one)])
    service.start()
    yield service
    service.stop()


class Watcher:
    """Counts the messages of a topic again and again, as long as the body runs."""

    def __init__(self, topics: Topics, topic: str) -> None:
        self.counts: set[int] = set()
        self._topics = topics
        self._topic = topic
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            try:
                self.counts.add(sum(row[4] for row in self._topics.ledgers(self._topic)))
            except MagnetarError:  # the service is dead
                continue

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._done.set()
        self._thread.join()


def driver(service: Service, room: Path) -> None:
    """A driver that dies after the commit of batch KILL_AT, before Spark has logged it."""
    said = room / "driver.err"
    with said.open("w") as error:
        child = subprocess.Popen(
            [sys.executable, support.spark_child.__file__, service.url, "source", "target", "retried",
             str(room / "checkpoint"), str(KILL_AT)],
            stdout=subprocess.PIPE,
            stderr=error,
            start_new_session=True,
        )  # fmt: skip
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"written\n", said.read_text()[-3000:]
            assert child.wait() == -signal.SIGKILL, said.read_text()[-3000:]
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            assert child.stdout is not None
            child.stdout.close()


def copied_on(spark: Any, service: Service, checkpoint: Path) -> Any:
    """The same query in this process, until all that is there is copied."""
    reader = spark.readStream.format("magnetar").option("service_url", service.url)
    rows = reader.option("max_rows_per_batch", "100").load("source").select("key", "value")
    writer = rows.writeStream.format("magnetar").option("service_url", service.url).option("topic", "target")
    return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()


def bookie_ledgers(service: Service) -> set[int]:
    """Ids of the ledgers that the bookie stores, and that are not deleted."""

    async def work() -> set[int]:
        directory = StaticBookies({"bookie": ("127.0.0.1", service.bookie_port)})
        transport = TcpTransport(directory, LedgerSettings(), ConnectionOptions("test"))
        try:
            page = await transport.list_ledgers("bookie")
            return {one.ledger_id for one in page.ledgers if not one.deleted}
        finally:
            await transport.close()

    return asyncio.run(work())


@pytest.mark.spark
def test_a_stream_goes_on_from_its_checkpoint_after_its_driver_and_the_service_were_killed(
    spark: Any, own_service: Service, tmp_path: Path
) -> None:
    service = own_service
    topics = Topics(service)
    topics.produce("source", SENT[:1500], per_entry=10)
    topics.create("target", "retried")
    rows = pa.RecordBatch.from_pydict({"value": ["of a driver that was never seen again"]})
    options = WriteOptions.parse({"service_url": service.url, "topic": "target"})
    lost = write_task(options, "lost", 0, iter([rows])).ledgers[0].ledger_id
    assert (topics.staged("target"), lost in bookie_ledgers(service)) == (1, True)
    with Watcher(topics, "target") as watcher:
        driver(service, tmp_path)
        # Attempts that failed, and then had their rows in another order; attempts that failed when all was written.
        retried = topics.values("retried")
        turned = (*range(499, -1, -1), *range(999, 499, -1), *range(1000, 1010))
        assert retried == [b"%d" % n for n in turned]
        assert topics.staged("retried") == 0
        assert topics.values("target") == SENT[: 50 * (KILL_AT + 1)]
        commits = (tmp_path / "checkpoint" / "commits").glob("[0-9]*")
        assert {int(one.name) for one in commits} == set(range(KILL_AT)), "Spark did not hear of the last one"
        service.kill("both")
        service.start()
        topics.produce("source", SENT[1500:], per_entry=10)
        random_moments(spark, service, tmp_path / "checkpoint", topics)
    assert topics.values("target") == SENT
    assert topics.stats("source")["subscriptions"] == {}, (
        "one that nobody moves would keep the topic for ever"
    )
    assert all(count % 50 == 0 for count in watcher.counts), "part of a batch was seen"
    assert len(watcher.counts) > 5
    topics.wait_for(lambda: topics.staged("target") == 0, "what killed tasks wrote is swept")
    topics.wait_for(lambda: lost not in bookie_ledgers(service), "the bookie forgets what was swept")
    kept = {row[1] for row in topics.ledgers("target") if row[3]}
    assert kept <= bookie_ledgers(service)


def random_moments(spark: Any, service: Service, checkpoint: Path, topics: Topics) -> None:
    """Runs the query to its end, while the service is killed again and again; whatever fails is started again."""
    from pyspark.errors import StreamingQueryException

    moments = random.Random(5)

    def copied() -> int:
        return sum(row[4] for row in topics.ledgers("target"))

    begun = copied()
    # By what was copied, and not by the clock: a query is as fast as its machine.
    places = sorted(moments.sample(range(begun, len(SENT) - 200), 4))
    while copied() < len(SENT):
        query = copied_on(spark, service, checkpoint)
        with contextlib.suppress(StreamingQueryException):  # a task has one attempt here
            while not query.awaitTermination(moments.uniform(0.05, 0.4)):
                if places and copied() >= places[0]:
                    del places[0]
                    service.kill("both")
                    service.start()
    assert not places, "the query was done before the service was killed often enough"
