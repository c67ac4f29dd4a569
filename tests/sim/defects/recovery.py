"""Defects of recoveries, and of how a ledger's end is found."""

from __future__ import annotations

import dataclasses
from typing import Any

from magnetar.ledger.core.events import EntryRead, MetadataFound, MetadataWritten
from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.core.quorum import LastConfirmedQuorum, Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.ledger.records import LedgerRecords
from magnetar.ledger.recover import _Recovery
from magnetar.ledger.tcp_transport import TcpTransport
from magnetar.proto.errors import EntryNotFound
from magnetar.proto.ledger_entry import NO_ENTRY
from sim.defects.registry import defect

_recovery: Any = RecoveryCore


@defect
def recovery_does_not_fence() -> None:
    """BookKeeper #2614: what recovery reads does not fence the ledger."""
    transport: Any = TcpTransport
    read, read_last_confirmed = transport.read, transport.read_last_confirmed

    async def unfenced_read(self: Any, *arguments: Any, fence: bool = False, **more: Any) -> Any:
        return await read(self, *arguments, **more)

    async def unfenced_lac(self: Any, bookie: str, ledger_id: int, *, fence: bool = False) -> Any:
        return await read_last_confirmed(self, bookie, ledger_id)

    transport.read, transport.read_last_confirmed = unfenced_read, unfenced_lac


@defect
def recovery_ignores_the_last_ensemble() -> None:
    """Rule 15: recovery starts behind the LAC although the last ensemble begins later."""

    def from_last_confirmed(self: Any, last_add_confirmed: int) -> Any:
        self._base = last_add_confirmed
        self._first = self._next_read = self._next_add = self._base + 1
        if self._base == NO_ENTRY:
            return self._read_on()
        self.state = RecoveryState.BASE
        bookies = self.metadata.ensemble_of(self._base).bookies
        self._base_replicas = [bookies[position] for position in self.striping.write_set(self._base)]
        return self._ask_base()

    _recovery._read_base = from_last_confirmed


@defect
def recovery_starts_one_late() -> None:
    """Rule 15: the entry after the LAC is taken for confirmed as well: it is read, and not added again."""
    send = _recovery._send

    def delayed(self: Any, entry_id: int, entry: bytes) -> Any:
        if entry_id != self._base + 1:
            return send(self, entry_id, entry)
        self._entries[entry_id].acked = self.striping.mask(entry_id)
        return []

    _recovery._send = delayed


@defect
def one_negative_proves_absence() -> None:
    """Rule 14: one bookie without the entry is enough to end the ledger before it."""
    Striping.negatives_for_absence = 1  # type: ignore[method-assign, assignment]


@defect
def errors_prove_absence() -> None:
    """Rule 14: what a bookie could not answer counts as "no such entry"."""
    entry_read = _recovery._entry_read

    def believing(self: Any, bookie: str, answer: EntryRead) -> Any:
        code = EntryNotFound.code if answer.code else 0
        return entry_read(self, bookie, dataclasses.replace(answer, code=code))

    _recovery._entry_read = believing


@defect
def lac_read_without_coverage() -> None:
    """Rule 13: the first answer is enough to know the LAC, and to have fenced."""

    def covered(self: Any) -> bool:
        return bool(self._known)

    LastConfirmedQuorum.covered = property(covered)  # type: ignore[assignment, method-assign]


@defect
def re_adds_are_not_waited_for() -> None:
    """Rule 15: the ledger is closed when the re-adds were sent."""
    send = _recovery._send

    def sent(self: Any, entry_id: int, entry: bytes) -> Any:
        self._entries[entry_id].acked = self.striping.mask(entry_id)
        return send(self, entry_id, entry)

    _recovery._send = sent


@defect
def recovery_reads_the_changed_ensemble() -> None:
    """Rule 15: bookies that recovery itself has put in are asked as well, and what they say counts."""
    read, entry_read = _recovery._read, _recovery._entry_read

    def asked(self: Any, wanted: dict[str, list[int]]) -> Any:
        changed = self._changed.last_ensemble.bookies
        if self.state is not RecoveryState.ENTRIES:
            return read(self, wanted)
        return read(self, {changed[self._reading.index(name)]: ids for name, ids in wanted.items()})

    def counted(self: Any, bookie: str, answer: EntryRead) -> Any:
        changed = self._changed.last_ensemble.bookies
        if bookie in changed and bookie not in self._reading:
            bookie = self._reading[changed.index(bookie)]
        return entry_read(self, bookie, answer)

    _recovery._read, _recovery._entry_read = asked, counted


@defect
def recovery_writes_metadata_early() -> None:
    """Rule 15: an ensemble change is in the metadata before the entries are on its bookies."""
    carry_out = _Recovery._carry_out

    async def write(self: Any, changed: Any) -> None:
        core = self._core
        event = await self._components.records.write(self._ledger_id, changed, core.version)
        if isinstance(event, MetadataWritten) and core.metadata.state is LedgerState.IN_RECOVERY:
            core.metadata, core.version = changed, event.version

    def early(self: Any, instructions: Any) -> None:
        before = self._core._changed.ensembles
        carry_out(self, instructions)
        changed = self._core._changed
        if changed.ensembles != before and changed.state is LedgerState.IN_RECOVERY:
            self._start(write(self, changed))

    _Recovery._carry_out = early  # type: ignore[method-assign]


@defect
def closing_overwrites_a_conflict() -> None:
    """Rule 16: whoever loses a compare-and-set writes once more, with the version that it found."""
    write = LedgerRecords.write

    async def stubborn(self: Any, ledger_id: int, metadata: Any, version: int) -> Any:
        event = await write(self, ledger_id, metadata, version)
        if isinstance(event, MetadataFound) and metadata.closed:
            new = await self.ledgers.put(ledger_id, metadata.encode(), version=event.version)
            return MetadataWritten(new)
        return event

    LedgerRecords.write = stubborn  # type: ignore[method-assign]


@defect
def fencing_waits_for_every_bookie() -> None:
    """BookKeeper #1067: one that hangs keeps a ledger from being fenced and recovered."""

    def covered(self: Any) -> bool:
        return bool(self._known.bit_count() == len(self._bookies))

    LastConfirmedQuorum.covered = property(covered)  # type: ignore[assignment, method-assign]
