"""The files of an archive: where they are, what their manifests say, how they are written so that a reader never sees half.

    ARCHIVE/_manifest/persistent%3A%2F%2Fpublic%2Fdefault%2Forders/00000000000000000012.json     one per ledger, written last
    ARCHIVE/topic=persistent%3A%2F%2Fpublic%2Fdefault%2Forders/ledger=12/entries-00000000-00004999.parquet

`spark.read.parquet(ARCHIVE)` reads it (names that begin with _ are not data to Spark). A ledger is archived once its
manifest stands; what else lies in its folder is of an attempt that did not get there, and `read_archive` does not look at
it. Any file system that pyarrow knows: a path, or s3://, gs://, hdfs:// URIs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from magnetar.proto.errors import InvalidArgument

FORMAT: Final = 1
MANIFESTS: Final = "_manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """One Parquet file: the entries first..last of a ledger."""

    name: str
    first_entry: int
    last_entry: int
    rows: int
    bytes: int
    sha256: str


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
            told: dict[str, Any] = json.loads(text)
            if told.pop("format") != FORMAT:
                raise InvalidArgument(
                    f"manifest {path} was written by a later release; read it with that one"
                )
            files = tuple(ArchivedFile(**one) for one in told.pop("files"))
            return cls(**told, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                f"manifest {path} is damaged ({type(error).__name__}: {error}); delete it, and its ledger is archived "
                "anew if the topic still has it"
            ) from None

    def check(self) -> None:
        """Asserts that the files are the whole ledger."""
        following = 0
        for one in self.files:
            assert one.first_entry == following, (self.ledger, one)
            following = one.last_entry + 1
        assert following == self.entries, (self.ledger, following)
        assert self.rows == sum(one.rows for one in self.files) == self.end_offset - self.first_offset, self


class ArchiveFolder:
    """One archive. Cheap to make, also in tasks. Raises InvalidArgument for a place that nobody knows."""

    def __init__(self, place: str) -> None:
        self.place = place
        try:
            if "://" in place:
                self._fs, self.root = pafs.FileSystem.from_uri(place)
            else:
                self._fs, self.root = pafs.LocalFileSystem(), os.path.abspath(place)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise InvalidArgument(
                f"{place!r} is no place for an archive: {error}; want a path or an s3://, gs:// or hdfs:// URI"
            ) from None
        self.root = self.root.rstrip("/")

    def manifests(self, topic: str) -> dict[int, LedgerManifest]:
        """Those of a topic by position id, in order."""
        found: dict[int, LedgerManifest] = {}
        folder = f"{self.root}/{MANIFESTS}/{_folder(topic)}"
        for info in sorted(self._listed(folder), key=lambda info: info.path):
            if info.type == pafs.FileType.File and info.base_name.endswith(".json"):
                with self._fs.open_input_stream(info.path) as stream:
                    manifest = LedgerManifest.from_json(stream.read(), info.path)
                found[manifest.ledger] = manifest
        return found

    def topics(self) -> list[str]:
        """Full names of the topics that have a manifest."""
        folders = self._listed(f"{self.root}/{MANIFESTS}")
        return sorted(unquote(info.base_name) for info in folders if info.type == pafs.FileType.Directory)

    def path_of(self, topic: str, ledger: int, name: str) -> str:
        """Of a data file, below `place`, as Spark takes it."""
        return f"{self.place.rstrip('/')}/{_data_folder(topic, ledger)}/{name}"

    def clear_ledger(self, topic: str, ledger: int) -> None:
        """Drops what an attempt without a manifest left."""
        folder = f"{self.root}/{_data_folder(topic, ledger)}"
        if self._fs.get_file_info(folder).type == pafs.FileType.Directory:
            self._fs.delete_dir(folder)

    def write_manifest(self, manifest: LedgerManifest) -> None:
        """From now on the ledger is archived."""
        manifest.check()
        folder = f"{self.root}/{MANIFESTS}/{_folder(manifest.topic)}"
        self._fs.create_dir(folder, recursive=True)
        name = f"{manifest.ledger:020d}.json"
        with self._fs.open_output_stream(f"{folder}/_{name}") as stream:
            stream.write(manifest.to_json().encode())
        self._fs.move(f"{folder}/_{name}", f"{folder}/{name}")

    def write_file(
        self,
        topic: str,
        ledger: int,
        first_entry: int,
        last_entry: int,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
    ) -> ArchivedFile:
        """Under a hidden name first, so that whoever lists the folder sees whole files only."""
        name = f"entries-{first_entry:08d}-{last_entry:08d}.parquet"
        folder = f"{self.root}/{_data_folder(topic, ledger)}"
        # Two attempts at the same task may run at once.
        hidden = f"{folder}/_{os.getpid()}-{os.urandom(4).hex()}-{name}"
        self._fs.create_dir(folder, recursive=True)
        rows = 0
        try:
            with self._fs.open_output_stream(hidden) as stream:
                digested = _Digested(stream)
                with pq.ParquetWriter(
                    pa.PythonFile(digested, mode="w"), schema, compression="zstd"
                ) as writer:
                    for batch in _row_groups(batches):
                        writer.write_table(batch)
                        rows += batch.num_rows
            self._fs.move(hidden, f"{folder}/{name}")
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
        )

    def damaged(self, manifest: LedgerManifest) -> list[str]:
        """Names of the manifest's files that are not there, or not as they were written."""
        return [one.name for one in manifest.files if self._digest(manifest, one) != (one.bytes, one.sha256)]

    def _digest(self, manifest: LedgerManifest, one: ArchivedFile) -> tuple[int, str]:
        path = f"{self.root}/{_data_folder(manifest.topic, manifest.ledger)}/{one.name}"
        digest, size = hashlib.sha256(), 0
        try:
            with self._fs.open_input_stream(path) as stream:
                while data := stream.read(4 << 20):
                    digest.update(data)
                    size += len(data)
        except FileNotFoundError:
            return -1, ""
        return size, digest.hexdigest()

    def _listed(self, folder: str) -> list[pafs.FileInfo]:
        found: list[pafs.FileInfo] = self._fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
        return [info for info in found if not info.base_name.startswith("_")]


ROW_GROUP_ROWS: Final = 262_144
ROW_GROUP_BYTES: Final = 32 << 20


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of a read are small; a row group of a Parquet file should not be."""
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        gathered.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(gathered)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield pa.Table.from_batches(gathered)


class _Digested:
    """A file that is digested as it is written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()
        self.written = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self._stream.write(data)
        self.written += len(data)
        return len(data)

    def tell(self) -> int:
        return self.written

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _folder(topic: str) -> str:
    return quote(topic, safe="")


def _data_folder(topic: str, ledger: int) -> str:
    return f"topic={_folder(topic)}/ledger={ledger}"


__all__ = ["ArchiveFolder", "ArchivedFile", "LedgerManifest"]
