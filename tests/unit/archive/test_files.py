"""Files of an archive are seen whole or not at all, and a manifest says what a ledger's files hold."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from magnetar.archive.files import ArchivedFile, ArchiveFolder, LedgerManifest
from magnetar.proto.errors import InvalidArgument, MessageLost
from magnetar.runtime.files import OsFile, OsFiles
from magnetar.spark.jobs.archive import manifest_of
from magnetar.spark.plan import TopicLedger
from support.archive_kit import damaged

TOPIC = "persistent://public/default/orders ü/%"
SCHEMA = pa.schema([pa.field("value", pa.binary())])


def batches(*sizes: int) -> Iterator[pa.RecordBatch]:
    for size in sizes:
        yield pa.RecordBatch.from_arrays([pa.array([b"x"] * size, pa.binary())], schema=SCHEMA)


def write(folder: ArchiveFolder, *sizes: int, first: int = 0, last: int = 9) -> ArchivedFile:
    return folder.write_file(TOPIC, 12, first, last, SCHEMA, batches(*sizes))


def manifest(*files: ArchivedFile, rows: int) -> LedgerManifest:
    ledger = TopicLedger(12, 11, 100, files[-1].last_entry + 1, rows, 1, 5, 6, True, b"")
    return manifest_of(TOPIC, ledger, files)


def test_a_file_is_what_its_row_says(tmp_path: Path) -> None:
    folder = ArchiveFolder(str(tmp_path))
    told = write(folder, 3, 0, 5)
    path = Path(folder.path_of(TOPIC, 12, told.name))
    assert pq.read_table(path, partitioning=None).num_rows == told.rows == 8
    data = path.read_bytes()
    assert (told.bytes, told.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert [one.name for one in path.parent.iterdir()] == [told.name]


def test_a_failed_attempt_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches(300_000)
        raise MessageLost("trimmed")

    folder = ArchiveFolder(str(tmp_path))
    with pytest.raises(MessageLost):
        folder.write_file(TOPIC, 12, 0, 9, SCHEMA, failing())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_manifests_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = ArchiveFolder(str(tmp_path))
    assert (folder.topics(), folder.manifests(TOPIC)) == ([], {})
    one = manifest(write(folder, 4), write(folder, 2, first=10, last=11), rows=6)
    folder.write_manifest(one)
    again = ArchiveFolder(str(tmp_path))
    assert again.topics() == [TOPIC]
    assert again.manifests(TOPIC) == {12: one}
    assert damaged(again, one) == []
    Path(again.path_of(TOPIC, 12, one.files[0].name)).write_bytes(b"PAR1")
    Path(again.path_of(TOPIC, 12, one.files[1].name)).unlink()
    assert damaged(again, one) == [file.name for file in one.files]


def test_what_an_unfinished_attempt_left_goes(tmp_path: Path) -> None:
    folder = ArchiveFolder(str(tmp_path))
    folder.clear_ledger(TOPIC, 12)
    write(folder, 4)
    folder.clear_ledger(TOPIC, 12)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_ledger_with_too_few_rows_is_not_archived(tmp_path: Path) -> None:
    folder = ArchiveFolder(str(tmp_path))
    with pytest.raises(MessageLost, match=r"read with 4 messages, and the topic says it has 5.*audit"):
        manifest(write(folder, 4), rows=5)


def test_a_manifest_with_a_gap_is_not_written(tmp_path: Path) -> None:
    folder = ArchiveFolder(str(tmp_path))
    whole = manifest(write(folder, 4), write(folder, 2, first=10, last=11), rows=6)
    gap = dataclasses.replace(
        whole, files=(whole.files[0], dataclasses.replace(whole.files[1], first_entry=11))
    )
    with pytest.raises(AssertionError):
        folder.write_manifest(gap)


RIGHT = (
    '{"format": 1, "topic": "t", "ledger": 1, "stored_ledger": 1, "first_offset": 0, "end_offset": 1, "first_append_ms": 0, '
    '"last_append_ms": 0, "entries": 1, "rows": 1, "files": []}'
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "files": [{"name": "x"}]}',
        RIGHT.replace('"rows": 1', '"rows": "1"'),
    ],
)
def test_a_damaged_manifest_is_named(text: str) -> None:
    assert LedgerManifest.from_json(RIGHT, "/a/12.json").rows == 1
    with pytest.raises(
        InvalidArgument,
        match=r"manifest /a/12\.json is damaged .*; bring it back from a copy, or delete it if",
    ):
        LedgerManifest.from_json(text, "/a/12.json")


def test_a_later_format_is_told_from_damage() -> None:
    with pytest.raises(InvalidArgument, match="written by a later release") as refused:
        LedgerManifest.from_json('{"format": 2}', "/a/12.json")
    assert "delete" not in refused.value.message, "it is whole"


def test_places_that_nobody_knows() -> None:
    for place in ("nowhere://x/y", ""):
        with pytest.raises(InvalidArgument, match="is no place for an archive"):
            ArchiveFolder(place)


def test_a_location_is_a_uri_that_finds_the_archive_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = ArchiveFolder("a b/ü%")
    assert folder.location == f"{tmp_path.as_uri()}/a%20b/%C3%BC%25"
    one = manifest(write(folder, 4), rows=4)
    folder.write_manifest(one)
    monkeypatch.chdir("/")
    again = ArchiveFolder(folder.location)
    assert again.root == folder.root == f"{tmp_path}/a b/ü%"
    assert again.location == folder.location
    assert again.manifest(TOPIC, 12) == one
    assert (again.missing(one), damaged(again, one)) == ([], [])


def test_credentials_are_not_told_to_a_topic() -> None:
    folder = ArchiveFolder("s3://key:secret@bucket/archive?region=eu-west-1")
    with pytest.raises(InvalidArgument, match="has credentials in it"):
        _ = folder.location
    assert ArchiveFolder("s3://bucket/archive/?region=eu-west-1").location == (
        "s3://bucket/archive/?region=eu-west-1"
    )


def test_what_is_named_is_on_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is synced before it gets its name, each folder after it got one, all of them before the manifest's name."""
    names: list[str] = []
    sync, sync_directory = OsFile.sync, OsFiles.sync_directory

    def syncing(file: OsFile) -> None:
        assert os.path.basename(file.path).startswith("_"), "it has its name already"
        names.append(file.path)
        sync(file)

    def syncing_directory(files: OsFiles, path: str) -> None:
        names.append(path)
        sync_directory(files, path)

    monkeypatch.setattr(OsFile, "sync", syncing)
    monkeypatch.setattr(OsFiles, "sync_directory", syncing_directory)
    folder = ArchiveFolder(str(tmp_path / "new" / "archive"))
    told = write(folder, 4)
    data = folder.data_path(TOPIC, 12, told.name)
    assert [name.endswith("-" + told.name) for name in names] == [True, False]
    assert names[1] == os.path.dirname(data)
    names.clear()
    folder.write_manifest(manifest(told, rows=4))
    hidden = next(number for number, name in enumerate(names) if name.endswith(".json"))
    chain = []
    at = os.path.dirname(data)
    while at != str(tmp_path):
        chain.append(at)
        at = os.path.dirname(at)
    assert set(chain) <= set(names[:hidden]), "the data's folders"
    place = os.path.dirname(folder.manifest_path(TOPIC, 12))
    assert {place, os.path.dirname(place), folder.root} <= set(names[hidden:])


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"topic": "persistent://public/default/other"},
            "it says topic persistent://public/default/other, and",
        ),
        ({"stored_ledger": 7}, "it says stored ledger 7, and the topic 11"),
        ({"rows": 9}, "it says rows 9"),
        ({"end_offset": 105}, "it says end offset 105"),
        ({"entries": 9}, "it says entries 9"),
        ({"files": ()}, "its files are not the whole ledger"),
    ],
)
def test_a_manifest_of_something_else(tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    one = manifest(write(ArchiveFolder(str(tmp_path)), 4), rows=4)
    ledger = TopicLedger(12, 11, 100, 10, 4, 1, 5, 6, True, b"")
    assert one.differs_from(TOPIC, ledger) == ""
    assert match in dataclasses.replace(one, **changed).differs_from(TOPIC, ledger)
