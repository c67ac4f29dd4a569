"""Archives in memory: what leaves the bookies is remembered entry by entry, and read back as the real reader does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack

from magnetar.broker import Broker
from magnetar.broker.log.records import ArchivedLedger
from magnetar.proto import commands as c
from magnetar.proto.errors import ArchiveUnavailable, MagnetarError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, NO_ENTRY, encode_ledger_entry
from support.broker_kit import FakeClient

AT = "memory://archive"


class MemoryArchives:
    """`magnetar.broker.log.reading.ArchiveReader`. `archive` fills it.

    `failing`: errors that reads raise, by ledger, as long as they are there. `gate`: reads wait for it.
    """

    def __init__(self) -> None:
        self.failing: dict[int, MagnetarError] = {}
        self.gate: asyncio.Event | None = None
        self.reads: list[tuple[int, int]] = []  # ledger and first entry of each
        self._entries: dict[tuple[str, str, int], list[bytes]] = {}  # by location, topic and position id

    async def read(
        self, topic: str, archived: ArchivedLedger, first: int, last: int, *, max_bytes: int
    ) -> list[bytes]:
        """See `ArchiveReader`."""
        info, location = archived
        self.reads.append((info.ledger_id, first))
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if info.ledger_id in self.failing:
            raise self.failing[info.ledger_id]
        stored = self._entries.get((location, topic, info.ledger_id))
        if stored is None:
            raise ArchiveUnavailable(f"nothing is archived at {location}")
        assert len(stored) == info.entries
        assert 0 <= first <= last < info.entries
        found: list[bytes] = []
        for number in range(first, last + 1):
            found.append(encode_ledger_entry(info.stored_id, number, NO_ENTRY, 0, stored[number]))
            if sum(map(len, found)) > max_bytes:
                break
        return found[:-1] if len(found) > 1 and sum(map(len, found)) > max_bytes else found

    def figures(self) -> dict[str, int]:
        """None."""
        return {}

    async def close(self) -> None:
        """Nothing is open."""

    async def archive(
        self, broker: Broker, count: int, topic: str = "orders", *, at: str = AT, **named: Any
    ) -> dict[str, Any]:
        """The first `count` closed ledgers at the bookies: copied, then ArchiveLedgers, whose answer is returned."""
        client = FakeClient(broker)
        page = await client.ask(c.TopicLedgers, topic)
        rows = [row for row in page["ledgers"] if len(row) < 11 and row[8] and row[3]][:count]
        await self.copy(broker, rows, topic, at=at)
        payload = msgpack.packb([[row[0], row[1], row[3], row[4]] for row in rows])
        answer: dict[str, Any] = await client.ask(c.ArchiveLedgers, topic, at, payload=payload, **named)
        return answer

    async def copy(self, broker: Broker, rows: list[Any], topic: str = "orders", *, at: str = AT) -> None:
        """Ledgers, rows of TopicLedgers: they can be read from then on, wherever the list says that they are."""
        log = next(one for name, one in broker.topics.items() if name.endswith(f"/{topic}")).ledger
        for row in rows:
            entries: list[bytes] = []
            while len(entries) < row[3]:
                entries += await log.reading.read(row[0], len(entries), max_bytes=1 << 20)
            self._entries[at, str(log.name), row[0]] = [
                entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries
            ]
