"""The writer of a ledger with deferred sync (BookKeeper's BP-14): appends are answered before anything is durable.

    appended ──Qa bookies accepted it──> ACCEPTED (answered) ──Qa bookies have it durably──> CONFIRMED (last_add_confirmed)

Each bookie answers an add twice: when the entry is in its cache and journal, and when it is durable. The second answer is
the one that a writer of an ordinary ledger waits for, and does here all that it does there; so order, quorums of every write
set, ensemble changes from LAC+1 on, close and recovery are those of `WriterCore`, and only `stored` moves
`last_add_confirmed`. The first answer moves `last_add_accepted`, which only the writer's owner learns: no header has it.

    last_add_confirmed <= last_add_accepted <= last_add_pushed

* **Force** asks the ensemble to sync; it is done when `last_add_confirmed` has reached what was the last append. A bookie
  that lost its memory meanwhile does not know that it owes an answer, and no answer of its next life counts: its
  connection was lost, so its adds fail, it is replaced, and the replacement gets every entry from LAC+1 on.
* **What is sent again** is sent to be synced, not deferred: replacements, what was held during a change, what was refused.
* **Memory**: entries stay here until they are durable. At 50% of `max_unforced_bytes` the writer forces by itself (the
  shell looks at `wants_force`); at all of it no more is answered until some of it is durable, so that the owner's own
  bound on what is unanswered holds the rest.
* A close forces. A failure drops what was not confirmed; `dropped` counts entries among these that had been answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magnetar.proto.errors import MagnetarError
from magnetar.proto.ledger_entry import NO_ENTRY, encode_ledger_entry

from .events import Accepted, Event, ForceAdds, ForceRequested, Instruction
from .metadata import Bookies, LedgerMetadata
from .pending import PendingAdd
from .writer import WriterCore

_NOTHING: tuple[PendingAdd, ...] = ()


class DeferredAdd(PendingAdd):
    """An entry that is answered before it is durable."""

    __slots__ = ("accepted",)

    def __init__(self, entry: bytes, length: int, context: Any) -> None:
        self.entry = entry
        self.length = length
        self.context = context
        self.acked = 0
        self.accepted = 0  # bits: positions that took it, durably or not; all of `acked` among them


class DeferredWriterCore(WriterCore):
    """Sans-I/O. `accepted` is a third hot method; the shell calls `take_accepted` after each `stored`."""

    __slots__ = (
        "_piggybacked",
        "accepted_bytes",
        "dropped",
        "force_target",
        "last_add_accepted",
        "max_unforced_bytes",
    )

    def __init__(
        self, ledger_id: int, metadata: LedgerMetadata, version: int, max_unforced_bytes: int
    ) -> None:
        super().__init__(ledger_id, metadata, version)
        self.max_unforced_bytes = max_unforced_bytes
        self.last_add_accepted = NO_ENTRY  # last entry whose owner was answered
        self.accepted_bytes = 0  # of the entries last_add_confirmed+1 .. last_add_accepted
        self.force_target = NO_ENTRY  # the last entry that a force waits for
        self.dropped = 0  # entries that were answered and then lost by a failure, as far as this writer knows
        self._piggybacked = NO_ENTRY  # LAC in the header of the last entry

    # --- hot ---------------------------------------------------------------------------------------------------------

    def append(self, payload: bytes, context: Any) -> tuple[bytes, Bookies]:
        """See WriterCore; the bookies get it as a deferred add."""
        entry_id = self.last_add_pushed + 1
        self.length = length = self.length + len(payload)
        self._piggybacked = confirmed = self.last_add_confirmed
        entry = encode_ledger_entry(self.ledger_id, entry_id, confirmed, length, payload)
        self.pending.append(DeferredAdd(entry, length, context))
        self.last_add_pushed = entry_id
        self.outstanding_bytes += len(entry)
        if self.sending:
            return entry, self._targets[entry_id % self._size]
        return entry, ()

    def accepted(self, bookie: str, entry_id: int) -> Sequence[PendingAdd]:
        """A bookie has taken the entry, not durably. Returns the adds to be answered, up to `last_add_accepted`."""
        index = entry_id - self.last_add_confirmed - 1
        pending = self.pending
        if index < 0 or index >= len(pending):
            return _NOTHING
        add: Any = pending[index]
        add.accepted |= self._bits.get(bookie, 0) & self._masks[entry_id % self._size]
        if entry_id != self.last_add_accepted + 1 or add.accepted.bit_count() < self.ack_quorum:
            return _NOTHING
        return self.take_accepted()

    def stored(self, bookie: str, entry_id: int) -> list[PendingAdd] | tuple[PendingAdd, ...]:
        """See WriterCore. What is durable was accepted, whether the bookie said so or not."""
        index = entry_id - self.last_add_confirmed - 1
        if 0 <= index < len(self.pending):
            add: Any = self.pending[index]
            add.accepted |= self._bits.get(bookie, 0) & self._masks[entry_id % self._size]
        return super().stored(bookie, entry_id)

    def take_accepted(self) -> Sequence[PendingAdd]:
        """Adds that can be answered now, in order. They are not answered again when they are confirmed."""
        entry_id = self.last_add_accepted
        if not self.sending or entry_id == self.last_add_pushed:
            return _NOTHING
        pending, first, quorum = self.pending, self.last_add_confirmed + 1, self.ack_quorum
        answered: list[PendingAdd] = []
        size = self.accepted_bytes
        while entry_id < self.last_add_pushed and size < self.max_unforced_bytes:
            add: Any = pending[entry_id + 1 - first]
            if add.accepted.bit_count() < quorum:
                break
            answered.append(add)
            size += len(add.entry)
            entry_id += 1
        self.last_add_accepted, self.accepted_bytes = entry_id, size
        return answered

    def _take_confirmed(self) -> list[PendingAdd]:
        answered = self.last_add_accepted - self.last_add_confirmed
        confirmed = super()._take_confirmed()
        self.accepted_bytes -= sum(len(add.entry) for add in confirmed[:answered])
        self.last_add_accepted = max(self.last_add_accepted, self.last_add_confirmed)
        return confirmed

    # --- everything else ---------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        if isinstance(event, ForceRequested):
            self.force_target = self.last_add_pushed
            return self._force()
        return super().handle(event)

    @property
    def wants_force(self) -> bool:
        """Whether 50% of `max_unforced_bytes` wait here and no force is under way."""
        return (
            2 * self.accepted_bytes >= self.max_unforced_bytes
            and self.force_target <= self.last_add_confirmed
            and self.error is None
        )

    @property
    def idle_last_confirmed(self) -> bool:
        """Whether the explicit LAC is due: as soon as no entry carries the LAC, since later entries may wait for a force."""
        return self.sending and self.last_add_confirmed > max(self._explicit_lac, self._piggybacked)

    def _force(self) -> list[Instruction]:
        """During an ensemble change it waits until adds are sent again."""
        if not self.sending or self.force_target <= self.last_add_confirmed:
            return []
        return [ForceAdds(tuple(self._bits))]

    def _close(self) -> list[Instruction]:
        self.force_target = self.last_add_pushed
        return super()._close() + self._force()

    def _retry(self, expired: bool) -> list[Instruction]:
        instructions = super()._retry(expired)
        if instructions and self.sending:  # so that something is confirmed while a bookie is busy
            self.force_target = self.last_add_pushed
            instructions += self._force()
        return instructions

    def _ensemble_changed(self) -> list[Instruction]:
        assert self._changing_to is not None
        bits = enumerate(self._changing_to)
        unchanged = ~sum(
            1 << position for position, bookie in bits if self._bits.get(bookie) != 1 << position
        )
        add: Any
        for add in self.pending:
            add.accepted &= unchanged
        return super()._ensemble_changed()

    def _go_on(self) -> list[Instruction]:
        instructions = super()._go_on()
        first = self.last_add_accepted + 1
        if answered := self.take_accepted():
            instructions.append(Accepted(first, answered))
        return instructions + self._force()

    def _give_up(self, error: MagnetarError) -> None:
        super()._give_up(error)
        self.dropped += self.last_add_accepted - self.last_add_confirmed
        self.last_add_accepted = self.last_add_confirmed
        self.accepted_bytes = 0

    def check(self) -> None:
        super().check()
        first, answered = self.last_add_confirmed + 1, self.last_add_accepted - self.last_add_confirmed
        assert self.last_add_confirmed <= self.last_add_accepted <= self.last_add_pushed
        assert self.accepted_bytes == sum(len(add.entry) for add in list(self.pending)[:answered])
        assert self._piggybacked <= self.last_add_confirmed
        for entry_id, add in enumerate(self.pending, first):
            assert isinstance(add, DeferredAdd)
            assert add.accepted & ~self._masks[entry_id % self._size] == 0, "accepted outside its write set"
            assert add.acked & ~add.accepted == 0, "durable, and not accepted"
