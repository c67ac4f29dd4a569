"""What must hold in every state: CORRECTNESS.md, "Invariants", as far as they concern one ledger.

Each has a name, which a violation begins with. Those of a state as a whole are here; those of a step (what a client is told,
what is written over) are asserted where the step is made, in `reduced_world`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import LastConfirmedQuorum
from magnetar.proto.errors import BookieUnavailable

from .keys import lac_of
from .ledger_world import LEDGER

INVARIANTS = {
    "not lost": "Qa bookies of its write set, as the metadata have it, store a confirmed entry, and each of a closed ledger",
    "not truncated": "a closed ledger ends at or past every confirmed entry, also one confirmed later by a stale writer",
    "no divergence": "copies of an entry are equal wherever they are, and stay so",
    "one end": "who learns of a closed ledger learns its one end; last entry and length agree",
    "final": "closed metadata are never written again",
    "order": "entries are confirmed in order, each once",
    "last confirmed": "no copy, and no bookie, tells a last confirmed entry that was not confirmed",
    "coverage": "a reader that covers the ensemble never falls back behind what the confirmed entries tell",
    "nobody hangs": "a client that waits has something on its way",
    "the cores' own": "what `check` of each core asserts (not while looking for planted defects)",
}


def broken(name: str, text: str) -> str:
    """The text of a violation."""
    assert name in INVARIANTS, name
    return f"[{name}] {text}"


# A bookie's entries: (entry id, entry), in order.
Stored = tuple[tuple[int, bytes], ...]


def check_ledger(
    stored: Sequence[Stored], names: Sequence[str], metadata: LedgerMetadata, confirmed: int
) -> None:
    """What can be seen from what bookies store, the metadata, and the last entry that the application was told of."""
    if metadata.closed:
        assert metadata.last_entry >= confirmed, broken(
            "not truncated", f"closed at entry {metadata.last_entry}, entry {confirmed} was acknowledged"
        )
        # Each entry has one byte of payload.
        assert metadata.length == metadata.last_entry + 1, broken(
            "one end", f"last entry {metadata.last_entry}, length {metadata.length}"
        )
    by_name = dict(zip(names, stored))
    for entry_id in range(max(confirmed, metadata.last_entry) + 1):
        copies = copies_of(by_name, metadata, entry_id)
        assert len(copies) >= metadata.ack_quorum, broken(
            "not lost", f"entry {entry_id} is stored by {len(copies)} bookies of its write set"
        )
    first: dict[int, bytes] = {}
    for name, entries in by_name.items():
        for entry_id, entry in entries:
            assert first.setdefault(entry_id, entry) == entry, broken(
                "no divergence", f"entry {entry_id} at {name} differs from another copy"
            )
            assert lac_of(entry) <= confirmed, broken(
                "last confirmed", f"entry {entry_id} at {name} says that entry {lac_of(entry)} is confirmed"
            )
    if not metadata.closed:
        _check_coverage(by_name, metadata, confirmed)


def copies_of(stored: dict[str, Stored], metadata: LedgerMetadata, entry_id: int) -> list[bytes]:
    """At the write set that the metadata say."""
    ensemble = metadata.ensemble_of(entry_id).bookies
    write_set = metadata.striping.write_set(entry_id)
    return [entry for p in write_set for number, entry in stored[ensemble[p]] if number == entry_id]


def _check_coverage(stored: dict[str, Stored], metadata: LedgerMetadata, confirmed: int) -> None:
    """Rule 13, whoever of the last ensemble answers."""
    last = metadata.last_ensemble
    if confirmed < last.first_entry:
        return
    told = {name: max((lac_of(e) for _, e in stored[name]), default=-1) for name in last.bookies}
    floor = max(
        lac_of(copies_of(stored, metadata, entry_id)[0])
        for entry_id in range(last.first_entry, confirmed + 1)
    )
    for answers in product((True, False), repeat=len(last.bookies)):
        quorum = LastConfirmedQuorum(metadata.striping, last.bookies)
        for name, answered in zip(last.bookies, answers):
            quorum.answered(name, told[name], 0 if answered else BookieUnavailable.code)
        assert not quorum.covered or quorum.last_add_confirmed >= floor, broken(
            "coverage",
            f"ledger {LEDGER}: {quorum.last_add_confirmed} is read where confirmed entries tell {floor}",
        )
