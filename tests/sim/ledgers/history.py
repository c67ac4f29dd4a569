"""What the clients of simulated ledgers saw, and the rules that it must obey (CORRECTNESS.md, "Invariants").

The history sees everything at the moment it happens, whichever process it happens in; so what no client could notice (a
last-add-confirmed that is ahead of the writer's, an acknowledgement behind the end that a successor has set) is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from magnetar.ledger import LedgerMetadata
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header
from sim.deliveries import Violation

NONE = -1


@dataclass
class LedgerHistory:
    """One ledger."""

    ledger_id: int
    ack_quorum: int
    sent: list[bytes] = field(default_factory=list)  # payloads by entry id
    entries: dict[int, bytes] = field(default_factory=dict)  # as first seen, header included
    confirmed: int = NONE  # last entry that was acknowledged to the writer's owner
    seen: int = NONE  # last entry that a reader saw as confirmed
    closed: tuple[int, int] | None = None  # last entry, length
    closed_by: str = ""
    floor: int = (
        NONE  # last-add-confirmed in a confirmed entry: a client that asks enough bookies must learn it
    )
    closes: int = 0  # how many clients saw the ledger closed
    deleting: bool = False  # from now on it may be deleted


class History:
    """All ledgers. Methods raise Violation at once."""

    def __init__(self) -> None:
        self.ledgers: dict[int, LedgerHistory] = {}
        self.refused = 0  # appends that failed
        self.reads = 0
        self.recoveries = 0
        self.deleted = 0
        # Looks whether an acknowledged entry is where the metadata says.
        self.check_stored: Callable[[LedgerHistory, int], None] = lambda ledger, entry_id: None
        # Whether a bookie of the ledger has lost what it knew.
        self.excused: Callable[[LedgerHistory], bool] = lambda ledger: False
        self._reader_lac: dict[tuple[str, int], int] = {}  # (reader, ledger) -> highest LAC

    def created(self, ledger_id: int, ack_quorum: int) -> LedgerHistory:
        """A writer has it."""
        if ledger_id in self.ledgers:
            raise Violation(f"ledger {ledger_id} was created twice")
        ledger = self.ledgers[ledger_id] = LedgerHistory(ledger_id, ack_quorum)
        return ledger

    def sent(self, ledger: LedgerHistory, entry_id: int, payload: bytes) -> None:
        """An append has returned."""
        if entry_id != len(ledger.sent):
            raise Violation(
                f"ledger {ledger.ledger_id}: append gave entry id {entry_id}, {len(ledger.sent)} was next"
            )
        ledger.sent.append(payload)

    def acknowledged(self, ledger: LedgerHistory, entry_id: int, entry: bytes) -> None:
        """An entry was acknowledged to the writer's owner: in order, and never behind the end."""
        if entry_id != ledger.confirmed + 1:
            raise Violation(
                f"ledger {ledger.ledger_id}: entry {entry_id} was acknowledged after {ledger.confirmed}"
            )
        self._same_bytes(ledger, entry_id, entry, "the writer")
        ledger.confirmed = entry_id
        ledger.floor = max(ledger.floor, decode_ledger_entry_header(entry).last_add_confirmed)
        self.check_stored(ledger, entry_id)
        if ledger.closed is not None and entry_id > ledger.closed[0]:
            raise Violation(
                f"ledger {ledger.ledger_id}: entry {entry_id} was acknowledged to a stale writer; {ledger.closed_by} "
                f"closed the ledger at {ledger.closed[0]}"
            )

    def closed(self, ledger: LedgerHistory, metadata: LedgerMetadata, who: str) -> None:
        """A client saw the ledger closed: all must see the same end, and nothing confirmed may lie behind it."""
        end = (metadata.last_entry, metadata.length)
        ledger.closes += 1
        if ledger.closed is not None and ledger.closed != end:
            raise Violation(
                f"ledger {ledger.ledger_id} ends at {end} for {who}, at {ledger.closed} for {ledger.closed_by}"
            )
        ledger.closed, ledger.closed_by = end, ledger.closed_by or who
        if end[0] < max(ledger.confirmed, ledger.seen):
            raise Violation(
                f"ledger {ledger.ledger_id} was truncated: {who} closed it at {end[0]}, entry {ledger.confirmed} was "
                f"acknowledged and readers saw {ledger.seen}"
            )
        length = sum(len(payload) for payload in ledger.sent[: end[0] + 1])
        if end[0] >= len(ledger.sent) or end[1] != length:
            raise Violation(
                f"ledger {ledger.ledger_id} was closed by {who} as {end}; its {len(ledger.sent)} entries sent up to there "
                f"have {length} bytes"
            )

    def last_confirmed(self, ledger: LedgerHistory, last: int, who: str, *, bookie: bool = False) -> None:
        """A reader (or a bookie, in an answer) says how far the ledger is confirmed."""
        limit = ledger.confirmed if ledger.closed is None else max(ledger.closed[0], ledger.confirmed)
        if last > limit:
            raise Violation(
                f"ledger {ledger.ledger_id}: {who} says that entry {last} is confirmed; {limit} is"
            )
        if not bookie:
            if last < self._reader_lac.get((who, ledger.ledger_id), NONE):
                raise Violation(
                    f"ledger {ledger.ledger_id}: last-add-confirmed went back to {last} for {who}"
                )
            self._reader_lac[who, ledger.ledger_id] = last
            ledger.seen = max(ledger.seen, last)

    def asked_enough(self, ledger: LedgerHistory, floor: int, last: int, who: str) -> None:
        """Somebody asked the ensemble for the end when `floor` was known to Qa bookies of each write set (rule 13)."""
        if last < floor and not (ledger.deleting or self.excused(ledger)):
            raise Violation(
                f"ledger {ledger.ledger_id}: {who} learned that {last} is confirmed; a confirmed entry carried {floor}"
            )

    def read(self, ledger: LedgerHistory, entry_id: int, entry: bytes, who: str) -> None:
        """Somebody was given an entry: the same bytes as everybody else, what the writer sent."""
        self.reads += 1
        self._same_bytes(ledger, entry_id, entry, who)

    def _same_bytes(self, ledger: LedgerHistory, entry_id: int, entry: bytes, who: str) -> None:
        known = ledger.entries.get(entry_id)
        if known is not None:
            if known != entry:
                raise Violation(
                    f"ledger {ledger.ledger_id}: {who} has other bytes as entry {entry_id}: "
                    f"{decode_ledger_entry_header(entry)} and {decode_ledger_entry_header(known)}"
                )
            return
        header = decode_ledger_entry_header(entry)
        if (header.ledger_id, header.entry_id) != (ledger.ledger_id, entry_id):
            raise Violation(f"{who} was given {header} as entry {entry_id} of ledger {ledger.ledger_id}")
        if entry_id >= len(ledger.sent) or entry[LEDGER_ENTRY_HEADER_BYTES:] != ledger.sent[entry_id]:
            raise Violation(
                f"ledger {ledger.ledger_id}: {who} was given bytes that nobody sent as entry {entry_id}"
            )
        ledger.entries[entry_id] = entry

    def open_ledgers(self) -> list[LedgerHistory]:
        """Ledgers that no client saw closed, and that were not deleted."""
        return [ledger for ledger in self.ledgers.values() if ledger.closed is None and not ledger.deleting]

    def counts(self) -> dict[str, int]:
        """Load and results."""
        return {
            "ledgers": len(self.ledgers),
            "sent": sum(len(ledger.sent) for ledger in self.ledgers.values()),
            "acknowledged": sum(ledger.confirmed + 1 for ledger in self.ledgers.values()),
            "refused": self.refused,
            "reads": self.reads,
            "recoveries": self.recoveries,
            "raced": sum(ledger.closes > 1 for ledger in self.ledgers.values()),
            "deleted": self.deleted,
        }


def check_change(ledger: LedgerHistory, before: LedgerMetadata, after: LedgerMetadata, who: str) -> None:
    """What a compare-and-set may do with a ledger's metadata (rules 16 and 17)."""
    name = f"ledger {ledger.ledger_id}: {who}"
    if before.closed and before != after:
        raise Violation(f"{name} changed the metadata of a closed ledger from {before} to {after}")
    if after.state < before.state:
        raise Violation(f"{name} took its state back from {before.state.name} to {after.state.name}")
    if after.closed and after.last_entry < ledger.confirmed:
        raise Violation(f"{name} truncates it to {after.last_entry}; {ledger.confirmed} is confirmed")
    for ensemble in after.ensembles:
        if len(dict.fromkeys(ensemble.bookies)) != after.ensemble_size:
            raise Violation(f"{name} wrote the invalid ensemble {ensemble}")
    if after.ensembles[: len(before.ensembles) - 1] != before.ensembles[:-1]:
        raise Violation(f"{name} changed ensembles that are over: {before.ensembles} to {after.ensembles}")
