"""Rules 35, 36 and 38 with real processes: a broker over three bookies (E 3, Qw 2, Qa 2), of which some come back as others.

Messages are confirmed, the broker is killed, and meanwhile a bookie's disk is emptied, or two bookies get each other's.
Before bookies had an identity, 14 and 9 of 100 confirmed messages were gone then, and nothing was logged. Now nothing is
lost, one line of the broker's log says what is wrong and what to do, and once that is done everything is there.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from bench.service_process import ServiceProcess

from magnetar.client import Client, connect
from magnetar.ledger import LedgerSettings, TcpTransport
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.connection import ConnectionOptions
from support.bookie_fleet import BookieFleet
from support.forked_commands import run_magnetar

TOPICS = 20
MESSAGES = 5
REFUSED = re.compile(r"bookie (\S+) is refused: ")
DECLARE = re.compile(r"--accept-new-disk (\S+?)\)")
PATIENCE_S = 60.0

pytestmark = [pytest.mark.timeout(240), pytest.mark.real]


def broker_of(fleet: BookieFleet, directory: Path) -> ServiceProcess:
    listed = ",".join(
        f"{name}={bookie.host}:{bookie.ports['bookie']}" for name, bookie in fleet.processes.items()
    )
    changes = (
        "broker.ensemble_size=3",
        "broker.write_quorum=2",
        "broker.ack_quorum=2",
        "ledger.bookie_info_interval_s=0.5",
        "ledger.reconnect_backoff_max_s=0.2",
        "ledger.add_timeout_s=2",
        "ledger.deletion_retry_s=0.3",
        "ledger.read_timeout_s=2",
    )
    arguments = ["--bookies", listed, "--log-level", "warning", "--set", "daemon.drain_s=2"]
    for change in changes:
        arguments += ["--set", change]
    return ServiceProcess(directory, command="broker", arguments=arguments)


def values(topic: int) -> list[bytes]:
    return [b"%d:%d" % (topic, number) for number in range(MESSAGES)]


async def produce(client: Client) -> None:
    async def one(topic: int) -> None:
        producer = await client.create_producer(f"topic-{topic}")
        for value in values(topic):
            await producer.send(value)

    await asyncio.gather(*(one(topic) for topic in range(TOPICS)))


async def consume(client: Client, topic: int) -> list[bytes]:
    """All that the topic has. MagnetarError when it cannot be loaded."""
    found: list[bytes] = []
    async with client.create_reader(f"topic-{topic}", start="earliest") as reader:
        while await reader.has_message_available():
            found.append(bytes((await reader.read_next(timeout=10)).value or b""))
    return found


async def consume_all(url: str) -> dict[int, list[bytes]]:
    """Topics are tried until they load."""
    found: dict[int, list[bytes]] = {}
    async with asyncio.timeout(PATIENCE_S), connect(url, operation_timeout=5.0) as client:
        while len(found) < TOPICS:
            for topic in range(TOPICS):
                if topic not in found:
                    try:
                        found[topic] = await consume(client, topic)
                    except MagnetarError as error:
                        if not error.retryable:
                            raise
    return found


async def fill(broker: ServiceProcess) -> None:
    """Confirmed messages in every topic, and a broker that is killed right after."""
    await asyncio.to_thread(broker.start)
    async with connect(broker.url) as client:
        await produce(client)
        await asyncio.to_thread(broker.kill, "daemon")


async def nothing_is_lost_meanwhile(broker: ServiceProcess) -> None:
    """A topic either cannot be loaded, for now, or is whole."""

    async def look(topic: int) -> None:
        try:
            found = await consume(client, topic)
        except MagnetarError as error:
            if not error.retryable:
                raise
        else:
            assert found == values(topic)

    async with connect(broker.url, operation_timeout=2.0) as client:
        await asyncio.gather(*(look(topic) for topic in range(3)))


async def refusals(broker: ServiceProcess, count: int) -> list[str]:
    """The lines of the log, once there are so many; no more may come."""
    async with asyncio.timeout(PATIENCE_S):
        while len(lines := [line for line in broker.errors().splitlines() if REFUSED.search(line)]) < count:
            await asyncio.sleep(0.05)
    assert len(lines) == count, lines
    return lines


async def test_rule_35_a_bookie_that_comes_back_empty_costs_nothing(tmp_path: Path) -> None:
    async with BookieFleet(tmp_path, 3) as fleet:
        broker = broker_of(fleet, tmp_path / "broker")
        try:
            await fill(broker)
            await fleet.kill("b2", "daemon")
            shutil.rmtree(tmp_path / "b2")
            await fleet.start("b2")
            await asyncio.to_thread(broker.start)
            await nothing_is_lost_meanwhile(broker)
            lines = await refusals(broker, 1)
            assert "bookie b2 is refused" in lines[0]
            assert len(re.findall(r"instance [0-9a-f]{16}", lines[0])) == 2, lines[0]

            declared = DECLARE.search(lines[0])
            assert declared is not None, lines[0]
            fleet.processes["b2"].stop()
            shutil.rmtree(tmp_path / "b2")
            line = (
                "bookie",
                "cookie",
                "--accept-new-disk",
                declared[1],
                "--yes",
                "--data",
                str(tmp_path / "b2"),
            )
            run_magnetar(*line).check_returncode()
            await fleet.start("b2")
            assert await consume_all(broker.url) == {topic: values(topic) for topic in range(TOPICS)}
            async with connect(broker.url) as client:
                producer = await client.create_producer("topic-0")
                await producer.send(b"more")
        finally:
            await asyncio.to_thread(broker.stop)


async def test_rule_35_two_bookies_with_each_others_disks_cost_nothing(tmp_path: Path) -> None:
    def swap() -> None:
        (tmp_path / "b1").rename(tmp_path / "other")
        (tmp_path / "b3").rename(tmp_path / "b1")
        (tmp_path / "other").rename(tmp_path / "b3")

    async with BookieFleet(tmp_path, 3) as fleet:
        broker = broker_of(fleet, tmp_path / "broker")
        try:
            await fill(broker)
            for name in ("b1", "b3"):
                await fleet.kill(name, "daemon")
            swap()
            await fleet.start("b1", "b3")
            await asyncio.to_thread(broker.start)
            await nothing_is_lost_meanwhile(broker)
            lines = await refusals(broker, 2)
            assert all("exchanged with those of another" in line for line in lines)

            for name in ("b1", "b3"):
                fleet.processes[name].stop()
            swap()
            await fleet.start("b1", "b3")
            assert await consume_all(broker.url) == {topic: values(topic) for topic in range(TOPICS)}
        finally:
            await asyncio.to_thread(broker.stop)


async def test_rule_35_a_bookie_that_is_restored_from_an_older_copy_costs_nothing(tmp_path: Path) -> None:
    async with BookieFleet(tmp_path, 3) as fleet:
        broker = broker_of(fleet, tmp_path / "broker")
        try:
            await asyncio.to_thread(broker.start)
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(fleet.processes["b2"].stop)
            shutil.copytree(tmp_path / "b2", tmp_path / "old b2")
            await fleet.start("b2")
            await fill(broker)
            await fleet.kill("b2", "daemon")
            (tmp_path / "b2").rename(tmp_path / "right b2")
            (tmp_path / "old b2").rename(tmp_path / "b2")
            await fleet.start("b2")
            await asyncio.to_thread(broker.start)
            await nothing_is_lost_meanwhile(broker)
            assert "restored from an older copy" in (await refusals(broker, 1))[0]

            await asyncio.to_thread(fleet.processes["b2"].stop)
            shutil.rmtree(tmp_path / "b2")
            (tmp_path / "right b2").rename(tmp_path / "b2")
            await fleet.start("b2")
            assert await consume_all(broker.url) == {topic: values(topic) for topic in range(TOPICS)}
        finally:
            await asyncio.to_thread(broker.stop)


async def test_rule_36_a_broker_with_a_fresh_store_gets_no_ledger_on_the_bookies_of_another(
    tmp_path: Path,
) -> None:
    async with BookieFleet(tmp_path, 3) as fleet:
        broker, fresh = broker_of(fleet, tmp_path / "broker"), broker_of(fleet, tmp_path / "fresh")
        try:
            await fill(broker)
            await asyncio.to_thread(fresh.start)
            async with connect(fresh.url, operation_timeout=2.0) as client:
                producer = await client.create_producer("topic-0", send_timeout=2.0)
                with pytest.raises(MagnetarError):
                    await producer.send(b"never")
            assert all("of cluster" in line for line in await refusals(fresh, 3))
            await asyncio.to_thread(broker.start)
            assert await consume_all(broker.url) == {topic: values(topic) for topic in range(TOPICS)}
        finally:
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(fresh.stop)


async def alive(fleet: BookieFleet, name: str) -> list[int]:
    """Ledgers that a bookie has and that were not deleted there."""
    transport = TcpTransport(fleet.directory(), LedgerSettings(), ConnectionOptions("test"))
    try:
        page = await transport.list_ledgers(name)
    finally:
        await transport.close()
    return [ledger.ledger_id for ledger in page.ledgers if not ledger.deleted]


async def test_rule_38_topics_that_were_deleted_while_a_bookie_was_down_leave_it_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with BookieFleet(tmp_path, 3) as fleet:
        broker = broker_of(fleet, tmp_path / "broker")
        try:
            await asyncio.to_thread(broker.start)
            async with connect(broker.url) as client:
                await produce(client)
                before = await alive(fleet, "b2")
                await fleet.kill("b2", "daemon")
                for topic in range(8):
                    await client.admin.delete_topic(f"topic-{topic}", force=True)
                await asyncio.to_thread(broker.kill, "daemon")
            await fleet.start("b2")
            assert await alive(fleet, "b2") == before
            await asyncio.to_thread(broker.start)
            async with asyncio.timeout(PATIENCE_S):
                while len(await alive(fleet, "b2")) > len(before) - 8:
                    await asyncio.sleep(0.1)
        finally:
            await asyncio.to_thread(broker.stop)
