"""What is verified of a staged ledger before it becomes part of the topic, and what its place costs."""

from __future__ import annotations

import dataclasses

import pytest

from magnetar.ledger import LedgerClient, LedgerMetadata
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import InvalidArgument
from support.bookies import Bookies
from support.export_kit import Job, appended, export_broker, published, read_all, record_of


async def test_counts_and_bytes_are_what_the_entries_say(bookies: Bookies, ledgers: LedgerClient) -> None:
    """A wrong one would shift all later offsets of the topic for ever."""
    async with export_broker(bookies, ledgers) as broker:
        await published(broker, b"a")
        job = Job(bookies, broker)
        writer = await job.open()
        batch = encode_batch([b"x"], sequence_id=0, publish_time_ms=9)
        for first, time_ms in ((5, 9), (6, 10)):
            entry = encode_entry([batch], [1], [0], ["task"], first_index=first, append_time_ms=time_ms)
            await appended(writer, entry)
        await writer.close()
        with pytest.raises(InvalidArgument, match="begins at message 5, not 0"):
            await job.attach(0, [writer.ledger_id, 7, 9, 10])
        row = await job.stage([b"x", b"y"], [b"z"], time_ms=77)
        path = ledger_path(row[0])
        stored = await bookies.metadata.get(path)
        assert stored is not None
        metadata = LedgerMetadata.decode(stored.value, row[0])
        wrong = dataclasses.replace(metadata, length=metadata.length + 1)
        version = await bookies.metadata.put(path, wrong.encode(), version=stored.version)
        with pytest.raises(InvalidArgument, match=rf"has {metadata.length} bytes, and not {wrong.length}"):
            await job.attach(0, row)
        await bookies.metadata.put(path, stored.value, version=version)
        row[2] = 0  # the asking side's guess
        assert (await job.attach(0, row))["attached"]
        info = (await record_of(bookies)).ledgers[-1]
        assert (info.messages, info.size) == (3, metadata.length)
        assert await read_all(broker, 4) == [b"a", b"x", b"y", b"z"]


async def test_position_ids_of_a_batch_are_drawn_in_one_write(
    bookies: Bookies, ledgers: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        rows = [await job.stage([b"%d" % number]) for number in range(5)]
        before = await ledgers.next_id()
        draw, draws = bookies.metadata.next_id, []

        async def next_id(name: str, count: int = 1) -> int:
            draws.append(count)
            return await draw(name, count)

        monkeypatch.setattr(bookies.metadata, "next_id", next_id)
        assert (await job.attach(0, *rows))["attached"]
        assert draws == [5]
        ids = [info.ledger_id for info in (await record_of(bookies)).ledgers]
        assert ids == list(range(before + 1, before + 6))
        assert await ledgers.next_id() > ids[-1]
