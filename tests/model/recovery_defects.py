"""Defects planted into recovery, quorums, and the bookies and metadata of the model; `defects` lists them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from magnetar.ledger.core import recovery
from magnetar.ledger.core.events import (
    Instruction,
    MetadataFound,
    WriteMetadata,
)
from magnetar.ledger.core.metadata import LedgerState
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.proto.ledger_entry import encode_ledger_entry

from .ledger_world import LEDGER
from .reduced_world import ReducedWorld

Patch = pytest.MonkeyPatch


def absence_needs_one_negative_less(patch: Patch) -> None:
    """Rule 14."""
    right = Striping.negatives_for_absence.fget  # type: ignore[attr-defined]
    patch.setattr(Striping, "negatives_for_absence", property(lambda self: right(self) - 1))


def an_unreadable_entry_is_the_end(patch: Patch) -> None:
    """Rule 14: anything else aborts; apache/bookkeeper #2908."""
    patch.setattr(recovery, "_NEGATIVE", frozenset(range(1, 60)))


def re_adds_are_not_waited_for(patch: Patch) -> None:
    """Rule 15."""
    right = RecoveryCore._send

    def send(self: RecoveryCore, entry_id: int, entry: bytes) -> list[Instruction]:
        self._entries[entry_id].acked = self.striping.mask(entry_id)
        return right(self, entry_id, entry)

    patch.setattr(RecoveryCore, "_send", send)


def nothing_is_added_again(patch: Patch) -> None:
    """Rule 15."""

    def send(self: RecoveryCore, entry_id: int, entry: bytes) -> list[Instruction]:
        self._entries[entry_id].acked = self.striping.mask(entry_id)
        return []

    patch.setattr(RecoveryCore, "_send", send)


def re_adds_tell_a_higher_last_confirmed(patch: Patch) -> None:
    """Rules 15, 20: the bytes stay the writer's, or replicas differ."""
    right = RecoveryCore._send

    def send(self: RecoveryCore, entry_id: int, entry: bytes) -> list[Instruction]:
        again = encode_ledger_entry(LEDGER, entry_id, entry_id, self._entries[entry_id].length, b"x")
        return right(self, entry_id, again)

    patch.setattr(RecoveryCore, "_send", send)


def recovery_starts_one_entry_late(patch: Patch) -> None:
    """Rule 15: at the last confirmed one that somebody told, plus 1."""
    right = RecoveryCore._read_base
    patch.setattr(RecoveryCore, "_read_base", lambda self, last: right(self, last + (last >= 0)))


def the_length_up_to_the_base_is_forgotten(patch: Patch) -> None:
    """Rule 16: last entry and length agree."""
    right = RecoveryCore._base_read

    def read(self: RecoveryCore, event: Any) -> list[Instruction]:
        return right(self, replace(event, length=0))

    patch.setattr(RecoveryCore, "_base_read", read)


def recovery_reads_with_the_changed_ensemble(patch: Patch) -> None:
    """Rule 15: with the one that it began with; apache/bookkeeper #2615."""
    right = RecoveryCore._replace

    def change(self: RecoveryCore, chosen: dict[int, str]) -> list[Instruction]:
        bookies = list(self._reading)
        for position, bookie in chosen.items():
            bookies[position] = bookie
        self._reading = tuple(bookies)
        return right(self, chosen)

    patch.setattr(RecoveryCore, "_replace", change)


def recovery_writes_its_ensemble_change_at_once(patch: Patch) -> None:
    """Rule 15: with the closing compare-and-set. The next recovery reads bookies that have nothing yet."""
    right, written = RecoveryCore._replace, RecoveryCore._metadata_written

    def change(self: RecoveryCore, chosen: dict[int, str]) -> list[Instruction]:
        instructions = right(self, chosen)
        return [WriteMetadata(self._changed, self.version), *instructions]

    def found(self: RecoveryCore, version: int) -> list[Instruction]:
        if self.state in (RecoveryState.MARKING, RecoveryState.CLOSING):
            return written(self, version)
        self.version = version
        return []

    patch.setattr(RecoveryCore, "_replace", change)
    patch.setattr(RecoveryCore, "_metadata_written", found)


def the_loser_of_the_closing_race_believes_itself(patch: Patch) -> None:
    """Rule 16: it adopts what the winner wrote."""
    right = RecoveryCore.handle

    def handle(self: RecoveryCore, event: Any) -> list[Instruction]:
        if isinstance(event, MetadataFound) and self.state is RecoveryState.CLOSING:
            return self._metadata_written(event.version)
        return right(self, event)

    patch.setattr(RecoveryCore, "handle", handle)


def recovery_begins_without_marking(patch: Patch) -> None:
    """Rule 16: OPEN is marked IN_RECOVERY first, or the writer's ensemble change goes through beside it."""
    right = RecoveryCore.begin

    def begin(self: RecoveryCore) -> list[Instruction]:
        if self.metadata.state is LedgerState.OPEN:
            self.metadata = replace(self.metadata, state=LedgerState.IN_RECOVERY)
        return right(self)

    def handle(self: RecoveryCore, event: Any) -> list[Instruction]:
        if isinstance(event, MetadataFound) and not event.metadata.closed:
            assert self._last is not None
            closed = self._changed.close(self._last, self._length)
            return [WriteMetadata(closed, event.version)]  # "nobody else closed it": written over
        return known(self, event)

    known = RecoveryCore.handle
    patch.setattr(RecoveryCore, "begin", begin)
    patch.setattr(RecoveryCore, "handle", handle)


def fences_are_lost(patch: Patch) -> None:
    """Rules 6, 14: of neither kind of read; apache/bookkeeper #2614, BP-46."""
    right = ReducedWorld._at_bookie

    def at_bookie(
        self: ReducedWorld, message: tuple[Any, ...], alive: bool, fenced: bool, entries: Any
    ) -> tuple[tuple[Any, ...], int]:
        answer, bookie = right(self, message, alive, fenced, entries)
        return answer, self._bookie(alive, False, self.bookies.things[bookie][2])

    patch.setattr(ReducedWorld, "_at_bookie", at_bookie)


def a_bookie_without_the_ledger_is_not_fenced(patch: Patch) -> None:
    """Rule 6: "no such entry" is answered after the fence, too."""
    right = ReducedWorld._at_bookie

    def at_bookie(
        self: ReducedWorld, message: tuple[Any, ...], alive: bool, fenced: bool, entries: Any
    ) -> tuple[tuple[Any, ...], int]:
        answer, bookie = right(self, message, alive, fenced, entries)
        return answer, self._bookie(alive, fenced, ()) if message[0] in "lr" and not entries else bookie

    patch.setattr(ReducedWorld, "_at_bookie", at_bookie)


def recovery_adds_do_not_pass_the_fence(patch: Patch) -> None:
    """Rule 7: every recovery that finds an entry hangs or fails; here it may not close without its copies."""
    right = ReducedWorld._at_bookie

    def at_bookie(
        self: ReducedWorld, message: tuple[Any, ...], alive: bool, fenced: bool, entries: Any
    ) -> tuple[tuple[Any, ...], int]:
        if message[0] == "a" and fenced:  # answered, and not stored
            return ("A", *message[1:4], 0), self._bookie(alive, fenced, entries)
        return right(self, message, alive, fenced, entries)

    patch.setattr(ReducedWorld, "_at_bookie", at_bookie)


def an_unreachable_bookie_counts_as_known(patch: Patch) -> None:
    """Rule 13: only "ok", "no such entry" and "no such ledger" are knowledge."""
    patch.setattr("magnetar.ledger.core.quorum._KNOWN_CODES", frozenset(range(200)))


def one_answer_covers_the_ensemble(patch: Patch) -> None:
    """Rule 13: every write set needs fewer than Qa unknown bookies."""
    patch.setattr(Striping, "covered", lambda self, known: known != 0)


def recovery_reads_do_not_fence(patch: Patch) -> None:
    """Rule 14; apache/bookkeeper #2614: covered without this bookie, it says "no such entry", and then takes the entry."""
    right = ReducedWorld._at_bookie

    def at_bookie(
        self: ReducedWorld, message: tuple[Any, ...], alive: bool, fenced: bool, entries: Any
    ) -> tuple[tuple[Any, ...], int]:
        answer, bookie = right(self, message, alive, fenced, entries)
        return answer, self._bookie(alive, fenced, entries) if message[0] == "r" else bookie

    patch.setattr(ReducedWorld, "_at_bookie", at_bookie)


def recovery_ignores_where_the_last_ensemble_begins(patch: Patch) -> None:
    """Rule 15: what lies before it is confirmed, and not on its bookies."""
    right = RecoveryCore._read_base

    def read_base(self: RecoveryCore, last_add_confirmed: int) -> list[Instruction]:
        metadata = self.metadata
        ensembles = (replace(metadata.ensembles[0], bookies=metadata.last_ensemble.bookies),)
        self.metadata = replace(metadata, ensembles=ensembles)
        instructions = right(self, last_add_confirmed)
        self.metadata = metadata
        return instructions

    patch.setattr(RecoveryCore, "_read_base", read_base)


def the_changed_ensemble_begins_behind_the_next_re_add(patch: Patch) -> None:
    """Rule 15: entries that are found and not yet on Qa bookies belong to it."""
    right = RecoveryCore._replace

    def change(self: RecoveryCore, chosen: dict[int, str]) -> list[Instruction]:
        before = self._changed
        instructions = right(self, chosen)
        bookies = self._changed.last_ensemble.bookies
        self._changed = before.with_ensemble(max(self._next_add, before.last_ensemble.first_entry), bookies)
        return instructions

    patch.setattr(RecoveryCore, "_replace", change)


def metadata_are_written_whatever_the_version(patch: Patch) -> None:
    """Rule 16: each step by compare-and-set."""
    right = ReducedWorld._metadata_steps

    def steps(self: ReducedWorld, out: Any, state: Any, number: int, message: tuple[Any, ...]) -> None:
        metadata, current = self.metas.things[state[3]]
        if message[2] >= 0 and not metadata.closed:
            written = self._meta(self.metas.things[message[2]][0], current + 1)
            message = (*message[:2], written, current, *message[4:])
        right(self, out, state, number, message)

    patch.setattr(ReducedWorld, "_metadata_steps", steps)
    patch.setattr(ReducedWorld, "_still_does", lambda self, message, bookie, meta: True)
    patch.setattr(
        ReducedWorld, "_writers_fate", lambda self, message, core, bookie, meta: self._message(message)
    )
