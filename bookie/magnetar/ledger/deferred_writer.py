"""DeferredLedgerWriter: the shell of a writer whose appends are answered before they are durable; see `core.deferred`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import EntriesNotForced, MagnetarError
from magnetar.proto.ledger_entry import NO_ENTRY

from .components import LedgerComponents
from .core.deferred import DeferredWriterCore
from .core.events import AddFailed, ForceRequested
from .core.metadata import LedgerMetadata
from .core.pending import PendingAdd
from .core.writer import WriterState
from .writer import ConfirmCallback, LedgerWriter


class DeferredLedgerWriter(LedgerWriter):
    """The LedgerWriter of `create(deferred_sync=True)`: its `confirmed` callbacks only say that an entry was accepted.

    `last_add_confirmed`, readers and recoveries only count durable entries. `force` makes all entries durable; bookies sync
    by themselves after `journal_deferred_sync_s`. With `accepted` that is called instead, and `confirmed` when an entry is
    durable, as for any ledger.
    """

    _core: DeferredWriterCore

    def __init__(
        self,
        components: LedgerComponents,
        ledger_id: int,
        metadata: LedgerMetadata,
        version: int,
        forget: Callable[[LedgerWriter], None],
        *,
        explicit_lac: bool = True,
        accepted: Callable[[int], None] | None = None,
    ) -> None:
        """`accepted`: see `LedgerClient.create`."""
        super().__init__(components, ledger_id, metadata, version, forget, explicit_lac=explicit_lac)
        self._accepted = accepted

    def _make_core(self, metadata: LedgerMetadata, version: int) -> DeferredWriterCore:
        return DeferredWriterCore(
            self.ledger_id, metadata, version, self._components.settings.max_unforced_bytes
        )

    @property
    def last_add_accepted(self) -> int:
        """Last entry that was answered, in order; -1 for none. After a failure equal to last_add_confirmed."""
        return self._core.last_add_accepted

    @property
    def unforced_bytes(self) -> int:
        """Bytes of the entries that were answered and are not durable yet, headers included."""
        return self._core.accepted_bytes

    def append(self, payload: bytes, confirmed: ConfirmCallback) -> int:
        """As `LedgerWriter.append`, but `confirmed` is called when the ack quorum has accepted the entry.

        While max_unforced_bytes of such entries wait for a sync, later ones are answered once earlier ones are durable.
        """
        core = self._core
        if core.error is not None or core.close_requested:
            self._loop.call_soon(confirmed, NO_ENTRY, b"", core.refusal())
            return NO_ENTRY
        entry, bookies = core.append(payload, confirmed)
        entry_id = core.last_add_pushed
        for bookie in bookies:
            self._add(
                bookie, entry, self.ledger_id, entry_id, recovery=False, done=self._added, deferred=True
            )
        return entry_id

    async def close(self) -> LedgerMetadata:
        """Forces, then closes as `LedgerWriter.close` does.

        Raises EntriesNotForced if a failure lost entries that had been answered. The ledger is closed then, too, and its
        metadata have its last entry.
        """
        return await super().close()

    def _request_force(self) -> None:
        self._run(self._core.handle(ForceRequested()))

    def _on_added(self, bookie: str, _ledger_id: int, entry_id: int, code: int) -> None:
        core = self._core
        if code == ADD_ACCEPTED:
            if answered := core.accepted(bookie, entry_id):
                self._answer(answered)
            return
        if code:
            self._components.health.failed(bookie, code)
            self._run(core.handle(AddFailed(bookie, entry_id, code)))
            return
        confirmed = core.stored(bookie, entry_id)
        if confirmed:
            self._confirm(core.last_add_confirmed + 1 - len(confirmed), confirmed, None)
        if answered := core.take_accepted():
            self._answer(answered)
        elif confirmed and core.wants_force:
            self._request_force()
        if confirmed and core.state is WriterState.DRAINING:
            self._run(core.drained())

    def _answer(self, adds: Sequence[PendingAdd]) -> None:
        """Calls each callback once: not again when the entry is confirmed, or fails."""
        if self._accepted is not None:
            self._accepted(self._core.last_add_accepted)
            if self._core.wants_force:
                self._request_force()
            return
        entry_id = self._core.last_add_accepted - len(adds)
        for add in adds:
            entry_id += 1
            confirmed, add.context = add.context, _already_notified
            try:
                confirmed(entry_id, add.entry, None)
            except Exception as failure:
                self._loop.call_exception_handler(
                    {"message": f"a confirm callback of ledger {self.ledger_id} failed", "exception": failure}
                )
        if self._core.wants_force:
            self._request_force()

    def _ended(self, metadata: LedgerMetadata) -> None:
        core = self._core
        if core.dropped and self._accepted is None:  # else its owner has them
            self._stop_timer()
            self._forget(self)
            self._close_failed(
                EntriesNotForced(
                    f"ledger {self.ledger_id} is closed at entry {metadata.last_entry}; {core.dropped} entries behind it "
                    f"were accepted and not forced when its writer failed: {core.error}",
                    ledger_id=self.ledger_id,
                    last_entry=metadata.last_entry,
                )
            )
        else:
            super()._ended(metadata)


def _already_notified(_entry_id: int, _entry: bytes, _error: MagnetarError | None) -> None:
    """The callback of an entry that was answered when it was accepted."""
