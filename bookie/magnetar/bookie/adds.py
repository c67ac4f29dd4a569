"""Adding entries: admission, and the queue of adds that wait for room in the write cache.

In one turn of the loop and so under the ledger's lock (rule 1): fence check -> write cache -> journal. The callback comes
when the journal's sync covers the record, never from inside `add`.

A deferred add asks for no sync: it is accepted once it is in cache and journal, and durable with the next sync, that of
another record, of `force`, or the journal's own (`journal_deferred_sync_s`). So its first answer waits for no disk, and
promises nothing.

Adds for which the write cache has no room wait in order of arrival, bounded in bytes and in time; `accepting` is false
meanwhile, and a server stops reading.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import (
    EntryDamaged,
    InvalidArgument,
    LedgerFenced,
    MagnetarError,
    MessageTooLarge,
    StorageFailed,
    TooManyRequests,
)
from magnetar.proto.ids import MAX_ENTRY_ID, MAX_LEDGER_ID
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, LEDGER_ENTRY_HEADER_BYTES

from .journal import Journals
from .journal.journal import DurableCallback
from .ledgers import LedgerDescriptors
from .read_cache import ReadCache
from .settings import BookieSettings
from .write_cache import WriteCache

_FENCED = LedgerFenced.code
_TOO_MANY = TooManyRequests.code


class _Waiting(NamedTuple):
    deadline: float
    entry: bytes
    recovery: bool
    deferred: bool
    done: DurableCallback


def _ledger_of(entry: bytes) -> int:
    return int(LEDGER_ENTRY_FIELDS.unpack_from(entry)[0])


class Adds:
    """The add path of one bookie. `fail` is its fail-stop, `want_flush` asks for a checkpoint."""

    def __init__(
        self,
        settings: BookieSettings,
        ledgers: LedgerDescriptors,
        journals: Journals,
        cache: WriteCache,
        read_cache: ReadCache,
        want_flush: Callable[[], None],
        fail: Callable[[MagnetarError], None],
    ) -> None:
        # Called when `accepting` becomes true again.
        self.on_accepting: list[Callable[[], None]] = []
        # Error code for every add while there is a reason to refuse them all, else 0; see `refuse_all`.
        self.refusal = 0
        self._refuse_recoveries = True
        self._journals = journals
        self._settings = settings
        self._ledgers = ledgers
        self._cache = cache
        self._read_cache = read_cache
        self._want_flush = want_flush
        self._fail = fail
        # Adds that wait for room in the write cache, in order of arrival.
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        # Figure: those that were too large, or too many.
        self.refused = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def accepting(self) -> bool:
        """False while adds wait for room: a server should stop reading until `on_accepting`."""
        return not self._waiting

    @property
    def waiting(self) -> int:
        """Adds that wait for room."""
        return len(self._waiting)

    def add(self, entry: bytes, *, recovery: bool, done: DurableCallback, deferred: bool = False) -> None:
        """Stores a ledger entry (40-byte header and payload, digest already verified); keeps the bytes object.

        `done(ledger_id, entry_id, code)` is called once from the loop: code 0 when the entry is durable here, else
        LedgerFenced, BookieReadOnly, TooManyRequests, MessageTooLarge, InvalidArgument (`proto.ids`: there is no such id),
        ServiceNotReady or StorageFailed. Raises EntryDamaged for bytes that hold no header. Adding an entry again stores the
        newer bytes. About 2 us and the journal's copy.

        A deferred add that is accepted is answered with ADD_ACCEPTED first. After an error no further answer counts.
        """
        if len(entry) < LEDGER_ENTRY_HEADER_BYTES:
            raise EntryDamaged(
                f"a ledger entry has at least {LEDGER_ENTRY_HEADER_BYTES} bytes, not {len(entry)}"
            )
        if len(entry) > self._settings.max_entry_bytes:
            self._refuse(entry, done, MessageTooLarge.code)
        elif self._waiting or not self._admit(entry, recovery, deferred, done):
            self._wait_for_room(entry, recovery, deferred, done)

    def force(self, ledger_id: int) -> None:
        """Requests a sync of the ledger's earlier adds; those that still wait for room become ordinary adds."""
        if any(add.deferred for add in self._waiting):
            self._waiting = deque(
                add._replace(deferred=False) if _ledger_of(add.entry) == ledger_id else add
                for add in self._waiting
            )
        self._journals.of(ledger_id).sync()

    def refuse_all(self, code: int, *, recoveries: bool = True) -> None:
        """Every add is refused with `code` from now on, those that wait included; 0: none is any more.

        Without `recoveries` those of recoveries still pass.
        """
        self.refusal = code
        self._refuse_recoveries = recoveries
        if code:
            self.admit_waiting()

    def admit_waiting(self) -> None:
        """Called whenever room may have appeared, or every add is refused from now on."""
        if not self._waiting:
            return
        while self._waiting:
            # Popped first: a failure in `_admit` calls this method again, to refuse all that wait.
            first = self._waiting.popleft()
            _, entry, recovery, deferred, done = first
            self._waiting_bytes -= len(entry)
            if not self._admit(entry, recovery, deferred, done):
                self._waiting.appendleft(first)
                self._waiting_bytes += len(entry)
                return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._notify_accepting()

    def _admit(self, entry: bytes, recovery: bool, deferred: bool, done: DurableCallback) -> bool:
        """The add path. False if the write cache has no room."""
        ledger_id, entry_id, last_add_confirmed, _ = LEDGER_ENTRY_FIELDS.unpack_from(entry)
        if (
            ledger_id > MAX_LEDGER_ID
            or entry_id > MAX_ENTRY_ID
            or not -1 <= last_add_confirmed <= MAX_ENTRY_ID
        ):
            self._refuse(entry, done, InvalidArgument.code)
            return True
        states = self._ledgers
        state = states.by_id.get(ledger_id)
        if state is None:
            try:
                state = states.load(ledger_id)
            except StorageFailed as error:  # it is not known whether the ledger is fenced
                self._fail(error)
                self._refuse(entry, done, StorageFailed.code)
                return True
        if state.fenced and (not recovery or state.deleted_at_ms):
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, _FENCED)
            return True
        if self.refusal and (self._refuse_recoveries or not recovery):
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, self.refusal)
            return True
        cache = self._cache
        if not cache.has_room(len(entry)):
            self._want_flush()
            return False
        half_full = cache.put(ledger_id, entry_id, entry)
        states.note_entry(state, ledger_id, entry_id, last_add_confirmed)
        if recovery:
            self._read_cache.discard(ledger_id, entry_id)
        journals = self._journals.all  # as `Journals.of` does, without its call
        journal = journals[ledger_id % len(journals)]
        if deferred:
            journal.add_deferred(entry, done, ledger_id, entry_id)
            if journal.failure is None:
                asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, ADD_ACCEPTED)
        else:
            journal.add(entry, done, ledger_id, entry_id)
        if half_full:
            self._want_flush()
        return True

    def _wait_for_room(self, entry: bytes, recovery: bool, deferred: bool, done: DurableCallback) -> None:
        loop = asyncio.get_running_loop()
        limit = self._settings.write_cache_bytes // 4
        if self._waiting and self._waiting_bytes + len(entry) > limit:
            self._refuse(entry, done, _TOO_MANY)
            return
        deadline = loop.time() + self._settings.add_backpressure_timeout_s
        self._waiting.append(_Waiting(deadline, entry, recovery, deferred, done))
        self._waiting_bytes += len(entry)
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._waited_too_long)

    def _refuse(self, entry: bytes, done: DurableCallback, code: int) -> None:
        self.refused += 1
        ledger_id, entry_id, _, _ = LEDGER_ENTRY_FIELDS.unpack_from(entry)
        asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, code)

    def _waited_too_long(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        # A timer may fire up to its resolution early.
        now = loop.time() + 0.002
        while self._waiting and self._waiting[0][0] <= now:
            _, entry, _, _, done = self._waiting.popleft()
            self._waiting_bytes -= len(entry)
            self._refuse(entry, done, _TOO_MANY)
        if self._waiting:
            self._timer = loop.call_at(self._waiting[0][0], self._waited_too_long)
        else:
            self._notify_accepting()

    def _notify_accepting(self) -> None:
        for callback in list(self.on_accepting):
            callback()
