"""A piece of an archived ledger reads as the same piece of its entries would, whatever the range and the columns."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from magnetar.archive import files as archive_files
from magnetar.archive.files import ArchivedFile, ArchiveFolder, LedgerManifest
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import MessageLost
from magnetar.proto.ids import MessageId
from magnetar.proto.ledger_entry import encode_ledger_entry
from magnetar.runtime.files import OsFile, OsFiles
from magnetar.spark import archived as archived_module
from magnetar.spark.archived import bounds_of, first_archived, read_archived
from magnetar.spark.columns import Rows, Source
from magnetar.spark.jobs.archive import ARROW_SCHEMA, manifest_of
from magnetar.spark.places import Point, end_of, point_at
from magnetar.spark.plan import PAST_ALL, Range, TopicLedger, slices
from magnetar.spark.schema import COLUMNS
from magnetar.spark.service import TopicPlan
from support.archive_kit import damaged, file_slices

TOPIC = "persistent://public/default/orders"
LEDGER, STORED, FIRST_OFFSET = 12, 11, 1000
ENTRIES_PER_FILE = 4


class Archived:
    """A ledger of a dozen entries, as bookies have it and as an archive has it."""

    def __init__(self, path: str) -> None:
        rng = random.Random(7)
        self.folder = ArchiveFolder(path)
        self.entries: list[bytes] = []
        index, time_ms, last_ms = 0, 5_000, 0
        for entry_id in range(12):
            n = rng.randrange(1, 9)
            batch = encode_batch(
                [None if rng.random() < 0.2 else b"v%d" % (index + i) for i in range(n)],
                keys=rng.choice([None, [rng.choice([None, f"k{i}", b"\xff"]) for i in range(n)]]),
                properties=rng.choice([None, [rng.choice([None, {"a": "b"}]) for _ in range(n)]]),
                event_times_ms=rng.choice([None, [rng.choice([None, 77]) for _ in range(n)]]),
                sequence_id=index,
                publish_time_ms=time_ms - 3,
            )
            payload = encode_entry([batch], [n], [0], ["p"], first_index=index, append_time_ms=time_ms)
            self.entries.append(encode_ledger_entry(STORED, entry_id, -1, 0, payload))
            last_ms = time_ms
            index, time_ms = index + n, time_ms + rng.randrange(3)
        self.ledger = TopicLedger(
            LEDGER,
            STORED,
            FIRST_OFFSET,
            12,
            index,
            900,
            5_000,
            last_ms,
            True,
            b"",
            self.folder.location,
        )
        files = []
        for first in range(0, 12, ENTRIES_PER_FILE):
            last = first + ENTRIES_PER_FILE - 1
            entries = range(first, last + 1)
            batches = itertools.chain.from_iterable(
                self.live(Range(), tuple(ARROW_SCHEMA.names), one, one) for one in entries
            )
            files.append(self.folder.write_file(TOPIC, LEDGER, first, last, ARROW_SCHEMA, batches))
        self.manifest = manifest_of(TOPIC, self.ledger, tuple(files))
        self.folder.write_manifest(self.manifest)

    def live(
        self, wanted: Range, columns: tuple[str, ...], first: int = 0, last: int = 11
    ) -> Iterator[pa.RecordBatch]:
        rows, source = Rows(columns, TOPIC, -1), Source(LEDGER, FIRST_OFFSET)
        for entry in self.entries[first : last + 1]:
            rows.add(entry, source, wanted)
        if rows.count:
            yield rows.take()

    def read(self, wanted: Range, columns: tuple[str, ...]) -> list[pa.RecordBatch]:
        pieces = file_slices(TOPIC, [self.ledger], wanted, 1)
        return [batch for piece in pieces for batch in read_archived(piece, columns)]

    def file(self, number: int = 0) -> Path:
        return Path(self.folder.data_path(TOPIC, LEDGER, self.manifest.files[number].name))

    def change(self, **changed: object) -> None:
        changed_manifest = dataclasses.replace(self.manifest, **changed)  # type: ignore[arg-type]
        path = Path(self.folder.manifest_path(TOPIC, LEDGER))
        path.write_text(changed_manifest.to_json())


@pytest.fixture
def archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archived:
    # Several row groups a file, so that some are passed over.
    monkeypatch.setattr(archive_files, "ROW_GROUP_ROWS", 1)
    return Archived(str(tmp_path / "archive"))


def table(batches: list[pa.RecordBatch], columns: tuple[str, ...]) -> pa.Table:
    schema = pa.schema([pa.field(name, COLUMNS[name][1]) for name in columns])
    return pa.Table.from_batches(batches, schema)


def test_every_column_is_as_a_read_of_the_entries_has_it(archived: Archived) -> None:
    columns = tuple(COLUMNS)
    expected = table(list(archived.live(Range(), columns)), columns)
    assert expected.num_rows == archived.ledger.messages
    assert table(archived.read(Range(), columns), columns).equals(expected)


def test_a_file_that_is_older_than_a_column_has_nulls_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Archived.live

    def without_producer(self: Archived, wanted: Range, columns: tuple[str, ...], *entries: int) -> Any:
        return whole(self, wanted, tuple(name for name in columns if name != "producer"), *entries)

    monkeypatch.setattr(Archived, "live", without_producer)
    at = ARROW_SCHEMA.get_field_index("producer")
    monkeypatch.setitem(globals(), "ARROW_SCHEMA", ARROW_SCHEMA.remove(at))
    archived = Archived(str(tmp_path / "archive"))
    found = table(archived.read(Range(), ("offset", "producer")), ("offset", "producer"))
    assert found.num_rows == found.column("producer").null_count == archived.ledger.messages


@pytest.mark.parametrize("seed", range(60))
def test_ranges(archived: Archived, seed: int) -> None:
    rng = random.Random(seed)
    messages, last_ms = archived.ledger.messages, archived.ledger.last_append_ms

    def one(kind: str, low: int, high: int) -> dict[str, int]:
        return {
            name: rng.randrange(low, high)
            for name in (f"from_{kind}", f"before_{kind}")
            if rng.random() < 0.6
        }

    def position() -> tuple[int, int, int]:
        return (
            rng.choice([LEDGER - 1, LEDGER, LEDGER, LEDGER, LEDGER + 1]),
            rng.randrange(13),
            rng.randrange(9),
        )

    wanted = Range()
    if rng.random() < 0.6:
        wanted = wanted.narrowed(
            Range(**one("offset", FIRST_OFFSET - 2, FIRST_OFFSET + messages + 2))  # type: ignore[arg-type]
        )
    if rng.random() < 0.6:
        wanted = wanted.narrowed(Range(**one("append_ms", 4_998, last_ms + 3)))  # type: ignore[arg-type]
    if rng.random() < 0.6:
        wanted = wanted.narrowed(Range(from_position=position()))
    if rng.random() < 0.6:
        wanted = wanted.narrowed(Range(before_position=position()))
    columns = tuple(rng.sample(list(COLUMNS), rng.randrange(1, len(COLUMNS))))
    expected = table(list(archived.live(wanted, columns)), columns)
    found = table(archived.read(wanted, columns), columns)
    assert found.equals(expected), wanted
    if wanted.before_position == PAST_ALL:
        first = first_archived(TOPIC, archived.ledger, wanted)
        places = ("message_id", "offset")
        rows = table(list(archived.live(wanted, places)), places).to_pylist()
        assert first == (tuple(rows[0].values()) if rows else None)


def test_edges_in_time(archived: Archived) -> None:
    columns = ("offset",)
    for time_ms in range(4_999, archived.ledger.last_append_ms + 2):
        for wanted in (Range(from_append_ms=time_ms), Range(before_append_ms=time_ms)):
            expected = table(list(archived.live(wanted, columns)), columns)
            assert table(archived.read(wanted, columns), columns).equals(expected), wanted


def test_files_and_row_groups_outside_are_not_read(
    archived: Archived, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[list[int]] = []
    real = pq.ParquetFile.iter_batches

    def reading(self: pq.ParquetFile, *args: Any, **named: Any) -> object:
        groups.append(args[1])
        return real(self, *args, **named)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", reading)
    second = FIRST_OFFSET + archived.manifest.files[0].rows
    for wanted in (
        Range(from_offset=second + 1, before_offset=second + 2),
        Range(from_position=(LEDGER, 4, 0), before_position=(LEDGER, 4, 1)),
    ):
        (piece,) = file_slices(TOPIC, [archived.ledger], wanted, 900)
        assert [one.name for one, _ in piece.files] == [archived.manifest.files[1].name]
        groups.clear()
        assert sum(batch.num_rows for batch in read_archived(piece, ("value",))) == 1
        assert [len(read) for read in groups] == [1]
    # A file that lies wholly within is read without a look at its rows.
    file = archived.manifest.files[1]
    inside = Range(from_offset=second, before_offset=second + file.rows)
    assert bounds_of(inside, archived.ledger, file, second) == []


def test_files_share_tasks_up_to_the_size_asked_for(
    archived: Archived, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archived_module, "ROW_GROUP_ROWS", 5)

    def pieces(size: int) -> list[int]:
        found = file_slices(TOPIC, [archived.ledger], Range(), size)
        return [len(piece.files) for piece in found]

    assert pieces(400) == [1, 1, 1]
    assert pieces(900) == [3]
    # A file that is too large for one is read by several, which have its row groups among them.
    parts = file_slices(TOPIC, [archived.ledger], Range(), 100)
    first = [piece for piece in parts if piece.files[0][1] == FIRST_OFFSET]
    assert [piece.part for piece in first] == [(n, len(first)) for n in range(len(first))]
    read = [[batch.num_rows for batch in read_archived(piece, ("offset",))] for piece in first]
    assert len(read) > 1
    assert all(read)
    # Nothing of it is asked of bookies.
    assert slices(TOPIC, [archived.ledger], Range(), 1, {}) == []


def damage(data: bytes) -> bytes:
    """One bit of a page of values, the size as it was."""
    at = data.index(b"\x28\xb5\x2f\xfd") + 9
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda one: one.file().unlink(), "it is not there"),
        (
            lambda one: one.file().write_bytes(one.file().read_bytes()[:-3]),
            "it has .* bytes, and its manifest",
        ),
        (lambda one: one.file().write_bytes(damage(one.file().read_bytes())), "(CRC|deserialize)"),
        (lambda one: one.file().write_bytes(bytes(one.file().stat().st_size)), "."),
        (lambda one: one.change(stored_ledger=3), "it says stored ledger 3, and the topic 11"),
        (lambda one: one.change(files=one.manifest.files[1:]), "its files are not the whole ledger"),
    ],
    ids=["gone", "shorter", "damaged", "zeroes", "of another ledger", "a file too few"],
)
def test_whatever_is_wrong_with_an_archive_is_one_error_that_names_it(
    archived: Archived, spoil: Callable[[Archived], None], why: str
) -> None:
    spoil(archived)
    with pytest.raises(MessageLost) as raised:
        archived.read(Range(), tuple(COLUMNS))
    messages = archived.ledger.messages
    assert raised.match(
        rf"^{messages} messages of {TOPIC} from offset 1000 on \(ledger 12\) are archived at file:///.*, and .* "
        rf"cannot be used: .*{why}.*start=13:0:0$"
    )


def test_a_manifest_that_is_gone_or_damaged_is_told(archived: Archived) -> None:
    path = Path(archived.folder.manifest_path(TOPIC, LEDGER))
    path.write_text("{")
    with pytest.raises(
        MessageLost, match=r"\.json cannot be used: manifest .* is damaged [^;]*; bring it back, or read what"
    ):
        archived.read(Range(), ("value",))
    path.unlink()
    with pytest.raises(MessageLost, match=r"\.json cannot be used: it is not there; bring it back"):
        archived.read(Range(), ("value",))
    # What is not wanted is not looked at.
    assert archived.read(Range(from_position=(13, 0, 0)), ("value",)) == []


async def test_an_offset_in_a_hole_is_the_next_message_that_is_left(archived: Archived) -> None:
    """Ledgers that were trimmed before they were archived leave one; a bounded batch must not run to the end."""
    behind = TopicLedger(20, 20, FIRST_OFFSET + 500, 9, 40, 90, 1, 2, True, b"")
    last = behind._replace(position_id=30, first_offset=behind.end_offset, closed=False)
    plan = TopicPlan(TOPIC, [archived.ledger, behind, last], (30, 9, 0), {}, "", last.end_offset, 1)
    assert await point_at(FIRST_OFFSET + 300, plan, 1) == Point(MessageId(20, 0, 0), FIRST_OFFSET + 500)
    assert await point_at(behind.end_offset, plan, 1) == Point(MessageId(30, 0, 0), behind.end_offset)
    assert await point_at(last.end_offset, plan, 1) == end_of(plan)
    inside = await point_at(FIRST_OFFSET + 3, plan, 1)
    assert (inside.id.ledger, inside.offset) == (LEDGER, FIRST_OFFSET + 3)


def test_an_archive_elsewhere_is_read_by_its_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store, as far as this code can tell: no local file system, so nothing to sync."""
    buckets = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    opened: list[str] = []

    def from_uri(uri: str) -> tuple[pafs.FileSystem, str]:
        opened.append(uri)
        return buckets, uri.removeprefix("s3://").partition("?")[0]

    names = {name: getattr(pafs, name) for name in dir(pafs)}
    known = names | {"FileSystem": SimpleNamespace(from_uri=from_uri)}
    monkeypatch.setattr(archive_files, "pafs", SimpleNamespace(**known))
    monkeypatch.setattr(OsFile, "sync", None)
    monkeypatch.setattr(OsFiles, "sync_directory", None)
    place = "s3://bucket/archive?region=eu-west-1"
    archived = Archived(place)
    assert archived.ledger.archive == place
    columns = tuple(COLUMNS)
    expected = table(list(archived.live(Range(), columns)), columns)
    assert table(archived.read(Range(), columns), columns).equals(expected)
    assert {*opened} == {place}
    # Spark takes neither the query, which is pyarrow's, nor needs it.
    (name, *_) = (one.name for one in archived.manifest.files)
    path = archived.folder.path_of(TOPIC, LEDGER, name)
    assert path.startswith(  # Hadoop has no file system s3
        "s3a://bucket/archive/topic=persistent%3A%2F%2Fpublic%2Fdefault%2Forders/ledger=12/"
    )
    assert (archived.folder.missing(archived.manifest), damaged(archived.folder, archived.manifest)) == (
        [],
        [],
    )
    assert len([*tmp_path.glob("bucket/archive/_manifest/*/*.json")]) == 1


def test_ids_of_an_archive_are_those_of_the_topic(archived: Archived) -> None:
    (batch, *_) = archived.read(Range(from_position=(LEDGER, 3, 0)), ("message_id",))
    assert MessageId.from_bytes(batch.column(0)[0].as_py()) == MessageId(LEDGER, 3, 0)
    assert isinstance(archived.manifest, LedgerManifest)
    assert isinstance(archived.manifest.files[0], ArchivedFile)
