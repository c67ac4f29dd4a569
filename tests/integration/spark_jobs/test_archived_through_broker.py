"""A topic that Spark archived is consumed through the broker as before: over real sockets, from real Parquet files."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.archive.files import ArchiveFolder
from magnetar.client import Client, EntryUnreadable, connect
from magnetar.proto.ids import MessageId
from magnetar.spark.jobs import archive
from support.pages import blocks_of
from support.service import Service

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.real, pytest.mark.spark]

DOCS = Path(__file__).parents[3] / "docs"
FULL = "persistent://public/default/"
Fields = tuple[Any, ...]


def fields_of(message: Any) -> Fields:
    """All that a consumer sees of a message, but for how often it was delivered."""
    return (
        message.id, message.value, message.key, message.properties, message.publish_time, message.event_time,
        message.sequence_id, message.producer_name, message.topic,
    )  # fmt: skip


async def produce(url: str, topic: str, rounds: int, first: int = 0) -> None:
    """Batches, messages alone, by key; three producers, so that entries have batches of several."""
    async with (
        connect(url) as client,
        client.create_producer(topic, name=f"batches-{first}") as batches,
        client.create_producer(topic, name=f"alone-{first}", batching=False) as alone,
        client.create_producer(topic, name=f"by-key-{first}", batching_by_key=True) as by_key,
    ):
        for number in range(first, first + rounds):
            properties = {"n": str(number), "ü": ""} if number % 3 else None
            sent = [
                by_key.send_nowait(
                    b"k%d-%d" % (number, i), key=f"key-{i % 3}-ü", event_time=1_700_000_000_000 + i
                )
                for i in range(5)
            ]
            sent += [alone.send_nowait(b"a%d-%d" % (number, i)) for i in range(3)]
            sent.append(alone.send_nowait(b"", key=b"\xff\x00%d" % number, properties=properties))
            sent += [
                batches.send_nowait(
                    None if i == 2 else os.urandom(300), properties=properties if i % 2 else None
                )
                for i in range(6)
            ]
            await asyncio.gather(*sent)


async def read(client: Client, topic: str, count: int, start: Any = "earliest") -> list[Fields]:
    async with client.create_reader(topic, start=start) as reader:
        return [fields_of(await reader.receive(timeout=30)) for _ in range(count)]


async def consume(client: Client, topic: str, name: str, count: int, **named: Any) -> list[Fields]:
    """With receipts, in the order of the topic; the subscription has nothing left then."""
    async with client.subscribe(topic, name, start="earliest", **named) as consumer:
        found = [await consumer.receive(timeout=30) for _ in range(count)]
        for message in found[:-1]:
            await consumer.ack(message)
        await consumer.ack(found[-1], receipt=True)
    return sorted(map(fields_of, found))


async def stats_of(client: Client, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = await client.admin.topic_stats(topic)
    return found


async def everything(client: Client, topic: str, mark: str) -> dict[str, list[Fields]]:
    """As a reader has it, and subscriptions of every type."""
    count = (await stats_of(client, topic))["next_index"]
    found = {"reader": await read(client, topic, count)}
    for type in ("exclusive", "failover", "shared", "key_shared"):
        found[type] = await consume(client, topic, f"{mark}-{type}", count, type=type)
    found["not durable"] = await consume(client, topic, f"{mark}-memory", count, durable=False)
    return found


def reader_pids(service: Service) -> list[int]:
    """Helper processes that read archives, one for each, oldest first."""
    children = Path(f"/proc/{service.daemon_pid}/task/{service.daemon_pid}/children").read_text().split()
    return [
        int(pid) for pid in children if b"archive/process.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def command(url: str, *arguments: str) -> list[dict[str, Any]]:
    environment = os.environ | {"MAGNETAR_URL": url}
    done = subprocess.run(
        [sys.executable, "-m", "magnetar.cli.main", *arguments, "--json"],
        env=environment, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_consumed_is_what_was_consumed_before(
    spark: Any, service: Service, url: str, tmp_path: Path
) -> None:
    topic, path = "tiered", str(tmp_path / "archive")

    async def before() -> tuple[dict[str, list[Fields]], int]:
        await produce(url, topic, 30)
        async with connect(url) as client:
            found = await everything(client, topic, "before")
            # It stands in the middle of what is going to be archived.
            async with client.subscribe(topic, "slow", start="earliest", receiver_queue_messages=10) as slow:
                for _ in range(100):
                    await slow.ack(await slow.receive(timeout=30), receipt=True)
            return found, (await stats_of(client, topic))["next_index"]

    found, count = asyncio.run(before())
    assert count == 30 * 15
    assert sorted(found["reader"]) == found["shared"]

    # What a subscription still needs stays at the bookies, unless that is said.
    kept = archive(spark, url, [topic], path, trim=True, file_bytes=3000)
    assert [one.reason for one in kept.kept] == ["subscription 'slow' has not acknowledged all of it"]
    result = archive(spark, url, [topic], path, trim=True, with_backlog=True)
    assert result.kept == ()
    printed = command(url, "tail", topic, "--start", "earliest", "-n", str(count))

    async def after() -> None:
        async with connect(url) as client:
            stats = await stats_of(client, topic)
            assert stats["archived_messages"] > count // 2
            assert stats["subscriptions"]["slow"]["backlog_messages"] == pytest.approx(count - 100, abs=30)
            again = await everything(client, topic, "after")
            for name, messages in again.items():
                assert messages == found[name], name
            # The rest of the subscription that stood there.
            async with client.subscribe(topic, "slow") as slow:
                rest = [fields_of(await slow.receive(timeout=30)) for _ in range(count - 100)]
            assert rest == found["reader"][100:]
            # From ids and times within the archived part; a time finds what it found before.
            messages = found["reader"]
            for at in (0, 7, 150, 311):
                assert await read(client, topic, 5, start=messages[at][0]) == messages[at : at + 5]
            for at in (40, 200):
                (first, *_) = await read(client, topic, 1, start=messages[at][4])
                assert first[4] >= messages[at][4] or first[0] < messages[at][0]
            # From the tail back.
            async with client.subscribe(topic, "mover", type="shared") as mover:
                await mover.seek(messages[33][0])
                assert fields_of(await mover.receive(timeout=30)) == messages[33]
            stats = await stats_of(client, topic)
            assert stats["subscriptions"]["after-shared"]["backlog_messages"] == 0

    asyncio.run(after())
    assert [row["id"] for row in printed] == [str(one[0]) for one in found["reader"]] or len(printed) == count
    consumed = command(url, "consume", topic, "-s", "by-command", "--start", "earliest", "-n", str(count))
    assert [row["id"] for row in consumed] == [row["id"] for row in printed]


def test_what_spark_wrote_and_attached(spark: Any, url: str, tmp_path: Path) -> None:
    """A small batch, which the broker appends, and one so large that its ledgers are attached; zstd in both."""
    topic, path = "tiered-by-spark", str(tmp_path / "archive")
    columns = (
        "if(id % 3 = 0, null, concat('k', id % 7)) AS key",
        "if(id % 2 = 0, map('n', cast(id AS string)), null) AS properties",
        "if(id % 5 = 0, null, timestamp_millis(1700000000000 + id)) AS event_time",
    )
    for count, value in (
        (500, "concat('v', id)"),
        (1000, "concat(id, randstr(20000))"),
    ):
        frame = spark.range(0, count, 1, 2).selectExpr(f"{value} AS value", *columns)
        writer = frame.write.format("magnetar").mode("append").option("service_url", url)
        writer.option("topic", topic).option("compression", "zstd").save()
    asyncio.run(produce(url, topic, 15))
    count = 500 + 1000 + 15 * 15

    async def look() -> tuple[list[Fields], dict[str, Any]]:
        async with connect(url) as client:
            return await read(client, topic, count), await stats_of(client, topic)

    before, stats = asyncio.run(look())
    assert any(one["ledger"] != one["stored_ledger"] for one in stats["ledgers"]), "attached"
    assert archive(spark, url, [topic], path, trim=True).kept == ()
    after, stats = asyncio.run(look())
    assert stats["archived_messages"] >= 1500
    assert after == before


def test_faults_of_the_archive_cost_its_readers_alone(
    spark: Any, service: Service, url: str, tmp_path: Path
) -> None:
    topic, path = "tiered-faults", tmp_path / "archive"
    asyncio.run(produce(url, topic, 24))  # an entry each: a ledger of 20, which is closed, and another
    assert archive(spark, url, [topic], str(path), trim=True).trimmed
    (folder, full) = ArchiveFolder(str(path)), FULL + topic
    manifests = list(folder.manifests(full).values())
    count = 24 * 15

    async def run() -> None:
        async with connect(url) as client:
            expected = await read(client, topic, count)

            # Killed, and stopped, while it is read: everything still arrives, once.
            for number in (signal.SIGKILL, signal.SIGSTOP):
                async with client.create_reader(topic, start="earliest", receiver_queue_messages=5) as reader:
                    found = [fields_of(await reader.receive(timeout=30)) for _ in range(20)]
                    pid = reader_pids(service)[-1]
                    os.kill(pid, number)
                    if number == signal.SIGSTOP:
                        # The topic itself goes on: the process stands still when the send is confirmed.
                        async with client.create_producer(topic) as producer:
                            await producer.send(b"more")
                        assert "State:\tT" in Path(f"/proc/{pid}/status").read_text()
                        os.kill(pid, signal.SIGCONT)
                    found += [fields_of(await reader.receive(timeout=30)) for _ in range(count - 20)]
                    assert found == expected

            # A file that is gone: visible in the figures, and over once it is back.
            one = manifests[-1]
            file = Path(folder.data_path(full, one.ledger, one.files[0].name))
            data = file.read_bytes()
            file.write_bytes(data[:-7])
            os.kill(reader_pids(service)[-1], signal.SIGKILL)  # it has the rows in memory
            async with client.subscribe(topic, "stopped", start=MessageId(one.ledger, 0, 0)) as consumer:
                unreadable: list[Any] = []
                async with asyncio.timeout(60):
                    while not unreadable:
                        await asyncio.sleep(0.2)
                        stats = await stats_of(client, topic)
                        unreadable = stats["subscriptions"]["stopped"]["unreadable_entries"]
                text = unreadable[0]["error"]
                assert f"ledger {one.ledger} of {full} is archived at file://{path}" in text
                assert f"{file} cannot be used: it has" in text
                assert "bring it back from a copy, or seek behind the ledger" in text
                with pytest.raises(EntryUnreadable, match="bring it back from a copy"):
                    await consumer.receive(timeout=30)
                file.write_bytes(data)
                at = next(number for number, row in enumerate(expected) if row[0][0] == one.ledger)
                assert fields_of(await consumer.receive(timeout=30)) == expected[at]

    asyncio.run(run())


def test_the_page_works_as_it_is_written(
    url: str, produce: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce("orders", [(None, b"first"), (None, b"second"), (None, b"third")] * 20, flush_every=2)
    monkeypatch.setenv("MAGNETAR_URL", url)
    printed: list[str] = []
    for block in blocks_of((DOCS / "archives.md").read_text()):
        for line in block.code.splitlines():
            words = shlex.split(line.removeprefix("$ ").replace("/mnt", str(tmp_path)))
            assert words.pop(0) == "magnetar"
            done = subprocess.run(
                [sys.executable, "-m", "magnetar.cli.main", *words],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            printed.append(done.stdout)
    assert printed[0].startswith("archived orders in")
    assert printed[1:] == ["first\nsecond\nthird\n"]


def test_the_process_ends_with_the_service(spark: Any, tmp_path: Path, produce: Callable[..., None]) -> None:
    service = Service(
        tmp_path / "data",
        arguments=("--set", "broker.max_ledger_entries=20", "--set", "broker.min_ledger_age_ms=0"),
    )
    service.start()
    try:

        async def fill() -> None:
            async with connect(service.url) as client, client.create_producer("t") as producer:
                for number in range(50):
                    await producer.send(b"%d" % number)

        async def look(count: int) -> list[Fields]:
            async with connect(service.url) as client:
                return await read(client, "t", count)

        asyncio.run(fill())
        before = asyncio.run(look(50))
        assert archive(spark, service.url, ["t"], str(tmp_path / "archive"), trim=True).trimmed
        assert asyncio.run(look(50)) == before
        (pid,) = reader_pids(service)
        service.stop()
        assert not Path(f"/proc/{pid}").exists()
        service.start()
        assert asyncio.run(look(50)) == before
        (pid,) = reader_pids(service)
        service.kill()
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
        service.start()
        assert asyncio.run(look(50)) == before
    finally:
        service.stop()
