"""What is verified of a staged ledger before it becomes part of the topic, and what its place costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from magnetar.broker.export import attach, staged_entries
from magnetar.ledger import LedgerClient, LedgerMetadata
from magnetar.metadata.ledgers import ledger_path
from magnetar.proto import admission
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import InvalidArgument
from support.bookies import Bookies
from support.export_kit import Job, appended, export_broker, published, read_all, record_of, small_broker


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


WRONG_BATCHES: list[tuple[str, dict[str, Any]]] = [
    ("properties", {"properties": [{"a": None}]}),
    ("time", {"event_times_ms": [-1]}),
    ("time", {"publish_time_ms": 1_700_000_000_000_000_000}),
    ("bytes", {"properties": [{"a": "x" * (6 << 20)}]}),
]
GOOD = encode_batch([b"v"], sequence_id=0, publish_time_ms=9)
WRONG: list[tuple[str, list[bytes], list[int], int]] = [
    *(
        (name, [GOOD, encode_batch([b"v"], **{"sequence_id": 1, "publish_time_ms": 9, **fields})], [1, 1], 9)
        for name, fields in WRONG_BATCHES
    ),
    ("time", [GOOD], [1], 1_700_000_000_000_000_000),
    ("checksum", [GOOD[:-1] + b"w"], [1], 9),
    ("counts", [GOOD], [2], 9),
    ("counts", [GOOD + GOOD], [2], 9),
    (
        "32768 of a batch",
        [encode_batch([b""] * 30_000, sequence_id=0, publish_time_ms=9)] * 2,
        [30_000] * 2,
        9,
    ),
]


@pytest.mark.parametrize(("why", "batches", "counts", "append_ms"), WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("make_broker", [export_broker, small_broker])
async def test_rule_47_the_broker_looks_into_every_staged_entry_as_it_does_into_what_producers_send(
    why: str,
    batches: list[bytes],
    counts: list[int],
    append_ms: int,
    make_broker: Any,
    bookies: Bookies,
    ledgers: LedgerClient,
) -> None:
    async with make_broker(
        bookies, ledgers, attach_min_bytes=0 if make_broker is export_broker else 16 << 20
    ) as broker:
        await published(broker, b"a")
        job = Job(bookies, broker)
        writer = await job.open()
        messages = 0
        for entry_batches, entry_counts, ms in (
            ([GOOD], [1], 9),
            (batches, counts, append_ms),
            ([GOOD], [1], 9),
        ):
            entry = encode_entry(
                entry_batches, entry_counts, [0] * len(entry_batches), ["task"],
                first_index=messages, append_time_ms=ms,
            )  # fmt: skip
            await appended(writer, entry)
            messages += sum(entry_counts)
        await writer.close()
        with pytest.raises(InvalidArgument, match=f"entry 1 of staged ledger .*{why}"):
            await job.attach(0, [writer.ledger_id, messages, 9, 9])
        row = await job.stage([b"x"])
        await job.attach(0, row)  # what was refused left nothing behind
        assert await read_all(broker, 2) == [b"a", b"x"]


async def test_rule_47_an_entry_that_says_to_be_a_slice_is_refused(
    bookies: Bookies, ledgers: LedgerClient
) -> None:
    """It counts one message less than it holds: all later offsets of the topic would be shifted."""
    async with export_broker(bookies, ledgers) as broker:
        job = Job(bookies, broker)
        writer = await job.open()
        whole = encode_entry([GOOD, GOOD], [1, 1], [0, 0], ["task"], first_index=0, append_time_ms=9)
        count, base = slice(8, 12), slice(12, 16)  # of the header: WIRE.md
        changed = bytearray(whole)
        changed[count], changed[base] = (1).to_bytes(4), (1).to_bytes(4)
        await appended(writer, bytes(changed))
        await writer.close()
        with pytest.raises(InvalidArgument, match="slice"):
            await job.attach(0, [writer.ledger_id, 1, 9, 9])


async def test_of_a_large_batch_a_part_of_the_entries_is_looked_into(
    bookies: Bookies, ledgers: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    check = admission.check_entry

    def recorded(entry: Entry, most: int) -> None:
        looked.append(entry.first_index)
        check(entry, most)

    monkeypatch.setattr(staged_entries, "check_entry", recorded)
    async with export_broker(bookies, ledgers) as broker:
        await published(broker, b"a")
        job = Job(bookies, broker)
        row = await job.stage(*[[b"x"]] * 100)
        stored = await bookies.metadata.get(ledger_path(row[0]))
        assert stored is not None
        size = LedgerMetadata.decode(stored.value, row[0]).length
        monkeypatch.setattr(attach, "_CHECKED_BYTES", size // 30)
        assert (await job.attach(0, row))["attached"]
        assert looked == [*range(0, 100, 31), 99]
