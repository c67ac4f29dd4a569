"""The files of an archive: where they are, what their manifests say, how they are written so that a reader never sees half.

    ARCHIVE/_manifest/persistent%3A%2F%2Fpublic%2Fdefault%2Forders/00000000000000000012.json     one per ledger, written last
    ARCHIVE/topic=persistent%3A%2F%2Fpublic%2Fdefault%2Forders/ledger=12/entries-00000000-00004999.parquet

Partitioned by topic and ledger (position id, grows along the topic). Rows of a file are in the order of the topic, so its
row groups have narrow ranges of `offset`, `append_time` and `message_id`, by which readers skip.
`spark.read.parquet(ARCHIVE)` reads it (names that begin with _ are not data to Spark). A ledger is archived once its
manifest stands; what else lies in its folder is of an attempt that did not get there: who goes by manifests passes it over.

Any file system that pyarrow knows: a path, or file://, s3://, gs://, hdfs:// URIs. On a local or mounted one a file, its
name and the folders above are synced to disk before a manifest names it. Object stores have an object durably when they
acknowledge its end. HDFS has a closed file in the memory of its datanodes, as `hdfs dfs -put` leaves it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from magnetar.proto.batch_extensions import EXT_CHUNK
from magnetar.proto.errors import InvalidArgument
from magnetar.runtime.files import OsFiles

from .ledgers import TopicLedger

FORMAT: Final = 1
MANIFESTS_AT_ONCE: Final = 16  # an object store answers each in 10 to 50 ms
MANIFESTS: Final = "_manifest"
# Columns of a file beside those of the topic's table: with them the very entries that the rows came from can be made again.
BATCH_COLUMNS: Final[dict[str, pa.DataType]] = {
    "batch": pa.int32(),  # index in the entry of the first message of this message's batch
    "compression": pa.int8(),  # of that batch: `proto.compression`
    "extensions": pa.binary(),  # of that batch, as they stand in it; null if it has none
    "text_key": pa.bool_(),  # whether the key is text; null without a key
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """One Parquet file: the entries first..last of a ledger."""

    name: str
    first_entry: int
    last_entry: int
    rows: int
    bytes: int
    sha256: str
    chunked: bool  # some of its messages are in chunks, a row each


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerManifest:
    """What stands in a ledger's JSON. Offsets are [first, end) in the topic, times ms since the epoch."""

    topic: str
    ledger: int  # position id
    stored_ledger: int
    first_offset: int
    end_offset: int
    first_append_ms: int
    last_append_ms: int
    entries: int
    rows: int
    files: tuple[ArchivedFile, ...]

    def to_json(self) -> str:
        """For people as well."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, path: str) -> LedgerManifest:
        """Inverse of `to_json`. InvalidArgument names the file if it is not a manifest that this release knows."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != FORMAT:
                raise InvalidArgument(
                    f"manifest {path} was written by a later release; read it with that one"
                )
            return msgspec.convert(fields, cls)
        except InvalidArgument:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                f"manifest {path} is damaged ({type(error).__name__}: {error}); bring it back from a copy, or delete it "
                "if its ledger is still at the bookies, to be archived anew"
            ) from None

    def differs_from(self, topic: str, ledger: TopicLedger) -> str:
        """What it says that is not so of this ledger, for people; empty if it is the ledger's manifest."""
        claimed = (
            self.topic, self.ledger, self.stored_ledger, self.entries, self.rows, self.first_offset, self.end_offset,
        )  # fmt: skip
        known = (
            topic, ledger.position_id, ledger.stored_id, ledger.entries, ledger.messages, ledger.first_offset,
            ledger.end_offset,
        )  # fmt: skip
        names = ("topic", "ledger", "stored ledger", "entries", "rows", "first offset", "end offset")
        for name, one, other in zip(names, claimed, known, strict=True):
            if one != other:
                return f"it says {name} {one}, and the topic {other}"
        return "" if self.is_whole else "its files are not the whole ledger"

    @property
    def is_whole(self) -> bool:
        """Whether the files have all entries, in order, and all rows."""
        borders = [0, *(one.last_entry + 1 for one in self.files)]
        rows = sum(one.rows for one in self.files)
        return (
            [one.first_entry for one in self.files] == borders[:-1]
            and borders[-1] == self.entries
            and rows == self.rows == self.end_offset - self.first_offset
        )


class ArchiveFolder:
    """One archive. Cheap to make, also in tasks. Raises InvalidArgument for a place that nobody knows."""

    def __init__(self, place: str) -> None:
        self.place = place
        try:
            if not place:  # which would be the folder that one happens to be in
                raise OSError("it is empty")
            if "://" in place:
                self._fs, self.root = pafs.FileSystem.from_uri(place)
            else:
                self._fs, self.root = pafs.LocalFileSystem(), os.path.abspath(place)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise InvalidArgument(
                f"{place!r} is no place for an archive: {error}; want a path or an s3://, gs:// or hdfs:// URI"
            ) from None
        self.root = self.root.rstrip("/")
        self._local = isinstance(self._fs, pafs.LocalFileSystem)
        self._uri = f"file://{quote(self.root)}" if self._local else place.rstrip("/")

    @property
    def location(self) -> str:
        """The archive as a URI, by which `ArchiveFolder` finds it from everywhere. Raises InvalidArgument for a password."""
        if not self._local and urlsplit(self.place).password:
            raise InvalidArgument(
                "the archive's URI has credentials in it, and a topic would keep them for everybody to read; give them "
                "to Spark's workers through their environment"
            )
        return self._uri

    def is_at(self, location: str) -> bool:
        """Whether this is the archive of which a topic says that."""
        return location == self._uri

    def manifests(self, topic: str) -> dict[int, LedgerManifest]:
        """Those of a topic by position id, in order."""
        paths = [
            info.path
            for info in self._listed(f"{self.root}/{MANIFESTS}/{_folder(topic)}")
            if info.type == pafs.FileType.File and info.base_name.endswith(".json")
        ]
        with ThreadPoolExecutor(MANIFESTS_AT_ONCE) as threads:
            return {manifest.ledger: manifest for manifest in threads.map(self._read_manifest, sorted(paths))}

    def manifest(self, topic: str, ledger: int) -> LedgerManifest:
        """That of one ledger. Raises InvalidArgument, and what the file system does."""
        return self._read_manifest(self.manifest_path(topic, ledger))

    def has_manifest(self, topic: str, ledger: int) -> bool:
        """Whether the ledger is archived."""
        info = self._fs.get_file_info(self.manifest_path(topic, ledger))
        return bool(info.type == pafs.FileType.File)

    def _read_manifest(self, path: str) -> LedgerManifest:
        with self._fs.open_input_stream(path) as stream:
            return LedgerManifest.from_json(stream.read(), path)

    def manifest_path(self, topic: str, ledger: int) -> str:
        """As the file system knows it."""
        return f"{self.root}/{MANIFESTS}/{_folder(topic)}/{ledger:020d}.json"

    def data_path(self, topic: str, ledger: int, name: str) -> str:
        """As the file system knows it."""
        return f"{self.root}/{_data_folder(topic, ledger)}/{name}"

    def open_rows(
        self, topic: str, ledger: int, one: ArchivedFile, *, pre_buffer: bool = False
    ) -> pq.ParquetFile:
        """To read rows of, with the checksums of its pages; `close(force=True)` it.

        Raises ValueError for a size or a count of rows that its manifest does not have, and what the file system does.
        """
        source = self._fs.open_input_file(self.data_path(topic, ledger, one.name))
        try:
            if source.size() != one.bytes:
                raise ValueError(f"it has {source.size()} bytes, and its manifest says {one.bytes}")
            file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=pre_buffer)
            if file.metadata.num_rows != one.rows:
                raise ValueError(f"it has {file.metadata.num_rows} rows, and its manifest says {one.rows}")
        except BaseException:
            source.close()
            raise
        return file

    def is_there(self) -> bool:
        """Whether there is an archive at all: a mount that is missing is not one that lost a file."""
        info = self._fs.get_file_info(f"{self.root}/{MANIFESTS}")
        return bool(info.type == pafs.FileType.Directory)

    def topics(self) -> list[str]:
        """Full names of the topics that have a manifest."""
        folders = self._listed(f"{self.root}/{MANIFESTS}")
        return sorted(unquote(info.base_name) for info in folders if info.type == pafs.FileType.Directory)

    def path_of(self, topic: str, ledger: int, name: str) -> str:
        """The path of a data file, below `base_path`, as Spark takes it."""
        return f"{self.base_path}/{_data_folder(topic, ledger)}/{name}"

    @property
    def base_path(self) -> str:
        """The archive as Spark takes it: without the query of a URI, which is for pyarrow, and with Hadoop's name for S3."""
        if self._local:
            return self.place.rstrip("/")
        place = self.place.partition("?")[0].rstrip("/")
        return f"s3a://{place.removeprefix('s3://')}" if place.startswith("s3://") else place

    def clear_ledger(self, topic: str, ledger: int) -> None:
        """Drops what an attempt without a manifest left."""
        folder = f"{self.root}/{_data_folder(topic, ledger)}"
        if self._fs.get_file_info(folder).type == pafs.FileType.Directory:
            self._fs.delete_dir(folder)

    def write_manifest(self, manifest: LedgerManifest) -> None:
        """From now on the ledger is archived: the manifest is durable, as its files are."""
        assert manifest.is_whole, manifest
        self._sync_folders(f"{self.root}/{_data_folder(manifest.topic, manifest.ledger)}")
        folder, name = self.manifest_path(manifest.topic, manifest.ledger).rsplit("/", 1)
        self._fs.create_dir(folder, recursive=True)
        with self._fs.open_output_stream(f"{folder}/_{name}") as stream:
            stream.write(manifest.to_json().encode())
        self._sync(f"{folder}/_{name}")
        self._fs.move(f"{folder}/_{name}", f"{folder}/{name}")
        self._sync_folders(folder)

    def sync_manifest(self, manifest: LedgerManifest) -> None:
        """For an archive that somebody copied: from now on all of its folders and the manifest are durable."""
        path = self.manifest_path(manifest.topic, manifest.ledger)
        self._sync(path)
        self._sync_folders(path.rsplit("/", 1)[0])
        self._sync_folders(f"{self.root}/{_data_folder(manifest.topic, manifest.ledger)}")

    def _sync(self, path: str) -> None:
        """A local file's bytes are on disk when it returns; elsewhere nothing is to be done. Raises StorageFailed."""
        if self._local:
            file = OsFiles().open(path, read_only=True)
            try:
                file.sync()
            finally:
                file.close()

    def _sync_folder(self, path: str) -> None:
        """The same for a folder's names."""
        if self._local:
            OsFiles().sync_directory(path)

    def _sync_folders(self, folder: str) -> None:
        """This one, and all above it down from the one that has the archive's folder, which may be new."""
        while len(folder) >= len(self.root):
            self._sync_folder(folder)
            folder = folder.rsplit("/", 1)[0]
        self._sync_folder(folder or "/")

    def write_file(
        self,
        topic: str,
        ledger: int,
        first_entry: int,
        last_entry: int,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
    ) -> ArchivedFile:
        """Under a hidden name first, so that whoever lists the folder sees whole files only. Its bytes are durable then."""
        name = f"entries-{first_entry:08d}-{last_entry:08d}.parquet"
        folder = f"{self.root}/{_data_folder(topic, ledger)}"
        # Two attempts at the same task may run at once.
        hidden = f"{folder}/_{os.getpid()}-{os.urandom(4).hex()}-{name}"
        self._fs.create_dir(folder, recursive=True)
        rows, chunked = 0, False
        try:
            with self._fs.open_output_stream(hidden) as stream:
                digested = _Digested(stream)
                with pq.ParquetWriter(
                    pa.PythonFile(digested, mode="w"), schema, compression="zstd", write_page_checksum=True
                ) as writer:
                    for batch in _row_groups(batches):
                        writer.write_table(batch)
                        rows += batch.num_rows
                        chunked = chunked or _has_chunks(batch)
            self._sync(hidden)
            self._fs.move(hidden, f"{folder}/{name}")
            self._sync_folder(folder)
        except BaseException:
            if self._fs.get_file_info(hidden).type == pafs.FileType.File:
                self._fs.delete_file(hidden)
            raise
        return ArchivedFile(
            name=name,
            first_entry=first_entry,
            last_entry=last_entry,
            rows=rows,
            bytes=digested.written,
            sha256=digested.sha256.hexdigest(),
            chunked=chunked,
        )

    def check_file(self, topic: str, ledger: int, one: ArchivedFile) -> str:
        """Reads all of it: what is wrong with it, for people; empty if nothing is, and then it is durable as well."""
        path = self.data_path(topic, ledger, one.name)
        try:
            with self._fs.open_input_file(path) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != one.sha256:
                    return f"{path} is not the file that was written"
            self.open_rows(topic, ledger, one).close(force=True)
            self._sync(path)
        except FileNotFoundError:
            return f"{path} is not there"
        except (OSError, ValueError, pa.ArrowException) as error:
            return f"{path} cannot be read: {error}"
        return ""

    def missing(self, manifest: LedgerManifest) -> list[str]:
        """Names of the manifest's files that are not there, or of another size: a look at the names alone."""
        paths = [self.data_path(manifest.topic, manifest.ledger, one.name) for one in manifest.files]
        infos: Sequence[pafs.FileInfo] = self._fs.get_file_info(paths)
        return [one.name for one, info in zip(manifest.files, infos, strict=True) if info.size != one.bytes]

    def _listed(self, folder: str) -> list[pafs.FileInfo]:
        found: list[pafs.FileInfo] = self._fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
        return [info for info in found if not info.base_name.startswith("_")]


ROW_GROUP_ROWS: Final = 262_144
ROW_GROUP_BYTES: Final = 32 << 20


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of a read have few rows, and a row group of a file should not. It is read whole, so it has few bytes."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in itertools.chain.from_iterable(map(_cut, batches)):
        gathered.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(gathered)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield pa.Table.from_batches(gathered)


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """In parts of about the size of a row group at most."""
    step = max(1, batch.num_rows * ROW_GROUP_BYTES // max(batch.nbytes, 1))
    return (batch.slice(at, step) for at in range(0, batch.num_rows, step))


def _has_chunks(rows: pa.Table) -> bool:
    if "extensions" not in rows.schema.names:
        return False
    packed = rows.column("extensions").drop_null().to_pylist()
    return any(EXT_CHUNK in msgspec.msgpack.decode(one) for one in packed)


class _Digested(io.RawIOBase):
    """A file that is digested as it is written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()
        self.written = 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self._stream.write(data)
        self.written += len(data)
        return len(data)

    def tell(self) -> int:
        return self.written

    def writable(self) -> bool:
        return True


def _folder(topic: str) -> str:
    return quote(topic, safe="")


def _data_folder(topic: str, ledger: int) -> str:
    return f"topic={_folder(topic)}/ledger={ledger}"
