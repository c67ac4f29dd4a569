"""Defects of the writer."""

from __future__ import annotations

from typing import Any

from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.core.writer import WriterCore, WriterState
from magnetar.proto.errors import ConnectionLost, LedgerFenced
from sim.defects.registry import defect

_writer: Any = WriterCore


@defect
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


@defect
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


@defect
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


@defect
def change_starts_behind_what_is_pending() -> None:
    """Rule 17: the new ensemble starts at the next entry, not at LAC+1."""
    write = _writer._write

    def delayed(self: Any, metadata: Any) -> Any:
        if self.state is WriterState.CHANGING:
            metadata = self.metadata.with_ensemble(self.last_add_pushed + 1, self._changing_to)
        return write(self, metadata)

    _writer._write = delayed


@defect
def writer_ignores_that_it_was_recovered() -> None:
    """Rule 16: fenced bookies are replaced, and the change is written over IN_RECOVERY."""
    add_failed, found = _writer._add_failed, _writer._metadata_found

    def failed(self: Any, bookie: str, entry_id: int, code: int) -> Any:
        return add_failed(self, bookie, entry_id, ConnectionLost.code if code == LedgerFenced.code else code)

    def reopened(self: Any, metadata: Any, version: int) -> Any:
        if self.state is WriterState.CHANGING and metadata.state is LedgerState.IN_RECOVERY:
            fields = {name: getattr(metadata, name) for name in metadata.__slots__}
            metadata = type(metadata)(**{**fields, "state": LedgerState.OPEN})
        return found(self, metadata, version)

    _writer._add_failed, _writer._metadata_found = failed, reopened


@defect
def close_does_not_compare_the_end() -> None:
    """Rule 16: a writer takes any closed ledger for its own close."""
    judge = _writer._compare_with_close

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

    _writer._compare_with_close = lenient


@defect
def quorum_confirms_what_came_before() -> None:
    """Rule 17: an entry that has its quorum confirms those before it, as if acks came in order."""
    stored = _writer.stored

    def confirmed(self: Any, bookie: str, entry_id: int) -> Any:
        index = entry_id - self.last_add_confirmed - 1
        result = stored(self, bookie, entry_id)
        if 0 < index < len(self.pending) and self.sending:
            add = self.pending[index]
            if add.acked.bit_count() >= self.ack_quorum:
                for earlier in list(self.pending)[:index]:
                    earlier.acked = add.acked | earlier.acked
                return self._take_confirmed()
        return result

    _writer.stored = confirmed
