"""The archive job on a topic in memory, without Spark: what it lets go of, what it keeps, and being killed at any step."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from magnetar.archive.files import ArchiveFolder
from magnetar.client.administration import Admin
from magnetar.proto.commands import ArchiveLedgers, KeepLedgers, TopicLedgers
from magnetar.proto.errors import InvalidArgument, MagnetarError
from magnetar.runtime.files import OsFile, OsFiles
from magnetar.spark.archived import read_archived
from magnetar.spark.jobs import trim
from magnetar.spark.plan import LedgerSlice, Range, TopicLedger
from support.archive_kit import damaged, file_slices

job = importlib.import_module("magnetar.spark.jobs.archive")

TOPIC = "persistent://public/default/orders"
URL = "magnetar://127.0.0.1:7650"


class Killed(BaseException):
    """The job's process is gone."""


class Topic:
    """A broker with one topic of some closed ledgers, an open one, and what the job asks of it."""

    def __init__(self, closed: int = 5) -> None:
        self.ledgers = [
            TopicLedger(10 + 2 * n, 100 + n, 40 * n, 8, 40, 800, 5, 6, n < closed, b"metadata")
            for n in range(closed + 1)
        ]
        self.needed: tuple[int, str] | None = None  # from this position id on, and by whom
        self.meanwhile: Callable[[], None] = lambda: None  # between a dry request and the next
        self.gone: list[int] = []
        self.admin = Admin(self)  # type: ignore[arg-type]
        self.asked: list[Any] = []
        self.leases: set[str] = set()
        self.path = ""
        self.steps = 0
        self.dies_at = -1

    def step(self) -> None:
        """The job may be killed here."""
        self.steps += 1
        if self.steps == self.dies_at:
            raise Killed

    async def partitions_of(self, topic: str) -> int:
        assert topic == TOPIC
        return 0

    async def request(self, command: Any, topic: str, payload: bytes = b"") -> Any:
        assert topic == TOPIC
        self.step()
        self.asked.append(command)
        answer = getattr(self, f"_{type(command).__name__}")(command, payload)
        self.step()
        return answer

    def _KeepLedgers(self, command: KeepLedgers, _payload: bytes) -> Any:
        lease = command.lease or f"lease-{len(self.asked)}"
        first = next(one.position_id for one in self.ledgers if not one.archive)
        if command.ttl_ms:
            self.leases.add(lease)
        else:
            self.leases.discard(lease)
        return {"lease": lease, "ttl_ms": command.ttl_ms, "first": first}

    def _TopicLedgers(self, command: TopicLedgers, _payload: bytes) -> Any:
        rows = [list(one if one.archive else one[:10]) for one in self.ledgers]
        end_offset = self.ledgers[-1].end_offset
        return {
            "ledgers": rows, "more": False, "end": [20, 8, 0], "bookies": {}, "identities": {},
            "end_offset": end_offset, "created_ms": 1,
        }  # fmt: skip

    def _ArchiveLedgers(self, command: ArchiveLedgers, payload: bytes) -> Any:
        assert command.lease in self.leases
        kept = None
        ready: list[int] = []
        moved: list[int] = []
        rows = msgspec.msgpack.decode(payload)
        if not command.dry:
            self.meanwhile()
        for row in rows:
            ledger = next(one for one in self.ledgers if one.position_id == row[0])
            if row[1:] != [ledger.stored_id, ledger.entries, ledger.messages] or not ledger.closed:
                raise InvalidArgument("not what was archived")
            if row[0] in self.gone:
                continue
            if ledger.archive and ledger.archive != command.location:
                assert command.moved
                moved.append(row[0])
                continue
            if self.needed is not None and row[0] >= self.needed[0]:
                kept = list(self.needed)
                break
            ready.append(row[0])
        if not command.dry:
            # The one thing that must never happen: the only whole copy goes.
            folder = ArchiveFolder(command.location)
            for ledger_id in ready + moved:
                assert damaged(folder, folder.manifest(TOPIC, ledger_id)) == []
            self.ledgers = [
                one._replace(archive=command.location, metadata=b"")
                if one.position_id in ready + moved
                else one
                for one in self.ledgers
            ]
        return {
            "archived": len(ready),
            "known": 0,
            "moved": len(moved),
            "gone": [row[0] for row in rows if row[0] in self.gone],
            "kept": kept,
        }

    @property
    def archived(self) -> list[int]:
        return [one.position_id for one in self.ledgers if one.archive]


class Context:
    """Of Spark: tasks run one after another, here."""

    defaultParallelism = 2  # noqa: N815

    def parallelize(self, items: list[Any], tasks: int) -> Context:
        assert tasks > 0
        self.items = items
        return self

    def map(self, work: Callable[[Any], Any]) -> Context:
        self.work = work
        return self

    def collect(self) -> list[Any]:
        return [self.work(item) for item in self.items]


class Session:
    sparkContext = Context()  # noqa: N815


def rows_of(piece: LedgerSlice) -> Iterator[pa.RecordBatch]:
    """Five messages an entry."""
    ledger = piece.ledger
    offsets = [
        ledger.first_offset + 5 * entry + n for entry in range(piece.first, piece.last + 1) for n in range(5)
    ]
    columns = {field.name: pa.nulls(len(offsets), field.type) for field in job.ARROW_SCHEMA}
    columns["offset"] = pa.array(offsets, pa.int64())
    columns["value"] = pa.array([b"%d" % offset for offset in offsets], pa.binary())
    yield pa.RecordBatch.from_arrays(list(columns.values()), schema=job.ARROW_SCHEMA)


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Topic:
    made = Topic()
    made.path = str(tmp_path / "archive")

    def asking(_options: Any, work: Any) -> Any:
        coroutine = work(made)
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("it waits for something")

    def stepping(name: str) -> None:
        real = getattr(ArchiveFolder, name)

        def call(self: ArchiveFolder, *args: Any) -> Any:
            made.step()
            result = real(self, *args)
            made.step()
            return result

        monkeypatch.setattr(ArchiveFolder, name, call)

    # Thousands of them, and no test of what is on disk (unit/archive/test_files has that).
    monkeypatch.setattr(OsFile, "sync", lambda _file: None)
    monkeypatch.setattr(OsFiles, "sync_directory", lambda _files, _path: None)
    for module in (job, trim):
        monkeypatch.setattr(module, "asking", asking)
    monkeypatch.setattr(job, "read_slices", lambda slices, *_rest: rows_of(slices[0]))
    monkeypatch.setattr(job, "ROUND_LEDGERS", 2)
    monkeypatch.setattr(trim, "LEDGERS_AT_ONCE", 2)
    for name in ("write_file", "write_manifest", "check_file", "sync_manifest"):
        stepping(name)
    return made


def run(topic: Topic, **named: Any) -> Any:
    return job.archive(Session(), URL, [TOPIC], topic.path, **({"file_bytes": 400, "trim": True} | named))


def offsets(topic: Topic) -> list[int]:
    """Of what the topic's archive has."""
    pieces = file_slices(TOPIC, topic.ledgers, Range(), 1)
    return [
        offset
        for piece in pieces
        for batch in read_archived(piece, ("offset",))
        for offset in batch.column(0).to_pylist()
    ]


def test_all_that_is_closed_is_archived_and_let_go_of(topic: Topic) -> None:
    result = run(topic)
    assert [(one.topic, one.ledger) for one in result.archived] == [*result.trimmed]
    assert topic.archived == [10, 12, 14, 16, 18]
    assert (result.rows, result.kept, result.archived_before, result.elsewhere) == (200, (), 0, 0)
    assert offsets(topic) == list(range(200))
    assert topic.leases == set(), "another run need not wait for it"
    again = run(topic)
    assert (again.archived, again.trimmed, again.kept, again.archived_before) == ((), (), (), 5)


def test_an_archive_that_was_made_without_it_is_read_again_and_not_written(topic: Topic) -> None:
    first = run(topic, trim=False)
    assert (len(first.archived), first.trimmed, topic.archived) == (5, (), [])
    assert not any(isinstance(one, ArchiveLedgers) for one in topic.asked)
    before = {path: path.stat().st_mtime_ns for path in Path(topic.path).rglob("*") if path.is_file()}
    result = run(topic)
    assert (result.archived, len(result.trimmed), result.archived_before) == ((), 5, 5)
    assert before == {path: path.stat().st_mtime_ns for path in Path(topic.path).rglob("*") if path.is_file()}


def test_a_job_that_is_killed_at_any_step_has_lost_nothing_and_another_finishes(
    topic: Topic, tmp_path: Path
) -> None:
    died = 0
    while True:
        shutil.rmtree(topic.path, ignore_errors=True)
        topic.__init__(3)  # type: ignore[misc]
        topic.path, topic.dies_at = str(tmp_path / "archive"), died + 1
        try:
            run(topic)
        except Killed:
            died += 1
        else:
            break
        assert offsets(topic) == list(range(40 * len(topic.archived)))
        topic.dies_at = -1
        result = run(topic)
        assert topic.archived == [10, 12, 14]
        assert result.kept == ()
        assert offsets(topic) == list(range(120))
    assert died > 40


def test_what_somebody_needs_stays_and_is_not_read_in_vain(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    real = ArchiveFolder.check_file

    def check(self: ArchiveFolder, name: str, ledger: int, one: Any) -> str:
        checked.append(ledger)
        return real(self, name, ledger, one)

    monkeypatch.setattr(ArchiveFolder, "check_file", check)
    topic.needed = (16, "subscription 'slow' has not acknowledged all of it")
    result = run(topic)
    assert len(result.archived) == 5, "it is archived all the same"
    assert [ledger for _, ledger in result.trimmed] == topic.archived == [10, 12, 14]
    assert {*checked} == {10, 12, 14}
    (kept,) = result.kept
    assert kept == trim.KeptLedgers(TOPIC, 16, 2, "subscription 'slow' has not acknowledged all of it", False)
    topic.needed = None
    assert len(run(topic).trimmed) == 2


def test_the_backlog_leaves_only_if_that_is_said(topic: Topic) -> None:
    run(topic)
    commands = [one for one in topic.asked if isinstance(one, ArchiveLedgers)]
    assert commands
    assert not any(one.with_backlog for one in commands)
    path = topic.path
    topic.__init__(3)  # type: ignore[misc]
    topic.path = path
    run(topic, with_backlog=True)
    commands = [one for one in topic.asked if isinstance(one, ArchiveLedgers)]
    assert commands
    assert all(one.with_backlog for one in commands)
    for call in (job.archive, job.check_archive):
        spark = [Session()] if call is job.archive else []
        with pytest.raises(InvalidArgument, match=r"with_backlog says what may leave the bookies.*give both"):
            call(*spark, URL, [TOPIC], topic.path, with_backlog=True)


def test_who_comes_while_files_are_read_is_heeded(topic: Topic) -> None:
    def comes() -> None:
        if topic.archived:
            topic.needed = (16, "a lease keeps it")

    topic.meanwhile = comes
    result = run(topic)
    assert topic.archived == [ledger for _, ledger in result.trimmed] == [10, 12, 14]
    assert result.kept == (trim.KeptLedgers(TOPIC, 16, 2, "a lease keeps it", False),)


def spoiled(name: str) -> Callable[[Path, Path], None]:
    def gone(file: Path, _manifest: Path) -> None:
        file.unlink()

    def longer(file: Path, _manifest: Path) -> None:
        file.write_bytes(file.read_bytes() + b"x")

    def altered(file: Path, _manifest: Path) -> None:
        data = bytearray(file.read_bytes())
        data[9] ^= 1
        file.write_bytes(data)

    def of_another(_file: Path, manifest: Path) -> None:
        manifest.write_text(manifest.read_text().replace('"stored_ledger": 102', '"stored_ledger": 7'))

    return {"gone": gone, "longer": longer, "altered": altered, "of another": of_another}[name]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gone", "is not there, or of another size; delete .*14.json, and the ledger is archived again"),
        ("longer", "is not there, or of another size; delete"),
        ("altered", "is not the file that was written; delete"),
        (
            "of another",
            "is of something else: it says stored ledger 7, and the topic 102; delete it, or archive to another path",
        ),
    ],
)
def test_a_damaged_archive_keeps_the_ledger_and_all_after_it(topic: Topic, name: str, match: str) -> None:
    run(topic, trim=False)
    folder = ArchiveFolder(topic.path)
    manifest = folder.manifest(TOPIC, 14)
    path = Path(folder.manifest_path(TOPIC, 14))
    spoiled(name)(Path(folder.data_path(TOPIC, 14, manifest.files[1].name)), path)
    result = run(topic)
    assert topic.archived == [10, 12]
    (kept,) = result.kept
    assert (kept.first, kept.ledgers, kept.damaged) == (14, 3, True)
    with pytest.raises(InvalidArgument, match=match):
        raise InvalidArgument(kept.reason)
    # The cure that it names.
    path.unlink()
    assert len(run(topic).trimmed) == 3
    assert offsets(topic) == list(range(200))


def test_ledgers_that_the_broker_trimmed_meanwhile_are_told_apart(topic: Topic) -> None:
    topic.gone = [12]
    result = run(topic)
    assert [ledger for _, ledger in result.trimmed] == topic.archived == [10, 14, 16, 18]
    assert (result.not_in_topic, result.kept) == (1, ())


def test_rounds_are_bounded_in_bytes(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim, "LEDGERS_AT_ONCE", 100)
    monkeypatch.setattr(trim, "ROUND_BYTES", 1600)
    run(topic)
    asked = [one for one in topic.asked if isinstance(one, ArchiveLedgers) and not one.dry]
    assert len(asked) == 3


def test_ledgers_that_are_archived_elsewhere_are_left_there(topic: Topic, tmp_path: Path) -> None:
    topic.needed = (14, "a lease keeps it")
    run(topic)
    topic.needed = None
    topic.path = str(tmp_path / "other")
    result = run(topic)
    assert (result.elsewhere, result.archived_before, len(result.trimmed)) == (2, 0, 3)
    assert offsets(topic) == list(range(200))


def test_an_archive_that_was_copied_is_where_it_is_said_to_be(topic: Topic, tmp_path: Path) -> None:
    topic.needed = (16, "a lease keeps it")
    run(topic)
    old, topic.path = topic.path, str(tmp_path / "copy")
    # Nothing is there yet: the topic goes on knowing the old one.
    result = run(topic, trim=False, moved=True)
    assert (result.moved, result.elsewhere) == (0, 3)
    (kept,) = result.kept
    assert (kept.first, kept.ledgers, kept.damaged) == (10, 3, True)
    assert kept.reason.startswith(f"it is archived at file://{old}, and {topic.path}/_manifest/")
    assert kept.reason.endswith("is not there; copy the whole archive first")
    shutil.rmtree(topic.path)
    shutil.copytree(old, topic.path)
    # A file of the copy is not whole: so far it is recorded, and no further.
    folder = ArchiveFolder(topic.path)
    file = Path(folder.data_path(TOPIC, 12, folder.manifest(TOPIC, 12).files[0].name))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"x")
    result = run(topic, trim=False, moved=True)
    assert (result.moved, result.elsewhere, result.kept[0].first, result.kept[0].damaged) == (1, 2, 12, True)
    assert result.kept[0].reason.endswith(
        f"is not the file that was written; copy it again from file://{old}"
    )
    assert offsets(topic) == list(range(120)), "from both"
    file.write_bytes(data)
    topic.needed = None
    result = run(topic, moved=True)
    assert (result.moved, result.elsewhere, result.kept) == (2, 0, ())
    assert [ledger for _, ledger in result.trimmed] == [16, 18]
    shutil.rmtree(old)
    assert offsets(topic) == list(range(200))


def test_a_manifest_of_another_service_does_not_pass_for_one_of_this(topic: Topic) -> None:
    run(topic, trim=False)
    topic.ledgers[1] = topic.ledgers[1]._replace(stored_id=77)
    result = run(topic, trim=False)
    (kept,) = result.kept
    assert (kept.first, kept.ledgers, kept.damaged) == (12, 1, True)
    assert "it says stored ledger 101, and the topic 77" in kept.reason


@pytest.mark.parametrize("trim", [False, True])
def test_a_job_that_comes_too_late_does_not_clear_what_another_one_archived(
    topic: Topic, trim: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ArchiveFolder.manifests
    others: list[Any] = []

    def manifests(self: ArchiveFolder, name: str) -> Any:
        found = real(self, name)
        if not others:
            others.append(None)
            others.append(run(topic, trim=trim))
        return found

    monkeypatch.setattr(ArchiveFolder, "manifests", manifests)
    match = "was trimmed before it was archived, perhaps by another job" if trim else "another job archives"
    with pytest.raises(MagnetarError, match=match):
        run(topic)
    assert len(others[1].archived) == 5
    folder = ArchiveFolder(topic.path)
    assert all(damaged(folder, one) == [] for one in folder.manifests(TOPIC).values())
    assert len(run(topic).trimmed) == (0 if trim else 5)
    assert offsets(topic) == list(range(200))


def test_a_relative_path_is_told_whole(topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    topic.path = "here"
    run(topic)
    assert {one.archive for one in topic.ledgers if one.archive} == {(tmp_path / "here").as_uri()}
    os.chdir("/")
    assert offsets(topic) == list(range(200))
