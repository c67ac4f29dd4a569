"""A topic read and written at the bookies of a real service, over TCP, by requests to the broker; also over a kill -9."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from magnetar.client import Client, connect
from magnetar.client.administration import ask
from magnetar.ledger import (
    LedgerClient,
    LedgerMetadata,
    LedgerSettings,
    LedgerWriter,
    StaticBookies,
    TcpTransport,
)
from magnetar.metadata.store import Versioned
from magnetar.proto import commands as c
from magnetar.proto.batch import decode_batch, encode_batch
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import MagnetarError, VersionConflict
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.connection import ConnectionOptions
from support.service import Service

pytestmark = pytest.mark.real


TOPIC = "persistent://public/default/orders"


class BrokerLedgers:
    """A LedgerManager by requests to the broker."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def get(self, ledger_id: int) -> Versioned:
        found = await ask(self.client.admin, c.GetLedgerMetadata(0, TOPIC, ledger_id), topic=TOPIC)
        return Versioned(found["metadata"], found["version"])

    async def put(self, ledger_id: int, record: bytes, *, version: int) -> int:
        command = c.PutLedgerMetadata(0, TOPIC, ledger_id, version)
        return int((await ask(self.client.admin, command, topic=TOPIC, payload=record))["version"])


@asynccontextmanager
async def bookies_of(client: Client, addresses: dict[str, str]) -> Any:
    """A ledger client that goes to these bookies itself."""
    directory = StaticBookies(
        {
            name: (address.rpartition(":")[0], int(address.rpartition(":")[2]))
            for name, address in addresses.items()
        }
    )
    settings = LedgerSettings()
    transport = TcpTransport(directory, settings, ConnectionOptions(name="task"))
    records: Any = BrokerLedgers(client)
    ledgers = LedgerClient(records, transport, directory, settings, random.Random(1), SystemClock())
    try:
        yield ledgers
    finally:
        await ledgers.close()
        await transport.close()


async def stage(client: Client, values: list[bytes]) -> list[int]:
    """What a task of a job does: its row for AttachLedgers."""
    made = await ask(client.admin, c.CreateStagedLedger(0, TOPIC, "job"), topic=TOPIC)
    assert [row[:2] for row in made["writable"]] == [list(pair) for pair in made["bookies"].items()]
    async with bookies_of(client, made["bookies"]) as ledgers:
        metadata = LedgerMetadata.decode(made["metadata"], made["ledger"])
        writer = LedgerWriter(ledgers._components, made["ledger"], metadata, made["version"], lambda _: None)
        batch = encode_batch(values, sequence_id=0, publish_time_ms=5)
        entry = encode_entry([batch], [len(values)], [0], ["task"], first_index=0, append_time_ms=6)
        stored = asyncio.get_running_loop().create_future()

        def confirmed(_id: int, _entry: bytes, error: MagnetarError | None) -> None:
            stored.set_result(error)

        writer.append(entry, confirmed)
        assert await stored is None
        await writer.close()
    return [made["ledger"], len(values), 6, 6]


async def read_at_the_bookies(client: Client) -> list[bytes]:
    """Everything that is confirmed, by TopicLedgers and reads over TCP."""
    lease = await ask(client.admin, c.KeepLedgers(0, TOPIC, "", 10_000), topic=TOPIC)
    values: list[bytes] = []
    after, more = -1, True
    while more:
        page = await ask(client.admin, c.TopicLedgers(0, TOPIC, after, 2), topic=TOPIC)
        more = page["more"]
        async with bookies_of(client, page["bookies"]) as ledgers:
            for position_id, stored_id, _, entries, *_ in page["ledgers"]:
                after = position_id
                if entries:
                    reader = await ledgers.open(stored_id, recover=False)
                    reader.last_add_confirmed = entries - 1
                    for data in await reader.read(0, entries - 1):
                        entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
                        for position in range(entry.batch_count):
                            values += [
                                v for v in decode_batch(bytes(entry.batch(position))).values if v is not None
                            ]
    await ask(client.admin, c.KeepLedgers(0, TOPIC, lease["lease"], 0), topic=TOPIC)
    return values


async def read_through_the_broker(client: Client, count: int) -> list[bytes]:
    async with client.create_reader("orders", start="earliest") as reader:
        return [(await reader.read_next(timeout=10)).value or b"" for _ in range(count)]


@pytest.mark.timeout(120)
async def test_a_topic_as_ledgers(tmp_path: Path) -> None:
    service = Service(
        tmp_path / "data",
        arguments=["--set", "broker.max_ledger_entries=3", "--set", "broker.min_ledger_age_ms=0"],
    )
    await asyncio.to_thread(service.start)
    sent: list[bytes] = []
    try:
        async with connect(service.url) as client:
            producer = await client.create_producer("orders")
            for number in range(10):
                sent.append(b"%d" % number)
                await producer.send(sent[-1])
            rows = [await stage(client, [b"a%d" % task, b"b%d" % task]) for task in range(3)]
            assert await read_at_the_bookies(client) == sent
            attach = c.AttachLedgers(0, TOPIC, "query", 0)
            answer = await ask(client.admin, attach, topic=TOPIC, payload=msgpack.packb(rows))
            assert answer["attached"]
            sent += [b"a0", b"b0", b"a1", b"b1", b"a2", b"b2"]
            sent.append(b"after")
            await producer.send(b"after")
            assert await read_at_the_bookies(client) == sent
            assert await read_through_the_broker(client, len(sent)) == sent
            # A compare-and-set that fails is told at once, and not tried again for half a minute.
            late = await ask(client.admin, c.CreateStagedLedger(0, TOPIC, "late"), topic=TOPIC)
            metadata = LedgerMetadata.decode(late["metadata"], late["ledger"])
            with pytest.raises(VersionConflict):
                async with asyncio.timeout(5):
                    await ask(
                        client.admin,
                        c.PutLedgerMetadata(0, TOPIC, late["ledger"], 7),
                        topic=TOPIC,
                        payload=metadata.close(-1, 0).encode(),
                    )
        await asyncio.to_thread(service.kill, "both")
        await asyncio.to_thread(service.start)
        async with connect(service.url) as client:
            assert await ask(client.admin, c.QueryState(0, TOPIC, "query"), topic=TOPIC) == {"batch": 0}
            again = c.AttachLedgers(0, TOPIC, "query", 0)
            assert not (await ask(client.admin, again, topic=TOPIC, payload=msgpack.packb(rows)))["attached"]
            kept = await ask(client.admin, c.KeepStaged(0, TOPIC, "late"), topic=TOPIC)
            assert kept["ledgers"] == 1
            assert await ask(client.admin, c.DiscardStaged(0, TOPIC, "late"), topic=TOPIC) == {"discarded": 1}
            assert await read_at_the_bookies(client) == sent
            assert await read_through_the_broker(client, len(sent)) == sent
    finally:
        await asyncio.to_thread(service.stop)
