"""The metadata store of one process: the tree of nodes over an ordered key-value storage.

Keys (all integers big-endian):

    f                         format version, u32
    n NAME \\0 NAME \\0 ...      a node: u64 version | u64 session id, 0 if it is not ephemeral | value
    e u64 session id  PATH    empty; finds the nodes of a session without reading the tree
    s NAME                    a sequence: u64 next id

Names are joined by \\0, which sorts before every character that a name may have, so a node's descendants are adjacent
and `children` jumps over each child's subtree with one seek.

Commits of one turn of the loop share a synced write, which begins in the next turn: 64 topics that are loaded together
wait for the disk once and not 64 times. What comes while the disk writes is the next group. Each commit is judged on top of
those before it; what they wrote is shown to readers when it is durable. Nothing but its callers waits for a slow disk.

    commit, commit, next_id  ->  judged, put into the last group  ->  one write a group  ->  all return, or all fail alike

The groups behind one that fails were judged on top of it, so they fail with it.

A session lives as long as the process: those that a crash left behind are purged when the store is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from magnetar.proto.errors import (
    AlreadyClosed,
    AlreadyExists,
    DataDirectoryError,
    DiskFull,
    InvalidArgument,
    MagnetarError,
    NodeNotEmpty,
    NotFoundInStore,
    StorageFailed,
    VersionConflict,
)
from magnetar.runtime.tasks import begin

from .store import MAX_VALUE_BYTES, Check, Create, Delete, Operation, Put, Session, Versioned, split_path
from .watch import LoopWatch, WatchList

FORMAT_VERSION = 1
# A node of the tree that is listed costs 0.7 us, a new iterator with its seek 5 us.
_STEPS_PER_SEEK = 10
_ALL = 1 << 62
# A group of so many bytes of values takes no more: none may take more than its part of the log.
_GROUP_BYTES = 256 << 10

_FORMAT_KEY = b"f"
_NODE = b"n"
_EPHEMERAL = b"e"
_SEQUENCE = b"s"
_SESSIONS = _SEQUENCE + b"\x00sessions"  # no caller's sequence has a name that starts with \0
_NODE_FIELDS = struct.Struct(">QQ")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")


class KeyValue(Protocol):
    """The storage below: ordered keys, atomic synced batches. RocksDB (`embedded`), and a model of it in tests."""

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    def first_key(self, start: bytes, end: bytes) -> bytes | None:
        """The lowest key with start <= key < end, or None."""

    def keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        """Keys with start <= key < end in order. Nothing may be written before the iterator is used up or dropped."""

    def write_synced(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Puts and (None) deletes, all or nothing, durable when it returns.

        DiskFull: nothing was written, and a later write can succeed. StorageFailed: the outcome is not known.
        """

    async def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """The same, one at a time, while the loop goes on: `get` and `keys` show the changes when it returns."""

    def close(self) -> None:
        """Releases the storage."""


class LocalSession:
    """A session of this process."""

    def __init__(self, store: LocalMetadataStore, session_id: int) -> None:
        self.session_id = session_id
        self.lost = False
        self._store = store
        self._callbacks: list[Callable[[], None]] = []
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether nodes may still be made with it."""
        return not self._closed and not self.lost

    def when_lost(self, callback: Callable[[], None]) -> None:
        """See Session; at once (from the loop) if it is lost already."""
        if self.lost:
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._callbacks.append(callback)

    def lose(self) -> None:
        """The session ended by itself."""
        if not self.usable:
            return
        self.lost = True
        for callback in self._callbacks:
            asyncio.get_running_loop().call_soon(callback)

    async def close(self) -> None:
        """Deletes the session's nodes."""
        if self.usable:
            self._closed = True
            await self._store.purge(self.session_id)


class _Group:
    """Changes that wait for their write; `written` is done when they are durable, or fails with them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.full = False  # takes no more: it is being written, or large
        self.changes: dict[bytes, bytes | None] = {}
        self.changed_paths: dict[str, None] = {}
        self.parents: dict[str, None] = {}  # nodes below these were made
        self.bytes = 0
        self.written: asyncio.Future[None] = loop.create_future()


class LocalMetadataStore:
    """MetadataStore over a KeyValue. Opening it checks the format and purges the ephemerals of a dead process."""

    def __init__(self, storage: KeyValue) -> None:
        self._storage = storage
        self._watches = WatchList()
        self._sessions: dict[int, LocalSession] = {}
        self._closed = False
        self._failure: StorageFailed | None = None
        # Not durable yet, the oldest first; only that one is being written.
        self._groups: deque[_Group] = deque()
        # Called once, from the loop, when a write has failed: nothing can be written any more, so the daemon must stop.
        self.on_failure: Callable[[MagnetarError], None] = lambda error: None
        self._check_format()
        self._write(self._ephemerals()[0])

    async def get(self, path: str) -> Versioned | None:
        self._check_open()
        data = self._storage.get(_node_key(path))
        return None if data is None else Versioned(data[16:], _U64.unpack_from(data)[0])

    async def create(self, path: str, value: bytes, *, session: Session | None = None) -> int:
        await self.commit([Create(path, value, session)])
        return 0

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        await self.commit([Put(path, value, version)])
        return version + 1

    async def delete(self, path: str, *, version: int | None = None) -> None:
        await self.commit([Delete(path, version)])

    async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
        self._check_open()
        stem, end = _below(path)
        start = stem + after.encode() + b"\x01" if after else stem
        names: list[str] = []
        while not limit or len(names) < limit:
            found = self._some_children(stem, start, end, limit - len(names) if limit else _ALL)
            if not found:
                break
            names += [name.decode() for name in found]
            start = stem + found[-1] + b"\x01"  # behind the last child and everything below it
        return names

    async def next_id(self, name: str, count: int = 1) -> int:
        self._check_open()
        if not name or name < " ":
            raise InvalidArgument(f"not the name of a sequence: {name!r}")
        key = _SEQUENCE + name.encode()
        if not count:
            data = self._storage.get(key)
            return 0 if data is None else int(_U64.unpack(data)[0])
        value = self._next_in(key)
        await self._write_grouped({key: _U64.pack(value + count)})
        return value

    async def commit(self, operations: Sequence[Operation]) -> None:
        self._check_open()
        transaction = _Transaction(self._storage, self._groups)
        for index, operation in enumerate(operations):
            try:
                self._check_session(operation)
                transaction.apply(operation)
            except MagnetarError as error:
                error.details["index"] = index
                if self._groups:  # whoever reads now must find why it was refused
                    await asyncio.shield(self._groups[-1].written)
                raise
        await self._write_grouped(transaction.changes, transaction.changed_paths, transaction.parents)

    def watch(self, path: str, callback: Callable[[str], None]) -> LoopWatch:
        self._check_open()
        split_path(path)
        return self._watches.add(path, callback)

    async def open_session(self, timeout_s: float) -> LocalSession:
        """See MetadataStore. The timeout is not needed here: nothing but the end of the process ends the session."""
        self._check_open()
        number = self._next_in(_SESSIONS)
        await self._write_grouped({_SESSIONS: _U64.pack(number + 1)})
        session = LocalSession(self, number + 1)  # 0 means "not ephemeral" in a node
        self._sessions[session.session_id] = session
        return session

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            while self._groups:
                with contextlib.suppress(MagnetarError):
                    await asyncio.shield(self._groups[-1].written)
            if self._failure is None:
                for session in list(self._sessions.values()):
                    await session.close()
        finally:
            self._watches.close()
            self._storage.close()

    def _some_children(self, stem: bytes, start: bytes, end: bytes, limit: int) -> list[bytes]:
        """The next children in one walk, which ends at a child with many nodes below it: a seek is as dear as ten steps."""
        found: list[bytes] = []
        below = 0
        for key in self._storage.keys(start, end):
            name = key[len(stem) :].partition(b"\x00")[0]
            if found and name == found[-1]:
                below += 1
                if below == _STEPS_PER_SEEK:
                    break
            elif len(found) == limit:
                break
            else:
                found.append(name)
                below = 0
        return found

    # --- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise AlreadyClosed("the metadata store is closed")

    def _check_session(self, operation: Operation) -> None:
        if isinstance(operation, Create) and operation.session is not None:
            session = self._sessions.get(operation.session.session_id)
            if session is not operation.session or not session.usable:
                raise AlreadyClosed(
                    f"metadata session {operation.session.session_id} has ended; open a new one"
                )

    def _check_format(self) -> None:
        data = self._storage.get(_FORMAT_KEY)
        if data is None:
            if self._storage.first_key(b"", b"\xff") is not None:
                raise DataDirectoryError(
                    "the metadata store has no format version, so it is not one of Magnetar's; "
                    "point the setting data at the right directory"
                )
            self._write({_FORMAT_KEY: _U32.pack(FORMAT_VERSION)})
        elif data != _U32.pack(FORMAT_VERSION):
            raise DataDirectoryError(
                f"the metadata store has format version {int.from_bytes(data)}, this release reads {FORMAT_VERSION}; "
                "start the release that wrote it"
            )

    def _next_in(self, key: bytes) -> int:
        """The next number of a sequence, those that wait for their write counted."""
        drawn = (group.changes[key] for group in reversed(self._groups) if key in group.changes)
        data = next(drawn, None) or self._storage.get(key)
        return 0 if data is None else int(_U64.unpack(data)[0])

    async def _write_grouped(
        self,
        changes: Mapping[bytes, bytes | None],
        changed_paths: Iterable[str] = (),
        parents: Mapping[str, None] | None = None,
    ) -> None:
        """The changes are durable when it returns. They are written even if the caller is cancelled meanwhile."""
        if not changes:
            return
        self._check_writable()
        groups = self._groups
        if not groups:
            begin(self._write_groups(), "metadata writes")
        if not groups or groups[-1].full:
            groups.append(_Group(asyncio.get_running_loop()))
        group = groups[-1]
        group.changes.update(changes)
        group.changed_paths.update(dict.fromkeys(changed_paths))
        group.parents.update(parents or {})
        group.bytes += sum(len(value) for value in changes.values() if value is not None)
        group.full = group.bytes >= _GROUP_BYTES
        await asyncio.shield(group.written)

    async def _write_groups(self) -> None:
        """One after the other, until none waits; who waits for one learns in the turn after it."""
        groups = self._groups
        while groups:
            group = groups[0]
            group.full = True
            try:
                with self._failing():
                    await self._storage.write(group.changes)
            except MagnetarError as error:
                for failed in groups:
                    failed.written.set_exception(error)
                    failed.written.exception()  # looked at, in case all who waited were cancelled
                groups.clear()
                return
            groups.popleft()
            self._notify_watches(*group.changed_paths)
            group.written.set_result(None)

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise StorageFailed(self._failure.message)

    def _write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Durable when it returns."""
        if changes:
            with self._failing():
                self._storage.write_synced(changes)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A write is made inside. Nothing may be built upon one that failed: what it left behind is not known (rule 4)."""
        self._check_writable()
        try:
            yield
        except DiskFull:  # nothing was written, and a later write can succeed (rule 39)
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not isinstance(failure := error, StorageFailed):
                failure = StorageFailed(f"a write of the metadata store ended: {error!r}")
            self._failure = failure
            with contextlib.suppress(RuntimeError):  # no loop yet while the store is being opened
                asyncio.get_running_loop().call_soon(self._notify_failure, failure)
            for session in list(self._sessions.values()):
                session.lose()
            raise failure from None

    def _notify_failure(self, failure: StorageFailed) -> None:
        self.on_failure(failure)  # read at this moment: the owner sets it after opening

    async def purge(self, session_id: int) -> None:
        """Deletes the nodes of a session (LocalSession.close calls it)."""
        self._sessions.pop(session_id, None)
        if self._failure is None:
            await self._write_grouped(*self._ephemerals(session_id))

    def _ephemerals(self, session_id: int | None = None) -> tuple[dict[bytes, bytes | None], list[str]]:
        """Changes that delete the nodes of a session, or of all, on top of what waits for its write; and their paths."""
        start, end = _EPHEMERAL, bytes([_EPHEMERAL[0] + 1])
        if session_id is not None:
            start, end = _EPHEMERAL + _U64.pack(session_id), _EPHEMERAL + _U64.pack(session_id + 1)
        keys = set(self._storage.keys(start, end))
        for group in self._groups:
            for key, value in group.changes.items():
                if start <= key < end:
                    (keys.discard if value is None else keys.add)(key)
        changes: dict[bytes, bytes | None] = {}
        paths = []
        for key in sorted(keys):
            changes[key] = None
            path = key[9:].decode()
            changes[_node_key(path)] = None
            paths.append(path)
        return changes, paths

    def _notify_watches(self, *paths: str) -> None:
        """Notifies watches of nodes, their parents, and ancestors up to one that exists: their lists may have changed."""
        for path in paths if self._watches else ():
            self._watches.notify(path)
            for ancestor in _ancestors(path):
                self._watches.notify(ancestor)
                if ancestor == "/" or self._storage.get(_node_key(ancestor)) is not None:
                    break


class _Transaction:
    """Operations applied on top of the storage and of what waits for its write, nothing written yet."""

    def __init__(self, storage: KeyValue, waiting: Sequence[_Group]) -> None:
        self._storage = storage
        self._waiting = waiting
        self.changes: dict[bytes, bytes | None] = {}
        self.changed_paths: dict[str, None] = {}
        self.parents: dict[str, None] = {}

    def apply(self, operation: Operation) -> None:
        """Adds the operation's changes, or raises."""
        match operation:
            case Create(path, value, session):
                self._create(path, value, session)
            case Put(path, value, version):
                data = self._expect(path, version)
                _check_value(path, value)
                self._change(path, _U64.pack(version + 1) + data[8:16] + value)
            case Delete(path, version):
                data = self._expect(path, version)
                if self._has_children(path):
                    raise NodeNotEmpty(f"{path} has nodes below it; delete those first", path=path)
                self._change(path, None)
                if session_id := _U64.unpack_from(data, 8)[0]:
                    self.changes[_ephemeral_key(session_id, path)] = None
            case Check(path, version):
                self._check(path, version)

    def _create(self, path: str, value: bytes, session: Session | None) -> None:
        if self._get(path) is not None:
            raise AlreadyExists(f"{path} exists already", path=path)
        _check_value(path, value)
        session_id = 0 if session is None else session.session_id
        self.parents.update(dict.fromkeys(_ancestors(path)))
        self._change(path, _NODE_FIELDS.pack(0, session_id) + value)
        if session_id:
            self.changes[_ephemeral_key(session_id, path)] = b""

    def _check(self, path: str, version: int | None) -> None:
        if version is not None:
            self._expect(path, version)
        elif self._get(path) is not None:
            raise VersionConflict(f"{path} exists, and should not", path=path)

    def _expect(self, path: str, version: int | None) -> bytes:
        data = self._get(path)
        if data is None:
            raise NotFoundInStore(f"{path} does not exist", path=path)
        found = _U64.unpack_from(data)[0]
        if version is not None and found != version:
            raise VersionConflict(f"{path} has version {found}, not {version}; read it again", path=path)
        return data

    def _get(self, path: str) -> bytes | None:
        key = _node_key(path)
        for changes in (self.changes, *(group.changes for group in reversed(self._waiting))):
            if key in changes:
                return changes[key]
        return self._storage.get(key)

    def _has_children(self, path: str) -> bool:
        start, end = _below(path)
        changed = self.changes
        if self._waiting:
            changed = {}
            for layer in (*(group.changes for group in self._waiting), self.changes):
                changed.update(layer)
        if path in self.parents or any(path in group.parents for group in self._waiting):
            if any(start <= key < end and value is not None for key, value in changed.items()):
                return True
        return any(key not in changed for key in self._storage.keys(start, end))

    def _change(self, path: str, data: bytes | None) -> None:
        self.changes[_node_key(path)] = data
        self.changed_paths[path] = None


def _check_value(path: str, value: bytes) -> None:
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidArgument(
            f"the value of {path} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are allowed"
        )


def _node_key(path: str) -> bytes:
    names = split_path(path)
    if not names:
        raise InvalidArgument("the root / has no value; name a node below it")
    return _NODE + "\x00".join(names).encode()


def _below(path: str) -> tuple[bytes, bytes]:
    """Range of the keys of all descendants."""
    names = split_path(path)
    if not names:
        return _NODE, bytes([_NODE[0] + 1])
    stem = _NODE + "\x00".join(names).encode()
    return stem + b"\x00", stem + b"\x01"


def _ephemeral_key(session_id: int, path: str) -> bytes:
    return _EPHEMERAL + _U64.pack(session_id) + path.encode()


def _ancestors(path: str) -> Iterator[str]:
    while path != "/":
        path = path.rpartition("/")[0] or "/"
        yield path
