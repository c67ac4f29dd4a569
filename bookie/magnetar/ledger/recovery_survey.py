"""What is known of the end of a ledger that no recovery can prove: for an operator who has to decide (`core.recovery`).

Each bookie of the last ensemble is asked for what it has behind the last entry that is known to be confirmed. It fences the
ledger before it answers, so what it says stays true. An entry then is

    found      a bookie has it, with a good digest: it will be in the ledger
    absent     enough bookies say that they never had it (rule 14): the ledger ends before it
    undecided  nobody has it, and of those that may have had it too many do not answer, or may have lost it
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerNotFound,
    MagnetarError,
    error_name,
)
from magnetar.proto.ledger_entry import NO_ENTRY, verify_ledger_entry

from .core.metadata import LedgerMetadata
from .replicas import SILENT
from .transport import BookieTransport

_NEGATIVE = (EntryNotFound, LedgerNotFound)
_LIST = 1000


@dataclass(slots=True)
class BookieKnowledge:
    """What one bookie of the last ensemble says; entries are those behind the last confirmed one."""

    bookie: str
    error: str = ""  # why it is not known what it has, or all of what it had; "": it knows
    last_add_confirmed: int = NO_ENTRY  # the highest that it heard of
    found: dict[int, None] = field(default_factory=dict)  # with good digests
    denied: dict[int, None] = field(default_factory=dict)
    unknown: dict[int, str] = field(default_factory=dict)  # entry -> error: it may have had it

    @property
    def answers(self) -> bool:
        """Whether it said anything about the ledger."""
        return bool(self.found or self.denied or self.last_add_confirmed != NO_ENTRY or not self.error)


@dataclass(frozen=True, slots=True)
class EndSurvey:
    """What all of them know together."""

    metadata: LedgerMetadata
    bookies: Sequence[BookieKnowledge]
    last_add_confirmed: int  # the highest that anybody heard of: that far all was confirmed
    last_entry: int  # the last entry that is proved: found, or known to be confirmed
    proved: bool  # whether a recovery can prove that there is no further one
    # Up to `last_entry`: nobody has them, and nobody can say that they never were, or they are known to be confirmed.
    undecided: Sequence[int]


async def survey_end(transport: BookieTransport, ledger_id: int, metadata: LedgerMetadata) -> EndSurvey:
    """Asks, and fences; waits for silent bookies as long as a read does. Changes nothing in metadata."""
    bookies = [BookieKnowledge(bookie) for bookie in metadata.last_ensemble.bookies]
    await asyncio.gather(*(_ask_for_end(transport, ledger_id, bookie) for bookie in bookies))
    begin = metadata.last_ensemble.first_entry
    heard = max(bookie.last_add_confirmed for bookie in bookies)
    first = max(heard, begin - 1) + 1
    base = await _base_is_found(transport, ledger_id, metadata, first - 1)
    listed = await asyncio.gather(*(_listed(transport, ledger_id, bookie, first) for bookie in bookies))
    last = max([first - 1, *(entry_id for entries in listed for entry_id in entries)])
    # The entry behind the last one of all is asked for as well.
    entries = sorted({entry_id for found in listed for entry_id in found} | set(range(first, last + 2)))
    striping = metadata.striping
    await asyncio.gather(
        *(
            _ask_for_entries(
                transport, ledger_id, bookie, [e for e in entries if position in striping.write_set(e)]
            )
            for position, bookie in enumerate(bookies)
        )
    )
    return _together(metadata, bookies, first, entries, [] if base else [first - 1])


def _together(
    metadata: LedgerMetadata,
    bookies: Sequence[BookieKnowledge],
    first: int,
    entries: Sequence[int],
    undecided: list[int],
) -> EndSurvey:
    last_add_confirmed = max(bookie.last_add_confirmed for bookie in bookies)
    # What an entry said of a later LAC counts as well.
    last_entry = max(first - 1, last_add_confirmed)
    proved = False
    waiting: list[int] = []
    for entry_id in entries:
        if any(entry_id in bookie.found for bookie in bookies):
            undecided += waiting
            waiting.clear()
            last_entry = max(last_entry, entry_id)
            continue
        denials = sum(entry_id in bookie.denied for bookie in bookies)
        if denials >= metadata.striping.negatives_for_absence:
            proved = not waiting and not undecided
            break
        waiting.append(entry_id)
    undecided += [entry_id for entry_id in waiting if entry_id <= last_entry]
    return EndSurvey(metadata, bookies, last_add_confirmed, last_entry, proved, undecided)


async def _ask_for_end(transport: BookieTransport, ledger_id: int, bookie: BookieKnowledge) -> None:
    try:
        answer = await transport.read_last_confirmed(bookie.bookie, ledger_id, fence=True)
        bookie.last_add_confirmed = answer.last_add_confirmed
    except _NEGATIVE:
        return
    except MagnetarError as error:
        bookie.error = f"{error_name(error.code)}: {error.message}"
        if isinstance(error, SILENT):
            return
    if bookie.error:  # it may have lost entries; what it still has of the ledger counts all the same
        try:
            page = await transport.list_ledgers(bookie.bookie, after=ledger_id - 1, count=1)
        except MagnetarError:
            return
        for ledger in page.ledgers:
            if ledger.ledger_id == ledger_id and not ledger.deleted:
                bookie.last_add_confirmed = ledger.last_add_confirmed


async def _base_is_found(
    transport: BookieTransport, ledger_id: int, metadata: LedgerMetadata, base: int
) -> bool:
    """Whether somebody has the last entry that is known to be confirmed: a recovery begins there."""
    if base < 0:
        return True
    ensemble = metadata.ensemble_of(base).bookies
    asked = [BookieKnowledge(ensemble[position]) for position in metadata.striping.write_set(base)]
    await asyncio.gather(*(_ask_for_entries(transport, ledger_id, bookie, [base]) for bookie in asked))
    return any(bookie.found for bookie in asked)


async def _listed(
    transport: BookieTransport, ledger_id: int, bookie: BookieKnowledge, first: int
) -> list[int]:
    """Entries from `first` on that the bookie says it has."""
    entries: list[int] = []
    while first >= 0:
        try:
            page = await transport.list_entries(bookie.bookie, ledger_id, first=first, count=_LIST)
        except MagnetarError:
            break  # nothing, or it does not say: then reading says why
        entries += [entry_id for begin, end in page.ranges for entry_id in range(begin, end + 1)]
        first = page.following
    return entries


async def _ask_for_entries(
    transport: BookieTransport, ledger_id: int, bookie: BookieKnowledge, entries: Sequence[int]
) -> None:
    for place, entry_id in enumerate(entries):
        try:
            answer = await transport.read(bookie.bookie, ledger_id, entry_id, entry_id, fence=True)
            header = verify_ledger_entry(answer.entries[0])
            if (header.ledger_id, header.entry_id) != (ledger_id, entry_id):
                raise EntryDamaged(f"another entry stands where entry {entry_id} should")
        except _NEGATIVE:
            bookie.denied[entry_id] = None
        except SILENT as error:
            bookie.error = f"{error_name(error.code)}: {error.message}"
            bookie.unknown.update(dict.fromkeys(entries[place:], error_name(error.code)))
            return
        except MagnetarError as error:
            bookie.error = bookie.error or f"{error_name(error.code)}: {error.message}"
            bookie.unknown[entry_id] = error_name(error.code)
        else:
            bookie.found[entry_id] = None
            bookie.last_add_confirmed = max(bookie.last_add_confirmed, header.last_add_confirmed)
