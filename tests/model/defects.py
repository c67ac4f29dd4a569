"""Defects planted into the cores (or the bookies of the model), each with a shape small enough to show it.

They are rules of CORRECTNESS.md broken one at a time, among them what went wrong in other implementations of this design.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from magnetar.ledger.core.events import (
    Confirm,
    Finished,
    Instruction,
    MetadataWritten,
    PendingAdd,
    WriteMetadata,
)
from magnetar.ledger.core.metadata import LedgerMetadata, LedgerState
from magnetar.ledger.core.writer import WriterCore, WriterState
from magnetar.proto.errors import BookieUnavailable
from magnetar.proto.ledger_entry import encode_ledger_entry

from . import forgetting
from .ledger_world import LEDGER
from .recovery_defects import (
    a_bookie_without_the_ledger_is_not_fenced,
    absence_needs_one_negative_less,
    an_unreachable_bookie_counts_as_known,
    an_unreadable_entry_is_the_end,
    fences_are_lost,
    metadata_are_written_whatever_the_version,
    nothing_is_added_again,
    one_answer_covers_the_ensemble,
    re_adds_are_not_waited_for,
    re_adds_tell_a_higher_last_confirmed,
    recovery_adds_do_not_pass_the_fence,
    recovery_begins_without_marking,
    recovery_ignores_where_the_last_ensemble_begins,
    recovery_reads_do_not_fence,
    recovery_reads_with_the_changed_ensemble,
    recovery_starts_one_entry_late,
    recovery_writes_its_ensemble_change_at_once,
    the_changed_ensemble_begins_behind_the_next_re_add,
    the_length_up_to_the_base_is_forgotten,
    the_loser_of_the_closing_race_believes_itself,
)
from .shape import Shape

Patch = pytest.MonkeyPatch


def confirmed_before_the_change_is_in_the_metadata(patch: Patch) -> None:
    """Rule 17; apache/bookkeeper #4097."""
    right = WriterCore._change_ensemble

    def change(self: WriterCore, bookies: dict[int, str]) -> list[Instruction]:
        instructions = right(self, bookies)
        self._writing_metadata = False
        version = self.version
        following = self.handle(MetadataWritten(version))
        self.version = version
        self._writing_metadata = True
        return [*instructions, *following]

    def written(self: WriterCore, version: int) -> list[Instruction]:
        if self._changing_to is not None or self.state is WriterState.SEALING:
            return known(self, version)
        self._writing_metadata, self.version = False, version
        return []

    known = WriterCore._metadata_written
    patch.setattr(WriterCore, "_change_ensemble", change)
    patch.setattr(WriterCore, "_metadata_written", written)


def acks_of_the_replaced_bookie_are_kept(patch: Patch) -> None:
    """Rule 17; apache/bookkeeper #1591."""
    right = WriterCore._ensemble_changed

    def changed(self: WriterCore) -> list[Instruction]:
        kept = [add.acked for add in self.pending]
        instructions = right(self)
        for add, acked in zip(self.pending, kept):
            add.acked |= acked
        return instructions

    patch.setattr(WriterCore, "_ensemble_changed", changed)


def acks_during_a_change_are_dropped(patch: Patch) -> None:
    """Rule 17: they are kept, or the entry waits for ever; apache/bookkeeper #4651."""
    right = WriterCore.stored

    def stored(self: WriterCore, bookie: str, entry_id: int) -> list[PendingAdd] | tuple[PendingAdd, ...]:
        return right(self, bookie, entry_id) if self.sending else ()

    patch.setattr(WriterCore, "stored", stored)


def the_new_ensemble_starts_after_what_is_pending(patch: Patch) -> None:
    """Rule 17: at LAC+1."""
    right = WriterCore._change_ensemble

    def change(self: WriterCore, bookies: dict[int, str]) -> list[Instruction]:
        (write,) = right(self, bookies)
        assert isinstance(write, WriteMetadata)
        assert self._changing_to is not None
        return [
            replace(write, metadata=self.metadata.with_ensemble(self.last_add_pushed + 1, self._changing_to))
        ]

    patch.setattr(WriterCore, "_change_ensemble", change)


def the_replacement_gets_only_what_was_held_back(patch: Patch) -> None:
    """Rule 17: it lacks all that is pending."""
    right = WriterCore._go_on

    def go_on(self: WriterCore) -> list[Instruction]:
        self._replaced.clear()
        return right(self)

    patch.setattr(WriterCore, "_go_on", go_on)


def failures_during_a_change_are_forgotten(patch: Patch) -> None:
    """Rule 18."""
    right = WriterCore._ensemble_changed

    def changed(self: WriterCore) -> list[Instruction]:
        self._failing.clear()
        return right(self)

    patch.setattr(WriterCore, "_ensemble_changed", changed)


def confirmed_out_of_order(patch: Patch) -> None:
    """Rule 17: adds complete in entry order."""
    right = WriterCore.stored

    def stored(self: WriterCore, bookie: str, entry_id: int) -> list[PendingAdd] | tuple[PendingAdd, ...]:
        confirmed = right(self, bookie, entry_id)
        if not confirmed and self.sending:
            if any(add.acked.bit_count() >= self.ack_quorum for add in self.pending):
                for add in self.pending:
                    add.acked |= self._masks[0] | self._masks[-1]
                return self._take_confirmed()
        return confirmed

    patch.setattr(WriterCore, "stored", stored)


def one_ack_is_enough(patch: Patch) -> None:
    """The ack quorum."""
    right = WriterCore.__init__

    def init(self: WriterCore, *arguments: Any) -> None:
        right(self, *arguments)
        self.ack_quorum = 1

    patch.setattr(WriterCore, "__init__", init)


def a_fence_seen_while_sealing_fails_the_writer(patch: Patch) -> None:
    """What this search found: Qa < Qw, an answer after the last confirmation, from a bookie that is being repaired."""
    patch.setattr("magnetar.ledger.core.writer._ADDING", frozenset(WriterState))
    patch.setattr(forgetting, "LIVE", tuple(WriterState))  # nothing is taken to be ignored


def whatever_closed_the_ledger_was_this_writer(patch: Patch) -> None:
    """Rule 16: only if last entry and length agree."""
    right = WriterCore._compare_with_close

    def judge(self: WriterCore, found: LedgerMetadata) -> list[Instruction]:
        if not found.closed:
            return right(self, found)
        self.state = WriterState.CLOSED
        return [
            Finished(
                found.__class__.close(replace_open(found), self.last_add_confirmed, self.confirmed_length)
            )
        ]

    patch.setattr(WriterCore, "_compare_with_close", judge)


def replace_open(metadata: LedgerMetadata) -> LedgerMetadata:
    """As it was before it was closed."""
    return replace(metadata, state=LedgerState.IN_RECOVERY, last_entry=-1, length=0)


def the_writer_changes_a_recovered_ledger(patch: Patch) -> None:
    """Rule 16: it stops."""
    right = WriterCore._metadata_found

    def found(self: WriterCore, metadata: LedgerMetadata, version: int) -> list[Instruction]:
        if self.state is WriterState.CHANGING:
            metadata = replace(metadata, state=LedgerState.OPEN, last_entry=-1, length=0)
        return right(self, metadata, version)

    patch.setattr(WriterCore, "_metadata_found", found)


def the_changed_ensemble_begins_with_the_last_confirmed_entry(patch: Patch) -> None:
    """Rule 17: at LAC+1; the new bookie lacks what was confirmed before."""
    right = WriterCore._change_ensemble

    def change(self: WriterCore, bookies: dict[int, str]) -> list[Instruction]:
        (write,) = right(self, bookies)
        assert isinstance(write, WriteMetadata)
        assert self._changing_to is not None
        first = max(self.last_add_confirmed, self.metadata.last_ensemble.first_entry)
        return [replace(write, metadata=self.metadata.with_ensemble(first, self._changing_to))]

    patch.setattr(WriterCore, "_change_ensemble", change)


def what_failed_during_a_change_is_sent_to_again(patch: Patch) -> None:
    """Rule 18: failures during a change are handled before the next send, not taken for those that were replaced."""
    right = WriterCore._add_failed

    def failed(self: WriterCore, bookie: str, entry_id: int, code: int) -> list[Instruction]:
        if self.state is WriterState.CHANGING and code == BookieUnavailable.code:
            return []
        return right(self, bookie, entry_id, code)

    patch.setattr(WriterCore, "_add_failed", failed)


def adds_tell_what_is_pushed_as_confirmed(patch: Patch) -> None:
    """Rule 19: the piggybacked LAC lags; it never runs ahead."""
    right = WriterCore.append

    def append(self: WriterCore, payload: bytes, context: Any) -> Any:
        last = self.last_add_confirmed
        entry_id, length = self.last_add_pushed + 1, self.length + len(payload)
        _, bookies = right(self, payload, context)
        assert self.last_add_confirmed == last
        entry = encode_ledger_entry(LEDGER, entry_id, entry_id - 1, length, payload)
        self.pending[-1].entry = entry
        return entry, bookies

    patch.setattr(WriterCore, "append", append)


def callers_are_told_again_after_a_change(patch: Patch) -> None:
    """Rule 17: each entry is confirmed once."""
    right = WriterCore._go_on

    def go_on(self: WriterCore) -> list[Instruction]:
        instructions = right(self)
        return [*instructions, *(one for one in instructions if isinstance(one, Confirm))]

    patch.setattr(WriterCore, "_go_on", go_on)


@dataclass(frozen=True, slots=True)
class Planted:
    """A defect and where to look for it."""

    plant: Callable[[Patch], None]
    shows: str  # the name of the invariant that it breaks first
    shape: Shape
    plain: bool = False  # the plain world finds it in a second, too

    @property
    def name(self) -> str:
        """Of the defect."""
        return self.plant.__name__


ONE = Shape(entries=1, crashes=0, losses=0)
QUIET = Shape(crashes=0, losses=0, recoverers=0, writer_closes=False)
PLANTED = [
    Planted(
        absence_needs_one_negative_less,
        "not truncated",
        replace(ONE, ensemble_size=3, write_quorum=3),
        plain=True,
    ),
    Planted(an_unreadable_entry_is_the_end, "not truncated", replace(ONE, losses=2)),
    Planted(confirmed_before_the_change_is_in_the_metadata, "not lost", replace(ONE, losses=1), plain=True),
    Planted(acks_of_the_replaced_bookie_are_kept, "not lost", replace(QUIET, losses=1), plain=True),
    Planted(
        acks_during_a_change_are_dropped, "nobody hangs", replace(QUIET, entries=1, losses=1), plain=True
    ),
    Planted(
        the_new_ensemble_starts_after_what_is_pending,
        "not lost",
        replace(QUIET, entries=1, losses=1),
        plain=True,
    ),
    Planted(
        the_replacement_gets_only_what_was_held_back,
        "nobody hangs",
        replace(QUIET, entries=1, losses=1),
        plain=True,
    ),
    Planted(
        failures_during_a_change_are_forgotten,
        "nobody hangs",
        replace(QUIET, entries=1, bookies=4, losses=2),
        plain=True,
    ),
    Planted(confirmed_out_of_order, "not lost", replace(QUIET, ensemble_size=3), plain=True),
    Planted(one_ack_is_enough, "not lost", ONE, plain=True),
    Planted(
        a_fence_seen_while_sealing_fails_the_writer, "the cores' own", replace(ONE, ack_quorum=1, repairs=1)
    ),
    Planted(whatever_closed_the_ledger_was_this_writer, "one end", ONE),
    Planted(
        the_writer_changes_a_recovered_ledger,
        "final",
        replace(ONE, losses=1, writer_closes=False),
    ),
    Planted(re_adds_are_not_waited_for, "not lost", ONE),
    Planted(nothing_is_added_again, "not lost", ONE, plain=True),
    Planted(re_adds_tell_a_higher_last_confirmed, "no divergence", ONE, plain=True),
    Planted(recovery_starts_one_entry_late, "not lost", replace(ONE, entries=2)),
    Planted(the_length_up_to_the_base_is_forgotten, "one end", replace(ONE, entries=2)),
    Planted(
        recovery_reads_with_the_changed_ensemble,
        "not truncated",
        replace(ONE, entries=2, losses=1, writer_closes=False),
    ),
    Planted(
        recovery_writes_its_ensemble_change_at_once,
        "not lost",
        replace(ONE, recoverers=2, losses=1, writer_closes=False),
    ),
    Planted(
        the_loser_of_the_closing_race_believes_itself,
        "one end",
        replace(ONE, recoverers=2, writer_closes=False),
    ),
    Planted(recovery_begins_without_marking, "not truncated", replace(ONE, losses=1, writer_closes=False)),
    Planted(fences_are_lost, "not truncated", ONE),
    Planted(a_bookie_without_the_ledger_is_not_fenced, "not truncated", ONE),
    Planted(recovery_adds_do_not_pass_the_fence, "not lost", ONE),
    Planted(an_unreachable_bookie_counts_as_known, "coverage", replace(ONE, entries=2, losses=2)),
    Planted(
        one_answer_covers_the_ensemble, "coverage", replace(ONE, entries=2, ensemble_size=3, write_quorum=3)
    ),
    Planted(recovery_reads_do_not_fence, "not truncated", ONE),
    Planted(
        recovery_ignores_where_the_last_ensemble_begins, "not truncated", replace(ONE, entries=2, losses=1)
    ),
    Planted(the_changed_ensemble_begins_behind_the_next_re_add, "not lost", replace(ONE, losses=1)),
    Planted(metadata_are_written_whatever_the_version, "not lost", replace(ONE, losses=1)),
    Planted(the_changed_ensemble_begins_with_the_last_confirmed_entry, "not lost", replace(QUIET, losses=1)),
    Planted(
        what_failed_during_a_change_is_sent_to_again,
        "nobody hangs",
        replace(QUIET, entries=1, bookies=4, losses=2),
    ),
    Planted(
        callers_are_told_again_after_a_change, "order", replace(QUIET, entries=1, ack_quorum=1, losses=1)
    ),
    Planted(adds_tell_what_is_pushed_as_confirmed, "last confirmed", replace(ONE, entries=2)),
]
