"""Defects of recoveries, and of how a ledger's end is found."""

from __future__ import annotations

import dataclasses
from typing import Any

from magnetar.ledger.components import LedgerComponents
from magnetar.ledger.core.events import EntryRead, MetadataFound, MetadataWritten, ReadEntry
from magnetar.ledger.core.last_confirmed import LastConfirmedQuorum
from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
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

    def believing(self: Any, event: EntryRead) -> Any:
        code = EntryNotFound.code if event.code else 0
        return entry_read(self, EntryRead(event.bookie, event.entry_id, event.entry, event.length, code))

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
    ask, entry_read = _recovery._ask, _recovery._entry_read

    def asked(self: Any, entry_id: int, found: Any, positions: Any) -> Any:
        changed = self._changed.last_ensemble.bookies
        instructions = ask(self, entry_id, found, positions)
        return [ReadEntry(changed[self._reading.index(i.bookie)], i.entry_id) for i in instructions]

    def counted(self: Any, event: EntryRead) -> Any:
        changed = self._changed.last_ensemble.bookies
        if event.bookie in changed and event.bookie not in self._reading:
            event = dataclasses.replace(event, bookie=self._reading[changed.index(event.bookie)])
        return entry_read(self, event)

    _recovery._ask, _recovery._entry_read = asked, counted


@defect
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


@defect
def closing_overwrites_a_conflict() -> None:
    """Rule 16: whoever loses a compare-and-set writes once more, with the version that it found."""
    write = LedgerComponents.write_metadata

    async def stubborn(self: Any, ledger_id: int, metadata: Any, version: int) -> Any:
        event = await write(self, ledger_id, metadata, version)
        if isinstance(event, MetadataFound) and metadata.closed:
            new = await self.ledgers.put(ledger_id, metadata.encode(), version=event.version)
            return MetadataWritten(new)
        return event

    LedgerComponents.write_metadata = stubborn  # type: ignore[method-assign]


@defect
def fencing_waits_for_every_bookie() -> None:
    """BookKeeper #1067: one that hangs keeps a ledger from being fenced and recovered."""

    def covered(self: Any) -> bool:
        return bool(self._known.bit_count() == len(self._bookies))

    LastConfirmedQuorum.covered = property(covered)  # type: ignore[assignment, method-assign]
