"""What Spark calls of the sink, called without Spark, while the service is killed at random moments: each batch once.

Tasks are tried four times, as Spark does; what fails all the same, or was committed by a driver that then died, is replayed
under the same batch number by tasks that write again.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from magnetar.proto.errors import InvalidArgument, MagnetarError, RetryableError, TopicNotFound
from magnetar.spark.options import WriteOptions
from magnetar.spark.sink import WrittenByTask, attach, discard, write_task
from support.service import Service
from support.spark_topics import Topics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.crash,
    pytest.mark.timeout(180, func_only=True),
    pytest.mark.real,
    pytest.mark.spark,
]

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("broker.attach_min_bytes=0")`: a service with these settings."""
    started: list[Service] = []

    def with_settings(*settings: str) -> Service:
        service = Service(
            tmp_path / f"data{len(started)}", arguments=[word for one in settings for word in ("--set", one)]
        )
        service.start()
        started.append(service)
        return service

    yield with_settings
    for service in started:
        service.stop()


def rows(*values: bytes) -> Iterator[Any]:
    """What Spark hands to a task."""
    return iter([pa.RecordBatch.from_pydict({"value": list(values)})])


class Stream:
    """A query of two tasks a batch, whose driver dies now and then after a commit."""

    def __init__(self, options: WriteOptions, seed: int) -> None:
        self.options = options
        self.random = random.Random(seed)
        self.sent: list[bytes] = []
        self.committing = threading.Event()
        self.batches = 0
        self.repeated = 0

    def run_batch(self) -> None:
        """Until it is committed, and Spark has logged it."""
        sizes = [self.random.randrange(1, 100) for _ in range(2)]
        parts = [
            [b"%d.%d.%d" % (self.batches, part, n) for n in range(size)] for part, size in enumerate(sizes)
        ]
        logged = False
        while not logged:
            self.repeated += 1
            try:
                written = [self._task(part) for part in parts]
                self.committing.set()
                attach(self.options, written)
                logged = self.random.random() > 0.2
            except MagnetarError as error:
                if not error.retryable:
                    raise
        self.batches += 1
        self.repeated -= 1
        self.sent += itertools.chain(*parts)

    def _task(self, values: list[bytes]) -> WrittenByTask:
        for attempt in range(4):
            try:
                return write_task(self.options, "q", self.batches, rows(*values))
            except MagnetarError as error:
                if attempt == 3 or not error.retryable:
                    raise
        raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("small", [True, False], ids=["published", "attached"])
def test_each_batch_is_there_once_whenever_the_service_is_killed(start: Start, small: bool) -> None:
    service = start(
        "broker.max_ledger_entries=20",
        "broker.min_ledger_age_ms=0",
        f"broker.attach_min_bytes={1 << 20 if small else 0}",
    )
    topics = Topics(service)
    topics.create("target")
    options = WriteOptions.parse({"service_url": service.url, "topic": "target"})
    stream = Stream(options, seed=7)
    moments, over, failures = random.Random(8), threading.Event(), list[BaseException]()

    def kill() -> None:
        try:
            for number in range(6):
                if number % 3:  # in the middle of a commit, which takes 5 to 30 ms
                    stream.committing.clear()
                    stream.committing.wait(20)
                    over.wait(moments.uniform(0, 0.02))
                else:
                    over.wait(moments.uniform(0.2, 1.0))
                service.kill("both")
                service.start()
        except BaseException as error:  # a defect of the test must not leave it waiting
            failures.append(error)
        over.set()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while not over.is_set() or stream.batches < 6:
            stream.run_batch()
    finally:
        killer.join()
    assert not failures, failures
    stream.run_batch()
    assert topics.values("target") == stream.sent
    assert stream.repeated > 0
    topics.wait_for(lambda: topics.staged("target") == 0, "nothing is staged")
    ledgers = len(topics.ledgers("target"))
    assert ledgers < stream.batches if small else ledgers == 2 * stream.batches


def test_what_the_broker_refuses_names_the_option(start: Start) -> None:
    service = start("broker.auto_create_topics=false", "broker.max_message_bytes=1000")
    topics = Topics(service)
    given = {"service_url": service.url, "topic": "missing"}
    with pytest.raises(
        TopicNotFound, match=r"option topic: topic .*missing does not exist.*auto_create_topics"
    ):
        write_task(WriteOptions.parse(given), "q", 0, rows(b"x"))
    topics.create("there")
    options = WriteOptions.parse(given | {"topic": "there"})
    with pytest.raises(InvalidArgument, match=r"1001 bytes .* at most 1000, the option max_message_bytes"):
        write_task(options, "q", 0, rows(b"x" * 1001))
    assert topics.staged("there") == 0
    written = write_task(options, "q", 0, rows(b"x" * 1000))
    discard(options, "q/0")
    assert topics.staged("there") == 0
    with pytest.raises(InvalidArgument, match="not staged"):
        attach(options, [written])
    dead = WriteOptions.parse(given | {"service_url": "magnetar://127.0.0.1:1", "timeout_s": "1"})
    with pytest.raises(RetryableError, match=r"127\.0\.0\.1:1\b"):
        write_task(dead, "q", 0, rows(b"x"))
    discard(dead, "q/0")  # hides no error that came before
