"""Deferred sync on a cluster in a storm with power losses; and mistakes that such a writer, or its bookies, could make.

Played in this process: a planted defect is undone after its test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.bookie.journal.journal import Journal
from magnetar.ledger import LedgerMetadata, LedgerWriter
from magnetar.ledger.bookie_link import BookieChannel, BookieLink
from magnetar.ledger.core.deferred import DeferredSync
from magnetar.ledger.core.events import ForceRequested
from magnetar.ledger.core.writer import WriterCore
from magnetar.proto.commands import ADD_ACCEPTED
from magnetar.proto.errors import ConnectionLost
from sim.ledgers import deferred
from sim.runner import play

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

MOST_SEEDS = 40  # for a defect
SOON = 3

Patch = pytest.MonkeyPatch


def accepted_is_said_to_be_durable(patch: Patch) -> None:
    """The bookie answers a force for what stands in its memory, and syncs it in its own time."""
    add, sync = Journal.add_deferred, Journal.sync
    accepted: dict[Journal, list[tuple[Any, int, int]]] = {}

    def add_deferred(self: Journal, entry: bytes, done: Any, ledger_id: int, entry_id: int) -> None:
        add(self, entry, done, ledger_id, entry_id)
        accepted.setdefault(self, []).append((done, ledger_id, entry_id))

    def answer(self: Journal) -> None:
        for done, ledger_id, entry_id in accepted.pop(self, ()):
            done(ledger_id, entry_id, 0)

    def in_time(self: Journal) -> None:
        self._deferred_timer = None
        sync(self)

    patch.setattr(Journal, "_sync_deferred", in_time)
    patch.setattr(Journal, "add_deferred", add_deferred)
    patch.setattr(Journal, "sync", answer)


def next_life_vouches_for_the_last(patch: Patch) -> None:
    """The client forgets that the connection was lost: what the next life of the bookie syncs counts for all of it."""
    give_up, force = BookieLink._give_up, BookieChannel.force
    carried: dict[BookieChannel, dict[tuple[int, int], Any]] = {}

    def keep(self: Any, error: Any, **options: Any) -> None:
        if isinstance(error, ConnectionLost):
            kept = carried.setdefault(self._owner, {})
            for ledger_id, ledger in self._adds._deferred.items():
                kept |= {(ledger_id, entry_id): done for entry_id, done in ledger.accepted.items()}
                ledger.accepted.clear()
        give_up(self, error, **options)

    def vouch(self: BookieChannel, ledger_id: int) -> None:
        force(self, ledger_id)
        for key, done in list(carried.get(self, {}).items()):
            if key[0] == ledger_id:
                del carried[self][key]
                self._loop.call_soon(done, self._destination.bookie, *key, 0)

    patch.setattr(BookieLink, "_give_up", keep)
    patch.setattr(BookieChannel, "force", vouch)
    patch.setattr(deferred, "REST", 0.6)  # an add that is under way when a bookie dies has it replaced


def last_add_confirmed_follows_what_is_accepted(patch: Patch) -> None:
    """An acceptance counts as the real answer."""
    on_added = LedgerWriter._on_deferred_answer

    def confirm(self: Any, bookie: str, ledger_id: int, entry_id: int, code: int) -> None:
        on_added(self, bookie, ledger_id, entry_id, 0 if code == ADD_ACCEPTED else code)

    patch.setattr(LedgerWriter, "_on_deferred_answer", confirm)


def change_begins_behind_what_was_accepted(patch: Patch) -> None:
    """The metadata says that the old ensemble holds what had been answered and was not durable."""
    with_ensemble, begun = LedgerMetadata.with_ensemble, DeferredSync.__init__
    deferring: dict[WriterCore, DeferredSync] = {}

    def begin(self: DeferredSync, writer: WriterCore, max_unforced_bytes: int) -> None:
        begun(self, writer, max_unforced_bytes)
        deferring[writer] = self

    def later(self: LedgerMetadata, first_entry: int, bookies: Any) -> LedgerMetadata:
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, WriterCore) and caller in deferring:
            first_entry = max(first_entry, deferring[caller].last_add_accepted + 1)
        return with_ensemble(self, first_entry, bookies)

    patch.setattr(DeferredSync, "__init__", begin)

    patch.setattr(LedgerMetadata, "with_ensemble", later)


def force_counts_answers_and_not_write_sets(patch: Patch) -> None:
    """With E > Qw: Qa bookies of the ensemble have answered, whichever, so everything before is taken for durable."""
    stored = DeferredSync.stored

    def count(self: Any, bookie: str, entry_id: int) -> Any:
        writer = self.writer
        bit = writer._bits.get(bookie, 0)
        for add in list(writer.pending)[: max(0, entry_id - writer.last_add_confirmed)]:
            add.acked |= bit
        return stored(self, bookie, entry_id)

    patch.setattr(DeferredSync, "stored", count)


def force_returns_at_once(patch: Patch) -> None:
    """The writer asks the bookies and does not wait."""

    async def force(self: Any) -> None:
        if self.deferred_sync:
            self._handle(ForceRequested())

    patch.setattr(LedgerWriter, "force", force)


# With the seed from which on it is looked for: near the first that shows it.
DEFECTS: dict[Callable[[Patch], None], int] = {
    accepted_is_said_to_be_durable: 0,
    next_life_vouches_for_the_last: 2,
    last_add_confirmed_follows_what_is_accepted: 0,
    change_begins_behind_what_was_accepted: 12,
    force_counts_answers_and_not_write_sets: 0,
    force_returns_at_once: 0,
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_noticed(
    defect: Callable[[Patch], None], monkeypatch: Patch, record_property: Callable[[str, object], None]
) -> None:
    defect(monkeypatch)
    first = DEFECTS[defect]
    noticed = next((seed for seed in range(first, first + MOST_SEEDS) if play("deferred", seed).error), None)
    assert noticed is not None, defect.__name__
    if noticed >= first + SOON:
        record_property("pin", f"deferred {defect.__name__}: {noticed}")
