"""A state that follows from a topic's log, and outlives its broker with the position in the log that it describes.

`LogState` is what a feature implements: the last sequence id of each producer, say. `StoredLogState` feeds it, stores it and
opens it again; `LogStates` has those of one topic. A feature that is off has none, and costs nothing.

    OPENING    its node is read and taken over, what is stored is applied, then the log behind its position is replayed
      --caught up with the end of the log--> FOLLOWING      in one turn of the loop: no entry is missed
      --a bookie is away--> OPENING again, after a pause; `check` says why
    FOLLOWING  the state gets each entry when it is confirmed, and is written now and then
    CLOSED     final

**Position**: ledger and entry. All confirmed entries before it are in the state. What is only accepted (flush=async) is not:
the next owner may not find it. The position that is stored is that of the moment in which the first piece was made, and a
state goes on changing while it is written. So some entries may be replayed that later pieces have already: `replay` of what
a state has changes nothing.

**Cadence**: every `every_entries` entries, or `interval_ms` after the first entry that is not stored yet. Changes are
appended to a `snapshot_ledger`; all is written anew when its ledger is full or its changes outweigh the state. A write that
failed is tried again after a pause that doubles, and said once. Nothing waits for it but `close`.

**Replay** reads through `log/reading`, 256 KB in each turn of the loop, and leaves the tail cache alone. Ledgers that were
attached are passed over: none of their messages came from a producer of this topic. So is what was trimmed, and what was
appended before the state's `needed_since_ms`. An entry that is damaged is left out, and said.

**Damage** in the state's own ledger: the last position before it counts. What stands behind is applied all the same (each
piece is true by itself), and the log is replayed from that position on. A damaged node goes, and all of the log is replayed.

**Retention**: the log keeps all from the stored position on, as long as there are entries behind it.

**Owners** (rule 52): opening fences the state's ledger and writes its node. A former owner meets that at its next write, and
its topic fences itself; what it wrote before is true in any case, since it describes entries that are in the log.

**On and off**: `LogStates.open` begins with what is stored, or with an empty state at the end of the log. `drop` deletes
what it finds, by the version that it finds, and writes the topic's head in between: an owner takes over the head first and
states after that, so a former one that comes too late meets a conflict, and deletes nothing. When a topic is deleted, so is
all that is below `log_states_path`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol

import msgspec

from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    DataDirectoryError,
    InvalidArgument,
    LedgerNotFound,
    MagnetarError,
    MalformedFrame,
    MessageLost,
    NotFoundInStore,
    ServiceNotReady,
    TopicNotServed,
    VersionConflict,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.tasks import begin, wait_at_most

from ..cursors.pointer import Pointer
from ..cursors.snapshot_ledger import SnapshotLedger, delete_stored, is_damage
from ..log.managed_ledger import ManagedLedger
from ..log.records import log_state_path, log_states_path
from .coalescer import GatheredEntry
from .components import Components

_log = logging.getLogger(__name__)

Place = tuple[int, int]  # ledger (position id) and entry: the first one that is not included

FIRST_TRY_S = 5.0
_BYTES_PER_TURN = 256 * 1024
_PAUSE_S = 0.001  # between turns in which what is stored is read back
# Changes are appended until they outweigh the snapshot: then reading them back takes longer than writing it.
_MIN_CHANGED_BYTES = 256 * 1024


class LogState(Protocol):
    """What follows from a log. Nothing here awaits; entries come in the order of the log, and no piece ceases to be true."""

    def confirmed(self, ledger_id: int, entry_id: int, context: GatheredEntry) -> None:
        """An entry that this broker appended is durable; `context` is what was given to `append`."""

    def replay(self, ledger_id: int, entry_id: int, entry: Entry) -> None:
        """The same of an entry that was read back. Raises MalformedFrame or InvalidArgument for one that is damaged."""

    def clear(self) -> None:
        """Empty, as before the first `apply`."""

    def apply(self, piece: bytes) -> Iterable[int]:
        """One of `pieces` or `changes`, in steps; how many rows each has. Raises DataDirectoryError for a damaged one."""

    def pieces(self) -> Iterator[bytes]:
        """The whole state; each piece is made when it is asked for, as the state is then, and true without the others."""

    def changes(self) -> Iterable[bytes]:
        """Pieces with what changed since the last call, and what changes after that comes next; called before `pieces` too.

        Each is made when it is asked for, and the first one says what has changed.
        """

    def needed_since_ms(self) -> int:
        """What was appended before this time need not be replayed; 0: all is needed."""


class _Record(msgspec.Struct, array_like=True):
    """How a piece is stored."""

    place: Place | None  # of the snapshot or the change that ends with this piece
    piece: bytes  # empty: nothing but a position, or not even that


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


def _records(pieces: Iterator[bytes], place: Place) -> Iterator[bytes]:
    """The last one has the position; an empty one if there are no pieces."""
    piece: bytes | None = next(pieces, b"")
    while piece is not None:
        following = next(pieces, None)
        yield _encode(_Record(place if following is None else None, piece))
        piece = following


class StoredLogState:
    """One state of one topic; see the module docstring. `open` before use, `close` in the end."""

    generation = 0  # a piece stays true: what follows from the log is never taken back

    def __init__(
        self,
        kind: str,
        state: LogState,
        ledger: ManagedLedger[GatheredEntry],
        components: Components,
        every_entries: int,
        interval_ms: int,
    ) -> None:
        """`kind`: the name of its node, and the kind of its ledgers."""
        self.kind = kind
        self.following = False
        self._state: LogState = weakref.proxy(state)  # which owns this
        self._ledger = ledger
        self._components = components
        self.every_entries = every_entries
        self._interval_ms = interval_ms
        self._loop = asyncio.get_running_loop()
        self._name = f"{kind} state of topic {ledger.name}"
        self._trouble = f"the {self._name} is being read; try again"
        self._store = self._new_store()
        self._place: Place = (0, 0)  # of the state in memory
        self._durable: Place | None = None  # of what is stored; None: not known yet
        self._unwritten = 0  # entries between the two
        self._snapshot_due = False  # changes were taken out of the state, or a better ledger can be made
        self._snapshot_place: Place = (0, 0)
        self._snapshot_bytes = self._changed_bytes = 0  # of the ledger
        self._task: asyncio.Task[None] | None = None  # that opens or writes
        self._timer: asyncio.TimerHandle | None = None
        self._tried = asyncio.Event()  # to open it
        self._closing = asyncio.Event()

    def _new_store(self) -> SnapshotLedger:
        ledger, components = self._ledger, self._components
        settings, path = components.settings, log_state_path(ledger.name, self.kind)
        return SnapshotLedger(
            self.kind, path, self, components.metadata, components.ledgers, lambda: ledger.durability().of_ledger(),
            ledger.fence,
            max_entries=settings.max_cursor_ledger_entries, max_inline_bytes=settings.max_inline_cursor_bytes,
            pause_s=_PAUSE_S,
        )  # fmt: skip

    # --- opening -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Returns when the state follows the log, or when the first attempt failed; others come by themselves."""
        self._task = begin(self._until_done(self._open, "read"), f"opening the {self._name}")
        await wait_at_most(self._tried, FIRST_TRY_S)

    async def opened(self) -> bool:
        """Returns when the state follows the log; False if it is closed before that."""
        if not self.following and self._task is not None:
            await asyncio.wait([self._task])
        return self.following

    def check(self) -> None:
        """Raises ServiceNotReady while the state does not follow the log: what it says is not true yet."""
        if not self.following:
            raise ServiceNotReady(self._trouble)

    async def _until_done(self, attempt: Callable[[], Coroutine[Any, Any, None]], done: str) -> None:
        """Or until the state is closed, or the topic has another owner. What fails is said once."""
        settings, failed = self._components.settings, False
        pause_ms = settings.retry_initial_ms
        try:
            while not self._closing.is_set() and self._ledger.changes.not_served is None:
                try:
                    await attempt()
                    break
                except Exception as error:
                    self._trouble = f"the {self._name} cannot be {done} yet, and is tried again: {error}"
                    if not failed:
                        _log.warning("%s", self._trouble, exc_info=not isinstance(error, MagnetarError))
                    failed = True
                    self._tried.set()
                    await wait_at_most(self._closing, pause_ms / 1000)
                    pause_ms = min(pause_ms * 2, settings.retry_max_ms)
        finally:
            self._tried.set()
            self._idle()

    async def _open(self) -> None:
        await self._replay(await self._recover())

    async def _recover(self) -> Place:
        """Takes over what is stored, or begins a state; returns from where on the log is to be replayed."""
        self._store, self._durable = self._new_store(), None
        self._place = (0, 0)
        self._unwritten = self._snapshot_bytes = self._changed_bytes = 0
        self._state.clear()
        end = self._ledger.list.end[:2]
        if await self._components.metadata.get(self._store.path) is None:
            return await self._begin(end)
        try:
            if not await self._store.recover(self._apply):  # it was being dropped
                await self._store.delete()
                return await self._begin(end)
        except DataDirectoryError as error:
            _log.warning("the %s is made anew from the topic's log: %s", self._name, error)
            await self._store.delete()
            return await self._begin((0, 0))
        if self._store.damage:
            _log.warning(
                "the %s: %s; the topic's log is replayed from %s on", self._name, self._store.damage, self._place
            )  # fmt: skip
        self._durable = self._place
        return self._place

    async def _begin(self, place: Place) -> Place:
        self._store, self._place = self._new_store(), place
        self._state.clear()
        await self._store.create(self._components.clock.now_ms())
        self._durable = place
        return place

    def _apply(self, data: bytes) -> Iterator[int]:
        try:
            record = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataDirectoryError(f"a record is damaged: {error}") from error
        if record.piece:
            yield from self._state.apply(record.piece)
        self._snapshot_bytes += len(record.piece)
        if not self._store.damage:
            self._place = record.place or self._place

    async def _replay(self, place: Place) -> None:
        """Ends in the turn of the loop in which the state has all confirmed entries: FOLLOWING."""
        ledgers, reading, state = self._ledger.list, self._ledger.reading, self._state
        since_ms = state.needed_since_ms()
        unreadable: list[str] = []
        while True:
            ledger_id, entry_id, _ = ledgers.normalise((*place, 0))
            info = ledgers.info(ledger_id)
            if info is None or entry_id >= info.entries:
                break
            place = (ledger_id + 1, 0)
            if info.stored_id != info.ledger_id or info.last_append_ms < since_ms:
                continue
            try:
                found = await reading.read(ledger_id, entry_id, max_bytes=_BYTES_PER_TURN)
            except MagnetarError as error:
                if isinstance(error, MessageLost):  # trimmed meanwhile
                    continue
                if not is_damage(error):
                    raise
                unreadable.append(f"entry {entry_id} of ledger {ledger_id}: {error}")
                if not isinstance(error, LedgerNotFound):
                    place = (ledger_id, entry_id + 1)
                continue
            for number, data in enumerate(found, entry_id):
                try:
                    state.replay(ledger_id, number, Entry(data, LEDGER_ENTRY_HEADER_BYTES))
                except (MalformedFrame, InvalidArgument) as error:
                    unreadable.append(f"entry {number} of ledger {ledger_id}: {error}")
            place = (ledger_id, entry_id + len(found))
            self._unwritten += len(found)
            await asyncio.sleep(0)
        if unreadable:
            _log.warning("the %s lacks %d entries: %s", self._name, len(unreadable), unreadable[0])
        self._place = ledgers.end[:2]
        self.following = True

    # --- following ---------------------------------------------------------------------------------------------------

    def confirmed(self, ledger_id: int, entry_id: int, context: GatheredEntry) -> None:
        """Of every entry that is confirmed; those that come before the state follows are read back."""
        if self.following:
            self._state.confirmed(ledger_id, entry_id, context)
            self._place = (ledger_id, entry_id + 1)
            self._unwritten += 1
            if self._task is None and (self._timer is None or self._unwritten >= self.every_entries):
                self._idle()

    @property
    def needed_from(self) -> tuple[int, int, int]:
        """See the module docstring."""
        if self._durable is None:
            return (0, 0, 0)
        return (*self._durable, 0) if self._unwritten or not self.following else self._ledger.list.end

    def restore(self) -> None:
        """The regular round: leaves a ledger for which there is a better one."""
        if self._store.replaceable:
            self._snapshot_due = True
            self._begin_write()

    # --- writing -----------------------------------------------------------------------------------------------------

    def _idle(self) -> None:
        """Nothing is under way: the next write begins now, or in a while."""
        self._task = None
        if self._unwritten >= self.every_entries:
            self._begin_write()
        elif self._unwritten and self._timer is None and not self._closing.is_set():
            self._timer = self._loop.call_later(self._interval_ms / 1000, self._begin_write)

    def _begin_write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None and self.following:
            self._task = begin(self._until_done(self._write_all, "written"), f"writing the {self._name}")

    async def _write_all(self) -> None:
        await self._write()
        await self._store.delete_former()

    async def _write(self) -> None:
        """Durable when it returns, as it was when this was called."""
        store, place, unwritten = self._store, self._place, self._unwritten
        outweighed = self._changed_bytes >= max(self._snapshot_bytes, _MIN_CHANGED_BYTES)
        whole = self._snapshot_due or outweighed or not store.has_room
        self._snapshot_due = True  # until what is taken out of the state is durable
        if whole:
            await store.replace()
            place = self._snapshot_place
        else:
            for record in _records(iter(self._state.changes()), place):
                await store.append(record, 1)
                self._changed_bytes += len(record)
        self._snapshot_due = False
        self._durable = place
        self._unwritten -= unwritten

    # --- StoredState -------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[bytes]:
        """As records. The last one has the position of the moment in which the first one was made."""
        self._snapshot_place = self._place
        self._snapshot_bytes = self._changed_bytes = 0
        if next(iter(self._state.changes()), None):  # what was taken out is in the pieces, and only there
            self._snapshot_due = True
        for record in _records(self._state.pieces(), self._snapshot_place):
            self._snapshot_bytes += len(record)
            yield record

    def summary(self) -> bytes:
        """Nothing: then the ledger alone says what the state is."""
        return _encode(_Record(None, b""))

    # --- ending ------------------------------------------------------------------------------------------------------

    async def close(self, *, fenced: bool) -> None:
        """Writes what is not stored, unless `fenced`; a small state moves into its node, which opens fastest.

        A write that is under way is waited for.
        """
        self._closing.set()
        opened, self.following = self.following, False
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            if not opened:
                self._task.cancel()
            await asyncio.wait([self._task])
        if fenced or self._ledger.changes.not_served is not None or not opened:
            self._store.detach()
            return
        size = self._snapshot_bytes + self._changed_bytes
        try:
            small = (
                size <= self._components.settings.max_inline_cursor_bytes and await self._store.fits_pointer()
            )
            if self._unwritten and not small:
                await self._write()
            await self._store.close(changed=self._unwritten > 0, small=small)
        except Exception as error:  # the next owner recovers what is stored, and replays the rest
            defect = not isinstance(error, MagnetarError)
            _log.warning("the %s was not closed cleanly: %s", self._name, error, exc_info=defect)


class LogStates:
    """Those of one topic, by kind. `close` it in the end."""

    def __init__(self, ledger: ManagedLedger[GatheredEntry], components: Components) -> None:
        self._ledger = ledger
        self._components = components
        self._by_kind: dict[str, StoredLogState] = {}

    async def stored(self) -> list[str]:
        """Kinds that something is stored of, whether they are open or not."""
        return await self._components.metadata.children(log_states_path(self._ledger.name))

    async def open(
        self, kind: str, state: LogState, *, every_entries: int, interval_ms: int
    ) -> StoredLogState:
        """Returns as `StoredLogState.open`. From now on the state gets what is confirmed."""
        assert kind not in self._by_kind
        opened = StoredLogState(kind, state, self._ledger, self._components, every_entries, interval_ms)
        self._by_kind[kind] = opened
        await opened.open()
        return opened

    async def drop(self, kind: str) -> None:
        """Nothing is stored of this kind any more when this returns. May be called again after it raised.

        Raises VersionConflict or TopicNotServed, and has deleted nothing, if there is another owner.
        """
        if (opened := self._by_kind.pop(kind, None)) is not None:
            await opened.close(fenced=True)
        found = await self._pointer(kind)
        if found is not None:
            await self._ledger.changes.edit(self._ledger.list.commit)
            await self._delete(kind, found)

    def confirmed(self, ledger_id: int, entry_id: int, context: GatheredEntry) -> None:
        """An entry is durable. A defect in a state ends the topic here: its next owner makes the state of the log."""
        for one in self._by_kind.values():
            try:
                one.confirmed(ledger_id, entry_id, context)
            except Exception as error:
                _log.exception("the %s state of topic %s failed", one.kind, self._ledger.name)
                self._ledger.fence(TopicNotServed(f"topic {self._ledger.name} failed here: {error!r}"))

    def restore(self) -> None:
        """The regular round: each leaves a ledger for which there is a better one."""
        for one in self._by_kind.values():
            one.restore()

    def holders(self) -> Iterator[tuple[tuple[int, int, int], str]]:
        """From where on the log must be kept, and why; for `retention`."""
        for kind, one in self._by_kind.items():
            yield one.needed_from, f"the {kind} state is not stored beyond it yet"

    async def close(self, *, fenced: bool) -> None:
        """All of them, side by side. `fenced`: nothing is written."""
        states = list(self._by_kind.values())
        self._by_kind.clear()
        await asyncio.gather(*(one.close(fenced=fenced) for one in states))

    async def delete(self) -> None:
        """All that is stored of any kind goes, with the topic. Raises TopicBusy: delete it again."""
        for kind in await self.stored():
            if (found := await self._pointer(kind)) is not None:
                await self._delete(kind, found)

    async def _pointer(self, kind: str) -> Pointer | None:
        pointer = Pointer(log_state_path(self._ledger.name, kind), self._components.metadata)
        with contextlib.suppress(DataDirectoryError, NotFoundInStore):
            await pointer.read()
        return pointer if pointer.known else None

    async def _delete(self, kind: str, found: Pointer) -> None:
        try:
            await delete_stored(found, self._components.ledgers, kind)
        except VersionConflict as conflict:
            self._ledger.fence(conflict)
            raise
