"""Planted defects: mistakes that others made in this protocol (CORRECTNESS.md), each a patch of the real code.

Nothing of this is in the shipped package. `plant(name)` changes classes of the running process; the runner does it in worker
processes (`python -m sim.runner ledgers --defect NAME`), which never play a healthy seed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magnetar.bookie.adds import Adds
from magnetar.bookie.checkpoint import Checkpointer, _Work
from magnetar.bookie.entry_log import EntryLogs
from magnetar.bookie.fencing import Fencing
from magnetar.bookie.gc import MetadataLedgers
from magnetar.bookie.journal.inline import InlineJournalDevice
from magnetar.bookie.reads import Reads
from magnetar.ledger.bookie_connection import _Link
from magnetar.ledger.components import LedgerComponents
from magnetar.ledger.core.events import EntryRead, MetadataFound, MetadataWritten
from magnetar.ledger.core.last_confirmed import LastConfirmedQuorum
from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore
from magnetar.ledger.core.writer import WriterCore, WriterState
from magnetar.ledger.recover import _Recovery
from magnetar.ledger.tcp_transport import TcpTransport
from magnetar.metadata.paths import ledger_path
from magnetar.proto.errors import EntryNotFound, LedgerFenced, MagnetarError, UnknownLedgerState

# Core classes have slots and private names: patches are made of Any.
_writer: Any = WriterCore
_recovery: Any = RecoveryCore
_adds: Any = Adds
_fencing: Any = Fencing
_checkpointer: Any = Checkpointer
DEFECTS: dict[str, Callable[[], None]] = {}


def plant(name: str) -> None:
    """Plants one of DEFECTS in this process."""
    DEFECTS[name]()


def _defect(function: Callable[[], None]) -> Callable[[], None]:
    DEFECTS[function.__name__] = function
    return function


# --- recovery ----------------------------------------------------------------------------------------------------------


@_defect
def recovery_does_not_fence() -> None:
    """BookKeeper #2614: what recovery reads does not fence the ledger."""
    transport: Any = TcpTransport
    read, read_last_confirmed = transport.read, transport.read_last_confirmed

    async def unfenced_read(self: Any, *arguments: Any, max_bytes: int = 0, fence: bool = False) -> Any:
        return await read(self, *arguments, max_bytes=max_bytes)

    async def unfenced_lac(self: Any, bookie: str, ledger_id: int, *, fence: bool = False) -> Any:
        return await read_last_confirmed(self, bookie, ledger_id)

    transport.read, transport.read_last_confirmed = unfenced_read, unfenced_lac


@_defect
def recovery_ignores_the_last_ensemble() -> None:
    """Rule 15: recovery starts at the LAC although the last ensemble begins later."""

    def read_base(self: Any, last_add_confirmed: int) -> Any:
        self._base = last_add_confirmed
        self._first = self._next_read = self._next_add = self._base + 1
        return self._read_on()

    _recovery._read_base = read_base


@_defect
def recovery_starts_one_late() -> None:
    """Rule 15: the entry after the LAC is taken for confirmed as well, and not added again."""
    read_on = _recovery._read_on

    def late(self: Any) -> Any:
        if self._first == self._next_read == self._base + 1 and not self.__dict__.get("late"):
            self.late = True
            self._first = self._next_read = self._next_add = self._base + 2
        return read_on(self)

    _recovery._read_on = late


@_defect
def one_negative_proves_absence() -> None:
    """Rule 14: one bookie without the entry is enough to end the ledger before it."""
    Striping.negatives_for_absence = 1  # type: ignore[method-assign, assignment]


@_defect
def errors_prove_absence() -> None:
    """Rule 14: what a bookie could not answer counts as "no such entry"."""
    entry_read = _recovery._entry_read

    def believing(self: Any, event: EntryRead) -> Any:
        code = EntryNotFound.code if event.code else 0
        return entry_read(self, EntryRead(event.bookie, event.entry_id, event.entry, event.length, code))

    _recovery._entry_read = believing


@_defect
def lac_read_without_coverage() -> None:
    """Rule 13: the first answer is enough to know the LAC, and to have fenced."""

    def covered(self: Any) -> bool:
        return bool(self._known)

    LastConfirmedQuorum.covered = property(covered)  # type: ignore[assignment, method-assign]


@_defect
def re_adds_are_not_waited_for() -> None:
    """Rule 15: the ledger is closed when the re-adds were sent."""
    send = _recovery._send

    def sent(self: Any, entry_id: int, entry: bytes) -> Any:
        self._entries[entry_id].acked = self.striping.mask(entry_id)
        return send(self, entry_id, entry)

    _recovery._send = sent


@_defect
def recovery_reads_the_changed_ensemble() -> None:
    """Rule 15: bookies that recovery itself has put in are asked as well."""
    replace = _recovery._replace

    def replaced(self: Any, chosen: dict[int, str]) -> Any:
        instructions = replace(self, chosen)
        self._reading = self._changed.last_ensemble.bookies
        return instructions

    _recovery._replace = replaced


@_defect
def recovery_writes_metadata_early() -> None:
    """Rule 15: an ensemble change is in the metadata before the entries are on its bookies."""
    carry_out = _Recovery._carry_out

    async def write(self: Any, changed: Any) -> None:
        core = self._core
        event = await self._components.write_metadata(self._ledger_id, changed, core.version)
        if isinstance(event, MetadataWritten) and core.metadata.state is LedgerState.IN_RECOVERY:
            core.metadata, core.version = changed, event.version

    def early(self: Any, instructions: Any) -> None:
        before = self._core._changed.ensembles
        carry_out(self, instructions)
        changed = self._core._changed
        if changed.ensembles != before and changed.state is LedgerState.IN_RECOVERY:
            self._start(write(self, changed))

    _Recovery._carry_out = early  # type: ignore[method-assign]


@_defect
def closing_overwrites_a_conflict() -> None:
    """Rule 16: whoever loses a compare-and-set writes once more, with the version that it found."""
    write = LedgerComponents.write_metadata

    async def stubborn(self: Any, ledger_id: int, metadata: Any, version: int) -> Any:
        event = await write(self, ledger_id, metadata, version)
        if isinstance(event, MetadataFound) and metadata.closed:
            new = await self.metadata.put(ledger_path(ledger_id), metadata.encode(), version=event.version)
            return MetadataWritten(new)
        return event

    LedgerComponents.write_metadata = stubborn  # type: ignore[method-assign]


# --- the writer ----------------------------------------------------------------------------------------------------------


@_defect
def acks_of_a_replaced_bookie_are_kept() -> None:
    """BookKeeper #1591: an entry is confirmed by the ack of a bookie that no longer is in its ensemble."""

    def changed(self: Any) -> Any:
        old = tuple(self._bits)
        for position, bookie in enumerate(self._changing_to):
            if bookie != old[position]:
                self._failing.pop(position, None)
                self._replaced[position] = None
        self._set_ensemble(self._changing_to)
        self._changing_to = None
        return self._begin_change() if self._failing else self._go_on()

    _writer._ensemble_changed = changed


@_defect
def late_acks_of_the_old_ensemble_count() -> None:
    """BookKeeper #4651: an answer of a replaced bookie counts for the position that it had."""
    stored = _writer.stored
    positions: dict[tuple[int, int], dict[str, int]] = {}

    def counted(self: Any, bookie: str, entry_id: int) -> Any:
        known = positions.setdefault((self.ledger_id, id(self)), {})
        known.update(self._bits)
        bit = known.get(bookie)
        for name, its in self._bits.items():
            if its == bit:
                return stored(self, name, entry_id)
        return stored(self, bookie, entry_id)

    _writer.stored = counted


@_defect
def confirms_across_an_unwritten_change() -> None:
    """BookKeeper #4097: entries are confirmed while the ensemble change is not in the metadata yet."""
    stored = _writer.stored

    def confirmed(self: Any, bookie: str, entry_id: int) -> Any:
        if self.state is not WriterState.CHANGING:
            return stored(self, bookie, entry_id)
        self.sending = True
        try:
            return stored(self, bookie, entry_id)
        finally:
            self.sending = False

    _writer.stored = confirmed


@_defect
def change_starts_behind_what_is_pending() -> None:
    """Rule 17: the new ensemble starts at the next entry, not at LAC+1."""
    write = _writer._write

    def late(self: Any, metadata: Any) -> Any:
        if self.state is WriterState.CHANGING:
            metadata = self.metadata.with_ensemble(self.last_add_pushed + 1, self._changing_to)
        return write(self, metadata)

    _writer._write = late


@_defect
def writer_ignores_that_it_was_recovered() -> None:
    """Rule 16: fenced bookies are replaced, and the change is written over IN_RECOVERY."""
    add_failed, found = _writer._add_failed, _writer._metadata_found

    def failed(self: Any, bookie: str, code: int) -> Any:
        return add_failed(self, bookie, 22 if code == LedgerFenced.code else code)

    def reopened(self: Any, metadata: Any, version: int) -> Any:
        if self.state is WriterState.CHANGING and metadata.state is LedgerState.IN_RECOVERY:
            fields = {name: getattr(metadata, name) for name in metadata.__slots__}
            metadata = type(metadata)(**{**fields, "state": LedgerState.OPEN})
        return found(self, metadata, version)

    _writer._add_failed, _writer._metadata_found = failed, reopened


@_defect
def close_does_not_compare_the_end() -> None:
    """Rule 16: a writer takes any closed ledger for its own close."""
    judge = _writer._judge

    def lenient(self: Any, found: Any) -> Any:
        if found.closed:
            self.state = WriterState.SEALING
            found = found.__class__(
                **{
                    **{name: getattr(found, name) for name in found.__slots__},
                    "last_entry": self.last_add_confirmed,
                    "length": self.confirmed_length,
                }
            )
        return judge(self, found)

    _writer._judge = lenient


@_defect
def hung_bookie_never_fails() -> None:
    """Rule 21: silence for longer than the add timeout is not a failure."""

    def ticked(self: Any) -> None:
        self._timer = None

    _Link._ticked = ticked  # type: ignore[method-assign]


# --- the bookie ----------------------------------------------------------------------------------------------------------


@_defect
def acks_before_the_sync() -> None:
    """Rule 4."""
    device: Any = InlineJournalDevice
    begin = device.__init__

    def unsynced(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **{**options, "sync_data": False})

    device.__init__ = unsynced


@_defect
def fence_is_not_durable() -> None:
    """BP-46: a fence is in memory only, and gone after a restart."""

    async def fence(self: Any, ledger_id: int) -> None:
        state = self._ledgers.load(ledger_id)
        state.fenced = state.known = True
        self._ledgers.wake(ledger_id)

    _fencing.fence = fence


@_defect
def normal_adds_pass_the_fence() -> None:
    """Rule 7."""
    admit = _adds._admit
    _adds._admit = lambda self, entry, recovery, *rest: admit(self, entry, True, *rest)


@_defect
def recovery_adds_do_not_pass_the_fence() -> None:
    """Rule 7, the other way around."""
    admit = _adds._admit
    _adds._admit = lambda self, entry, recovery, *rest: admit(self, entry, False, *rest)


@_defect
def explicit_lac_is_not_durable() -> None:
    """Rule 19: what an idle writer told is in memory only."""

    async def tell(self: Any, ledger_id: int, last_add_confirmed: int) -> None:
        state = self._ledgers.load(ledger_id)
        if state.fenced:
            raise LedgerFenced("fenced")
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        self._ledgers.wake(ledger_id)

    _fencing.write_last_confirmed = tell


@_defect
def damage_is_answered_as_absence() -> None:
    """BookKeeper #2908: a damaged log becomes "no such entry"."""
    reads: Any = Reads
    read = reads.read

    async def denying(self: Any, ledger_id: int, first: int, last: int, max_bytes: int) -> Any:
        try:
            return await read(self, ledger_id, first, last, max_bytes)
        except (LedgerFenced, UnknownLedgerState):
            raise
        except MagnetarError:
            raise EntryNotFound(f"no entry {first}") from None

    reads.read = denying


@_defect
def mark_before_the_flush() -> None:
    """BookKeeper #659, rule 2: the mark moves, and journals go, before what they hold is in entry logs."""
    work = _checkpointer._work

    async def early(self: Any, todo: _Work) -> Any:
        if todo.mark is None:
            return await work(self, todo)
        moved = await self.move_mark(todo.mark)
        await work(self, todo._replace(mark=None))
        return moved

    _checkpointer._work = early


@_defect
def mark_is_taken_after_the_flush() -> None:
    """Rule 2: the mark is ahead by what was added during the flush."""

    async def run(self: Any, take_mark: Any) -> Any:
        await self._work(_Work(None, self._cache.swap(), self._take_ledgers()))
        return await self.move_mark(take_mark()) if take_mark is not None else None

    _checkpointer._run = run


@_defect
def entry_logs_are_not_synced() -> None:
    """Rule 2: the mark moves when the entry logs are written."""

    async def sync(self: Any) -> list[int]:
        self._appended_to = {}
        return []

    EntryLogs.sync = sync  # type: ignore[method-assign]


@_defect
def garbage_collection_takes_silence_for_deletion() -> None:
    """Rule 10: ledgers that the metadata service did not list are deleted."""
    missing = MetadataLedgers.missing

    async def eager(self: Any, ledger_ids: Any) -> list[int]:
        try:
            return await missing(self, ledger_ids)
        except MagnetarError:
            return list(ledger_ids)

    MetadataLedgers.missing = eager  # type: ignore[method-assign]
