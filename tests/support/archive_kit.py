"""Archives of real Parquet files without Spark: entries of a ledger, and a broker's ledgers, written as the job does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from magnetar.archive.files import ArchivedFile, ArchiveFolder, LedgerManifest
from magnetar.broker import Broker
from magnetar.proto import commands as c
from magnetar.proto.entry import Entry
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.spark.archived import ArchivedSlice, archived_slices
from magnetar.spark.columns import Rows, Source
from magnetar.spark.jobs.archive import ARROW_SCHEMA, manifest_of
from magnetar.spark.plan import Range, TopicLedger
from support.broker_kit import FakeClient


def write_archive(
    path: Path, topic: str, ledger: TopicLedger, entries: Sequence[bytes], *, entries_per_file: int = 1 << 30
) -> ArchiveFolder:
    """Of ledger entries, as bookies have them; a record batch of each entry."""
    folder = ArchiveFolder(str(path))
    files: list[ArchivedFile] = []
    for first in range(0, len(entries), entries_per_file):
        some = entries[first : first + entries_per_file]

        def batches(some: Sequence[bytes] = some) -> Any:
            rows = Rows(ARROW_SCHEMA.names, topic, -1)
            for entry in some:
                rows.add(entry, Source(ledger.position_id, ledger.first_offset, ledger.append_ms), Range())
                yield rows.take()

        last = first + len(some) - 1
        files.append(folder.write_file(topic, ledger.position_id, first, last, ARROW_SCHEMA, batches()))
    folder.write_manifest(manifest_of(topic, ledger, tuple(files)))
    return folder


def file_slices(*arguments: Any) -> list[ArchivedSlice]:
    """`archived_slices` of files without messages in chunks."""
    found = [one for one in archived_slices(*arguments) if isinstance(one, ArchivedSlice)]
    assert len(found) == len(archived_slices(*arguments))
    return found


def ledger_of(
    entries: Sequence[bytes], location: Path, *, position_id: int = 9, stored_id: int = 9
) -> TopicLedger:
    """The row of a closed ledger with these entries, archived there."""
    parsed = [Entry(entry, LEDGER_ENTRY_HEADER_BYTES) for entry in entries]
    return TopicLedger(
        position_id,
        stored_id,
        1000,
        len(entries),
        sum(entry.message_count for entry in parsed),
        sum(map(len, entries)),
        parsed[0].append_time_ms,
        parsed[-1].append_time_ms,
        True,
        b"",
        ArchiveFolder(str(location)).location,
    )


async def archive_ledgers(broker: Broker, path: Path, count: int, topic: str = "orders") -> list[int]:
    """The first `count` closed ledgers of a topic leave the bookies for files; returns their position ids."""
    client = FakeClient(broker)
    log = next(one for name, one in broker.topics.items() if name.endswith(f"/{topic}")).ledger
    rows = [row for row in (await client.ask(c.TopicLedgers, topic))["ledgers"] if len(row) < 11 and row[8]][
        :count
    ]
    for row in rows:
        entries: list[bytes] = []
        while len(entries) < row[3]:
            entries += await log.reading.read(row[0], len(entries), max_bytes=1 << 20)
        write_archive(path, str(log.name), TopicLedger(*row), entries)
    payload = msgpack.packb([[row[0], row[1], row[3], row[4]] for row in rows])
    answer = await client.ask(c.ArchiveLedgers, topic, ArchiveFolder(str(path)).location, payload=payload)
    assert answer["archived"] == len(rows), answer
    return [row[0] for row in rows]


def damaged(folder: ArchiveFolder, manifest: LedgerManifest) -> list[str]:
    """Names of the manifest's files that are not there, or not as they were written."""
    return [one.name for one in manifest.files if folder.check_file(manifest.topic, manifest.ledger, one)]
