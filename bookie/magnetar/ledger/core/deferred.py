"""The writer of a ledger with deferred sync (BookKeeper's BP-14): appends are answered before anything is durable.

    appended ──Qa bookies accepted it──> ACCEPTED (answered) ──Qa bookies have it durably──> CONFIRMED (last_add_confirmed)

Each bookie answers an add twice: when the entry is in its cache and journal, and when it is durable. The second answer is
the one that a writer of an ordinary ledger waits for, and does here all that it does there; so order, quorums of every write
set, ensemble changes from LAC+1 on, close and recovery are decided by a `WriterCore`, and only `stored` moves its
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

from magnetar.proto.ledger_entry import NO_ENTRY, decode_ledger_entry_header

from .events import (
    Accepted,
    CloseRequested,
    Confirm,
    Event,
    ForceAdds,
    ForceRequested,
    IdleTick,
    Instruction,
    PendingAdd,
    RetryDue,
    WriteExplicitLac,
)
from .metadata import Bookies
from .writer import WriterCore

_NOTHING: tuple[PendingAdd, ...] = ()


class DeferredSync:
    """Sans-I/O, in front of the `writer`: takes its events and answers. The shell calls `take` after each `stored`."""

    __slots__ = (
        "_positions",
        "accepted_bytes",
        "dropped",
        "force_target",
        "last_add_accepted",
        "max_unforced_bytes",
        "writer",
    )

    def __init__(self, writer: WriterCore, max_unforced_bytes: int) -> None:
        self.writer = writer
        self.max_unforced_bytes = max_unforced_bytes
        self.last_add_accepted = NO_ENTRY  # last entry whose owner was answered
        self.accepted_bytes = 0  # of the entries last_add_confirmed+1 .. last_add_accepted
        self.force_target = NO_ENTRY  # the last entry that a force waits for
        self.dropped = 0  # entries that were answered and then lost by a failure, as far as this writer knows
        # Pending entry -> bits: positions of its write set that took it, not durably.
        self._positions: dict[int, int] = {}

    # --- for every entry ----------------------------------------------------------------------------------------------

    def accepted(self, bookie: str, entry_id: int) -> Sequence[PendingAdd]:
        """A bookie has taken the entry, not durably. Returns the adds to be answered, up to `last_add_accepted`."""
        writer = self.writer
        if not writer.last_add_confirmed < entry_id <= writer.last_add_pushed:
            return _NOTHING
        self._positions[entry_id] = self._positions.get(entry_id, 0) | writer.bit_of(bookie, entry_id)
        return self.take() if entry_id == self.last_add_accepted + 1 else _NOTHING

    def stored(self, bookie: str, entry_id: int) -> Sequence[PendingAdd]:
        """See WriterCore. What is durable was accepted, whether the bookie said so or not."""
        confirmed = self.writer.stored(bookie, entry_id)
        if confirmed:
            self._confirmed(confirmed)
        return confirmed

    def take(self) -> Sequence[PendingAdd]:
        """Adds that can be answered now, in order. They are not answered again when they are confirmed."""
        writer, entry_id = self.writer, self.last_add_accepted
        if not writer.sending or entry_id == writer.last_add_pushed:
            return _NOTHING
        pending, first, quorum = writer.pending, writer.last_add_confirmed + 1, writer.ack_quorum
        answered: list[PendingAdd] = []
        size = self.accepted_bytes
        while entry_id < writer.last_add_pushed and size < self.max_unforced_bytes:
            add = pending[entry_id + 1 - first]
            if (add.acked | self._positions.get(entry_id + 1, 0)).bit_count() < quorum:
                break
            answered.append(add)
            size += len(add.entry)
            entry_id += 1
        self.last_add_accepted, self.accepted_bytes = entry_id, size
        return answered

    def _confirmed(self, adds: Sequence[PendingAdd]) -> None:
        last = self.writer.last_add_confirmed
        for entry_id, add in enumerate(adds, last + 1 - len(adds)):
            self._positions.pop(entry_id, None)
            if entry_id <= self.last_add_accepted:
                self.accepted_bytes -= len(add.entry)
        self.last_add_accepted = max(self.last_add_accepted, last)

    # --- everything else ---------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Takes every event of a writer, and ForceRequested."""
        writer = self.writer
        if isinstance(event, ForceRequested):
            self.force_target = writer.last_add_pushed
            return self._force()
        if isinstance(event, IdleTick):
            bookies = writer.metadata.last_ensemble.bookies
            return [WriteExplicitLac(bookies, writer.last_add_confirmed)] if self.idle_last_confirmed else []
        if isinstance(event, CloseRequested):
            self.force_target = writer.last_add_pushed
        was_sending, before = writer.sending, writer.metadata.last_ensemble.bookies
        instructions = writer.handle(event)
        self._follow(before, instructions)
        if writer.sending and not was_sending:
            first = self.last_add_accepted + 1
            if answered := self.take():
                instructions.append(Accepted(first, answered))
            instructions += self._force()
        elif isinstance(event, RetryDue) and instructions and writer.sending:
            # So that something is confirmed while a bookie is busy.
            self.force_target = writer.last_add_pushed
            instructions += self._force()
        elif isinstance(event, CloseRequested):
            instructions += self._force()
        return instructions

    @property
    def wants_force(self) -> bool:
        """Whether 50% of `max_unforced_bytes` wait here and no force is under way."""
        return (
            2 * self.accepted_bytes >= self.max_unforced_bytes
            and self.force_target <= self.writer.last_add_confirmed
            and self.writer.error is None
        )

    @property
    def idle_last_confirmed(self) -> bool:
        """Whether the explicit LAC is due: as soon as no entry carries the LAC, since later entries may wait for a force."""
        writer, carried = self.writer, NO_ENTRY
        if writer.pending:
            carried = decode_ledger_entry_header(writer.pending[-1].entry).last_add_confirmed
        return writer.sending and writer.last_add_confirmed > max(writer.explicit_lac, carried)

    def _force(self) -> list[Instruction]:
        """During an ensemble change it waits until adds are sent again."""
        writer = self.writer
        if not writer.sending or self.force_target <= writer.last_add_confirmed:
            return []
        return [ForceAdds(writer.metadata.last_ensemble.bookies)]

    def _follow(self, before: Bookies, instructions: Sequence[Instruction]) -> None:
        """What the writer has done: confirmed adds, replaced bookies of `before`, or given up."""
        writer = self.writer
        for instruction in instructions:
            if isinstance(instruction, Confirm) and instruction.error is None:
                self._confirmed(instruction.adds)
        bookies = writer.metadata.last_ensemble.bookies
        if bookies != before:
            pairs = enumerate(zip(bookies, before, strict=True))
            unchanged = ~sum(1 << position for position, (bookie, old) in pairs if bookie != old)
            self._positions = {entry_id: bits & unchanged for entry_id, bits in self._positions.items()}
        if writer.error is not None:
            self.dropped += self.last_add_accepted - writer.last_add_confirmed
            self.last_add_accepted = writer.last_add_confirmed
            self.accepted_bytes = 0
            self._positions.clear()

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        writer = self.writer
        writer.check()
        first = writer.last_add_confirmed + 1
        answered = self.last_add_accepted + 1 - first
        assert first - 1 <= self.last_add_accepted <= writer.last_add_pushed
        assert self.accepted_bytes == sum(len(add.entry) for add in list(writer.pending)[:answered])
        assert all(first <= entry_id <= writer.last_add_pushed for entry_id in self._positions)
        for entry_id, bits in self._positions.items():
            mask = writer.metadata.striping.mask(entry_id)
            assert bits & ~mask == 0, "accepted outside its write set"
