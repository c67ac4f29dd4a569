"""Entries of archived ledgers are what the bookies had: byte for byte, whichever part of them is asked for."""

from __future__ import annotations

import contextlib
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from magnetar.archive import entries as archived_entries
from magnetar.archive import files as archive_files
from magnetar.archive.entries import ArchivedEntries, Place
from magnetar.archive.files import ArchiveFolder
from magnetar.proto.admission import check_entry
from magnetar.proto.batch import FORMAT_NATIVE, Columns, decode_batch, encode_batch, encode_singles
from magnetar.proto.batch_extensions import entry_extensions, entry_flags
from magnetar.proto.compression import Compression
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import ArchiveUnavailable, EntryDamaged
from magnetar.proto.ids import MessageId
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, encode_ledger_entry, ledger_entry_is_intact
from magnetar.proto.pulsar.batch import admit_pulsar
from magnetar.proto.pulsar.transcoding import to_pulsar
from magnetar.spark.columns import Rows, Source
from magnetar.spark.jobs.archive import ARROW_SCHEMA, manifest_of
from magnetar.spark.plan import Range
from support.archive_kit import ledger_of, write_archive
from support.pulsar_messages import batch, frame, read_frame, single
from support.service import holding_port

TOPIC = "persistent://public/default/orders"


def random_batches(rng: random.Random, first_sequence_id: int) -> tuple[list[bytes], list[int]]:
    """As producers send them: many of one message, or one of many."""
    n = rng.choice((1, 1, 2, 5, 40))
    values = [rng.choice((None, b"", rng.randbytes(rng.randrange(200)))) for _ in range(n)]
    time_ms = 1_700_000_000_000 + rng.randrange(3)
    if rng.random() < 0.4:
        keys = rng.choice((None, [rng.choice(("key-ä", "other")) for _ in range(n)]))
        columns = Columns([value or b"" for value in values], keys)
        return encode_singles(columns, first_sequence_id, time_ms).batches(), [1] * n
    batch = encode_batch(
        values,
        sequence_id=first_sequence_id,
        publish_time_ms=time_ms,
        keys=rng.choice(
            (None, ["first", *(rng.choice((None, "key-ä", b"\xff\x00")) for _ in range(n - 1))], [b"one"] * n)
        ),
        properties=rng.choice(
            (None, [{"a": "1"}, *(rng.choice((None, {"b": "ü", "a": ""}, {})) for _ in range(n - 1))])
        ),
        event_times_ms=rng.choice((None, [rng.choice((5, 77)) for _ in range(n)])),
        sequence_ids=rng.choice((None, None, [first_sequence_id + 3 * i for i in range(n)]))
        if n > 1
        else None,
        compression=rng.choice(list(Compression)),
        extensions=rng.choice((None, None, {1: 12345, 77: b"not known"})),
    )
    return [batch], [n]


def random_entries(rng: random.Random, count: int) -> list[bytes]:
    """Ledger entries."""
    entries: list[bytes] = []
    first_index = 0
    for entry_id in range(count):
        batches: list[bytes] = []
        counts: list[int] = []
        producers: list[int] = []
        for _ in range(rng.choice((1, 1, 3, 6))):
            more, of_each = random_batches(rng, rng.randrange(1000))
            batches += more
            counts += of_each
            # Names stand in the table in the order of their first batches.
            producers += [rng.randrange(min(max(producers, default=-1) + 2, 3))] * len(more)
        names = ["first", "second-ü", "third"][: max(producers) + 1]
        payload = encode_entry(
            batches,
            counts,
            producers,
            names,
            first_index=first_index,
            append_time_ms=1_700_000_000_500 + entry_id,
            flags=entry_flags(batches),
        )
        first_index += sum(counts)
        entries.append(encode_ledger_entry(9, entry_id, entry_id - 1, 0, payload))
    return entries


def payloads(entries: list[bytes]) -> list[bytes]:
    return [entry[LEDGER_ENTRY_HEADER_BYTES:] for entry in entries]


def read_all(reader: ArchivedEntries, place: Place, count: int, max_bytes: int = 1 << 20) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += reader.read(place, len(found), count - 1, max_bytes)
    return found


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows make a row group, so entries go over their borders; and little is remembered."""
    monkeypatch.setattr(archive_files, "ROW_GROUP_ROWS", 7)
    monkeypatch.setattr(archived_entries, "GROUP_CACHE_BYTES", 3000)
    monkeypatch.setattr(archived_entries, "ROWS_AT_ONCE", 5)


@pytest.mark.parametrize("seed", range(30))
def test_entries_come_back_byte_for_byte(tmp_path: Path, small_groups: None, seed: int) -> None:
    rng = random.Random(seed)
    entries = random_entries(rng, rng.choice((1, 3, 30)))
    ledger = ledger_of(entries, tmp_path)
    write_archive(tmp_path, TOPIC, ledger, entries, entries_per_file=rng.choice((1, 4, 1000)))
    reader, place = ArchivedEntries(), Place(TOPIC, ledger)
    found = read_all(reader, place, len(entries), max_bytes=rng.choice((1, 700, 1 << 20)))
    assert payloads(found) == payloads(entries)
    assert all(map(ledger_entry_is_intact, found))
    # Any part of it, in any order.
    for _ in range(20):
        first = rng.randrange(len(entries))
        last = rng.randrange(first, len(entries))
        max_bytes = rng.choice((1, 300, 5000))
        part = reader.read(place, first, last, max_bytes)
        assert 1 <= len(part) <= last - first + 1
        assert len(part) == 1 or sum(map(len, part)) <= max_bytes
        assert payloads(part) == payloads(entries[first : first + len(part)])
        # No more would have fitted.
        if first + len(part) <= last:
            assert sum(map(len, part)) + len(entries[first + len(part)]) > max_bytes


def test_an_entry_that_row_groups_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut by bytes where a record batch has many."""
    monkeypatch.setattr(archive_files, "ROW_GROUP_BYTES", 5_000)
    rng = random.Random(1)
    batches = [encode_batch([rng.randbytes(900)], sequence_id=i, publish_time_ms=5) for i in range(40)]
    entries = [
        encode_ledger_entry(
            9,
            n,
            n - 1,
            0,
            encode_entry(batches, [1] * 40, [0] * 40, ["p"], first_index=40 * n, append_time_ms=7),
        )
        for n in range(3)
    ]
    ledger = ledger_of(entries, tmp_path)
    write_archive(tmp_path, TOPIC, ledger, entries)
    for max_bytes in (1, 1 << 20):
        assert payloads(read_all(ArchivedEntries(), Place(TOPIC, ledger), 3, max_bytes)) == payloads(entries)
    assert payloads(ArchivedEntries().read(Place(TOPIC, ledger), 1, 1, 1)) == payloads(entries[1:2])


def test_attached_ledgers_have_the_time_of_the_attachment(tmp_path: Path) -> None:
    entries = random_entries(random.Random(3), 3)
    ledger = ledger_of(entries, tmp_path, position_id=11)._replace(last_append_ms=1_700_000_009_000)
    write_archive(tmp_path, TOPIC, ledger, entries)
    found = read_all(ArchivedEntries(), Place(TOPIC, ledger), 3)
    for one, other in zip(found, entries, strict=True):
        entry, before = Entry(one, LEDGER_ENTRY_HEADER_BYTES), Entry(other, LEDGER_ENTRY_HEADER_BYTES)
        assert entry.append_time_ms == 1_700_000_009_000
        assert one[entry.body :] == other[before.body :]


# --- faults ----------------------------------------------------------------------------------------------------------


class Archive:
    """One ledger in two files, and a reader that has read all of it."""

    def __init__(self, path: Path) -> None:
        self.entries = random_entries(random.Random(5), 20)
        self.ledger = ledger_of(self.entries, path)
        self.folder = write_archive(path, TOPIC, self.ledger, self.entries, entries_per_file=10)
        self.place = Place(TOPIC, self.ledger)
        files = self.folder.manifest(TOPIC, 9).files
        self.files = [Path(self.folder.data_path(TOPIC, 9, one.name)) for one in files]
        self.manifest = Path(self.folder.manifest_path(TOPIC, 9))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


FAULTS: dict[str, tuple[Callable[[Archive], Any], str]] = {
    "missing": (lambda one: one.files[1].unlink(), "it is not there"),
    "truncated": (lambda one: os.truncate(one.files[1], 500), "it has 500 bytes, and its manifest says"),
    "flipped in a page": (lambda one: flip(one.files[1], 400), ""),
    "another file": (
        lambda one: one.files[1].write_bytes(one.files[0].read_bytes()),
        "and its manifest says",
    ),
    "manifest missing": (lambda one: one.manifest.unlink(), "it is not there"),
    "manifest damaged": (lambda one: one.manifest.write_text("{"), "is damaged"),
    "manifest of another ledger": (
        lambda one: edit(one.manifest, '"stored_ledger": 9', '"stored_ledger": 8'),
        "it says stored ledger 8, and the topic 9",
    ),
    "rows": (
        lambda one: edit(one.manifest, '"entries": 20', '"entries": 21'),
        "it says entries 21, and the topic 20",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_one_error_that_names_the_file_and_the_cure(archive: Archive, fault: str) -> None:
    harm, says = FAULTS[fault]
    saved = {path: path.read_bytes() for path in (*archive.files, archive.manifest)}
    harm(archive)
    reader = ArchivedEntries()
    path = archive.manifest if "manifest" in fault or fault == "rows" else archive.files[1]
    for _ in range(2):
        with pytest.raises(EntryDamaged) as raised:
            reader.read(archive.place, 15, 19, 1 << 20)
        text = raised.value.message
        assert text.startswith(
            f"ledger 9 of {TOPIC} is archived at {archive.ledger.archive}, and {path} cannot be used: "
        )
        assert says in text
        assert text.endswith("; bring it back from a copy, or seek behind the ledger")
    # What is sound before it is read, also by a read that would go on into it, and the rest as soon as it is mended.
    if path in archive.files:
        assert payloads(reader.read(archive.place, 3, 19, 1 << 20)) == payloads(archive.entries)[3:10]
    for path, data in saved.items():
        path.write_bytes(data)
    assert payloads(read_all(reader, archive.place, 20)) == payloads(archive.entries)


@pytest.mark.parametrize("seed", range(40))
def test_no_flipped_bit_changes_what_is_read(archive: Archive, seed: int) -> None:
    """Wherever it is: an error, or what was written. (The footer has no checksum, so a few bits in it say nothing.)"""
    rng = random.Random(seed)
    flip(archive.files[1], rng.randrange(archive.files[1].stat().st_size))
    with contextlib.suppress(EntryDamaged):
        assert payloads(read_all(ArchivedEntries(), archive.place, 20)) == payloads(archive.entries)


def test_an_entry_that_is_not_whole_is_not_delivered(tmp_path: Path) -> None:
    """Files whose rows are as many as they should be, and not those."""
    batches = [encode_batch([b"1", b"2"], sequence_id=0, publish_time_ms=5)]
    entries = [
        encode_ledger_entry(
            9, n, n - 1, 0, encode_entry(batches, [2], [0], ["p"], first_index=2 * n, append_time_ms=7)
        )
        for n in range(3)
    ]
    ledger = ledger_of(entries, tmp_path)
    rows = Rows(ARROW_SCHEMA.names, TOPIC, -1)
    for entry in entries:
        rows.add(entry, Source(9, 1000), Range())
    batch = rows.take()
    places = [(0, 0), (0, 1), (0, 3), (1, 1), (2, 0), (2, 1)]
    ids = pa.array([MessageId(9, *place).to_bytes() for place in places], pa.binary())
    changed = batch.set_column(batch.schema.get_field_index("message_id"), "message_id", ids)
    folder = ArchiveFolder(str(tmp_path))
    file = folder.write_file(TOPIC, 9, 0, 2, ARROW_SCHEMA, [changed])
    folder.write_manifest(manifest_of(TOPIC, ledger, (file,)))
    reader, place = ArchivedEntries(), Place(TOPIC, ledger)
    assert payloads(reader.read(place, 2, 2, 1)) == payloads(entries[2:])
    for number in (0, 1):
        with pytest.raises(EntryDamaged, match=f"entry {number} is not whole in it"):
            reader.read(place, number, number, 1)


def test_an_archive_that_is_not_there_may_come_back(archive: Archive, tmp_path: Path) -> None:
    reader = ArchivedEntries()
    assert reader.read(archive.place, 0, 0, 1)
    os.rename(tmp_path / "archive", tmp_path / "unmounted")
    with pytest.raises(
        ArchiveUnavailable, match=r"there is no archive there; is it mounted on this machine\?"
    ):
        ArchivedEntries().read(archive.place, 0, 0, 1)
    with pytest.raises(ArchiveUnavailable, match="is it mounted"):
        reader.read(archive.place, 15, 15, 1)
    os.rename(tmp_path / "unmounted", tmp_path / "archive")
    assert payloads(read_all(reader, archive.place, 20)) == payloads(archive.entries)
    elsewhere = Place(TOPIC, archive.ledger._replace(archive="nowhere://x/y"))
    with pytest.raises(ArchiveUnavailable, match=r"'nowhere://x/y' is no place for an archive"):
        reader.read(elsewhere, 0, 0, 1)


def test_an_object_store_that_cannot_be_reached_may_be_later(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with holding_port() as port:
        at = f"s3://key:secret@bucket/a?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        place = Place(TOPIC, archive.ledger._replace(archive=at))
        with pytest.raises(ArchiveUnavailable, match=r"bucket/a/_manifest/.*cannot be read now: .*connect"):
            ArchivedEntries().read(place, 0, 0, 1)


def test_messages_are_readable_again(archive: Archive) -> None:
    """A look at the content, independent of the comparison of bytes."""
    (data,) = ArchivedEntries().read(archive.place, 0, 0, 1)
    entry = Entry(data, LEDGER_ENTRY_HEADER_BYTES)
    before = Entry(archive.entries[0], LEDGER_ENTRY_HEADER_BYTES)
    for position in range(before.batch_count):
        one, other = decode_batch(bytes(entry.batch(position))), decode_batch(bytes(before.batch(position)))
        assert (one.values, one.keys, one.metadata, one.header) == (
            other.values,
            other.keys,
            other.metadata,
            other.header,
        )


def test_batches_of_pulsar_come_back_as_native_ones(tmp_path: Path) -> None:
    """Every message is what it was, under its id; compressed chunks can still be put together."""
    packed = zlib.compress(bytes(9000))
    fields: dict[str, Any] = {
        "uuid": "u", "num_chunks_from_msg": 2, "total_chunk_msg_size": len(packed), "compression": 2,
        "uncompressed_size": 9000,
    }  # fmt: skip
    singles = [
        single(b"a", {"x": "y"}, partition_key="k", event_time=7, sequence_id=3),
        single(None, sequence_id=9),
    ]
    admitted = admit_pulsar(
        [
            batch(singles, sequence_id=3, highest_sequence_id=9),
            batch([single(b"b", sequence_id=10)], sequence_id=10),
            frame(b"c", sequence_id=11, deliver_at_time=1_800_000_000_000, schema_version=bytes(8)),
            *(frame(piece, chunk_id=at, **fields) for at, piece in enumerate((packed[:9], packed[9:]))),
        ]
    )
    n = len(admitted.batches)
    payload = encode_entry(
        admitted.batches,
        admitted.counts,
        [0] * n,
        ["p"],
        first_index=0,
        append_time_ms=5,
        flags=entry_flags(admitted.batches),
    )
    entries = [encode_ledger_entry(9, 0, -1, 0, payload)]
    ledger = ledger_of(entries, tmp_path)
    write_archive(tmp_path, TOPIC, ledger, entries)
    (found,) = read_all(ArchivedEntries(), Place(TOPIC, ledger), 1)
    before, after = Entry(payload), Entry(found, LEDGER_ENTRY_HEADER_BYTES)
    assert (after.flags, list(after.end_indexes)) == (before.flags, list(before.end_indexes))
    assert entry_extensions(after) == entry_extensions(before)
    for position in range(n):
        old, new = (decode_batch(bytes(one.batch(position))) for one in (before, after))
        assert new.header.format == FORMAT_NATIVE
        assert (new.values, new.keys, new.extensions) == (old.values, old.keys, old.extensions)
        assert new.metadata == old.metadata
        assert new.header[7:9] == old.header[7:9], "sequence id and publish time"
    # Consumers of Pulsar's protocol join them with chunks that are not in the archive.
    last = [
        read_frame(bytes(to_pulsar(after.batch(position), "p", 5000)[0].data))[0]
        for position in (n - 2, n - 1)
    ]
    assert [(one.uuid, one.chunk_id) for one in last] == [("u", 0), ("u", 1)]
    check_entry(after, 1 << 20)
