"""What the clients of simulated ledgers saw, and the rules that it must obey (CORRECTNESS.md, "Invariants").

The history sees everything at the moment it happens, whichever process it happens in; so what no client could notice (a
last-add-confirmed that is ahead of the writer's, an acknowledgement behind the end that a successor has set) is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from magnetar.ledger import LedgerMetadata
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, decode_ledger_entry_header
from sim.history import Violation

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
        self.check_stored: Callable[[LedgerHistory, int], None] = lambda story, entry_id: None
        # Whether a bookie of the ledger has lost what it knew.
        self.excused: Callable[[LedgerHistory], bool] = lambda story: False
        self._reader_lac: dict[tuple[str, int], int] = {}  # (reader, ledger) -> highest LAC

    def created(self, ledger_id: int, ack_quorum: int) -> LedgerHistory:
        """A writer has it."""
        if ledger_id in self.ledgers:
            raise Violation(f"ledger {ledger_id} was created twice")
        story = self.ledgers[ledger_id] = LedgerHistory(ledger_id, ack_quorum)
        return story

    def sent(self, story: LedgerHistory, entry_id: int, payload: bytes) -> None:
        """An append has returned."""
        if entry_id != len(story.sent):
            raise Violation(
                f"ledger {story.ledger_id}: append gave entry id {entry_id}, {len(story.sent)} was next"
            )
        story.sent.append(payload)

    def acknowledged(self, story: LedgerHistory, entry_id: int, entry: bytes) -> None:
        """An entry was acknowledged to the writer's owner: in order, and never behind the end."""
        if entry_id != story.confirmed + 1:
            raise Violation(
                f"ledger {story.ledger_id}: entry {entry_id} was acknowledged after {story.confirmed}"
            )
        self._same_bytes(story, entry_id, entry, "the writer")
        story.confirmed = entry_id
        story.floor = max(story.floor, decode_ledger_entry_header(entry).last_add_confirmed)
        self.check_stored(story, entry_id)
        if story.closed is not None and entry_id > story.closed[0]:
            raise Violation(
                f"ledger {story.ledger_id}: entry {entry_id} was acknowledged to a stale writer; {story.closed_by} "
                f"closed the ledger at {story.closed[0]}"
            )

    def closed(self, story: LedgerHistory, metadata: LedgerMetadata, who: str) -> None:
        """A client saw the ledger closed: all must see the same end, and nothing confirmed may lie behind it."""
        end = (metadata.last_entry, metadata.length)
        story.closes += 1
        if story.closed is not None and story.closed != end:
            raise Violation(
                f"ledger {story.ledger_id} ends at {end} for {who}, at {story.closed} for {story.closed_by}"
            )
        story.closed, story.closed_by = end, story.closed_by or who
        if end[0] < max(story.confirmed, story.seen):
            raise Violation(
                f"ledger {story.ledger_id} was truncated: {who} closed it at {end[0]}, entry {story.confirmed} was "
                f"acknowledged and readers saw {story.seen}"
            )
        length = sum(len(payload) for payload in story.sent[: end[0] + 1])
        if end[0] >= len(story.sent) or end[1] != length:
            raise Violation(
                f"ledger {story.ledger_id} was closed by {who} as {end}; its {len(story.sent)} entries sent up to there "
                f"have {length} bytes"
            )

    def last_confirmed(self, story: LedgerHistory, last: int, who: str, *, bookie: bool = False) -> None:
        """A reader (or a bookie, in an answer) says how far the ledger is confirmed."""
        limit = story.confirmed if story.closed is None else max(story.closed[0], story.confirmed)
        if last > limit:
            raise Violation(
                f"ledger {story.ledger_id}: {who} says that entry {last} is confirmed; {limit} is"
            )
        if not bookie:
            if last < self._reader_lac.get((who, story.ledger_id), NONE):
                raise Violation(f"ledger {story.ledger_id}: last-add-confirmed went back to {last} for {who}")
            self._reader_lac[who, story.ledger_id] = last
            story.seen = max(story.seen, last)

    def asked_enough(self, story: LedgerHistory, floor: int, last: int, who: str) -> None:
        """Somebody asked the ensemble for the end when `floor` was known to Qa bookies of each write set (rule 13)."""
        if last < floor and not (story.deleting or self.excused(story)):
            raise Violation(
                f"ledger {story.ledger_id}: {who} learned that {last} is confirmed; a confirmed entry carried {floor}"
            )

    def read(self, story: LedgerHistory, entry_id: int, entry: bytes, who: str) -> None:
        """Somebody was given an entry: the same bytes as everybody else, what the writer sent."""
        self.reads += 1
        self._same_bytes(story, entry_id, entry, who)

    def _same_bytes(self, story: LedgerHistory, entry_id: int, entry: bytes, who: str) -> None:
        known = story.entries.get(entry_id)
        if known is not None:
            if known != entry:
                raise Violation(
                    f"ledger {story.ledger_id}: {who} has other bytes as entry {entry_id}: "
                    f"{decode_ledger_entry_header(entry)} and {decode_ledger_entry_header(known)}"
                )
            return
        header = decode_ledger_entry_header(entry)
        if (header.ledger_id, header.entry_id) != (story.ledger_id, entry_id):
            raise Violation(f"{who} was given {header} as entry {entry_id} of ledger {story.ledger_id}")
        if entry_id >= len(story.sent) or entry[LEDGER_ENTRY_HEADER_BYTES:] != story.sent[entry_id]:
            raise Violation(
                f"ledger {story.ledger_id}: {who} was given bytes that nobody sent as entry {entry_id}"
            )
        story.entries[entry_id] = entry

    def open_ledgers(self) -> list[LedgerHistory]:
        """Ledgers that no client saw closed, and that were not deleted."""
        return [story for story in self.ledgers.values() if story.closed is None and not story.deleting]

    def counts(self) -> dict[str, int]:
        """Load and results."""
        return {
            "ledgers": len(self.ledgers),
            "sent": sum(len(story.sent) for story in self.ledgers.values()),
            "acknowledged": sum(story.confirmed + 1 for story in self.ledgers.values()),
            "refused": self.refused,
            "reads": self.reads,
            "recoveries": self.recoveries,
            "raced": sum(story.closes > 1 for story in self.ledgers.values()),
            "deleted": self.deleted,
        }


def check_change(story: LedgerHistory, before: LedgerMetadata, after: LedgerMetadata, who: str) -> None:
    """What a compare-and-set may do with a ledger's metadata (rules 16 and 17)."""
    name = f"ledger {story.ledger_id}: {who}"
    if before.closed and before != after:
        raise Violation(f"{name} changed the metadata of a closed ledger from {before} to {after}")
    if after.state < before.state:
        raise Violation(f"{name} took its state back from {before.state.name} to {after.state.name}")
    if after.closed and after.last_entry < story.confirmed:
        raise Violation(f"{name} truncates it to {after.last_entry}; {story.confirmed} is confirmed")
    for ensemble in after.ensembles:
        if len(dict.fromkeys(ensemble.bookies)) != after.ensemble_size:
            raise Violation(f"{name} wrote the invalid ensemble {ensemble}")
    if after.ensembles[: len(before.ensembles) - 1] != before.ensembles[:-1]:
        raise Violation(f"{name} changed ensembles that are over: {before.ensembles} to {after.ensembles}")
