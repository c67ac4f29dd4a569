"""kill -9 of a Spark driver and of the service in the middle of a stream: nothing is lost, nothing is there twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import support.spark_child
from support.service import Service
from support.spark_topics import Topics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.timeout(400, func_only=True),
]


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[Service]:
    """One to be killed."""
    service = Service(tmp_path / "data", arguments=["--set", "broker.max_ledger_entries=20"])
    service.start()
    yield service
    service.stop()


def test_a_stream_goes_on_from_its_checkpoint_after_its_driver_and_the_service_were_killed(
    spark: Any, own_service: Service, tmp_path: Path
) -> None:
    service = own_service
    topics = Topics(service)
    sent = [b"%d" % n for n in range(2000)]
    topics.produce("source", sent[:1500], per_entry=10)
    topics.create("target", "retried")
    checkpoint = tmp_path / "checkpoint"
    said = (tmp_path / "driver.err").open("w+")
    driver = subprocess.Popen(
        [
            sys.executable,
            support.spark_child.__file__,
            service.url,
            "source",
            "target",
            "retried",
            str(checkpoint),
        ],
        stdout=subprocess.PIPE,
        stderr=said,
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"written\n", (tmp_path / "driver.err").read_text()[-3000:]
        # Tasks that failed once and then had their rows in another order.
        retried = topics.values("retried")
        assert retried == [b"%d" % n for n in (*range(499, -1, -1), *range(999, 499, -1))]
        assert topics.staged("retried") == 0
        topics.wait_for(lambda: len(topics.ledgers("target")) >= 3, "some batches are attached", 60)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()
        said.close()
    copied = len(topics.values("target"))
    assert 0 < copied < 1500
    service.kill("both")
    service.start()
    topics.produce("source", sent[1500:], per_entry=10)
    reader = spark.readStream.format("magnetar").option("service_url", service.url)
    rows = reader.option("max_rows_per_batch", "900").load("source").select("key", "value")
    writer = rows.writeStream.format("magnetar").option("service_url", service.url).option("topic", "target")
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    writer.start().awaitTermination()
    assert topics.values("target") == sent
