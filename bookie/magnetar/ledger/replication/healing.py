"""Healing the copies of one bookie that are reported damaged, or that it may lack.

    the copy is read again ──good──> nothing to do
                 └─bad or missing──> good ones are copied from other replicas (`copying`), and read once more

A report is a request and no proof (`metadata.damage`), so nothing is written before the copy was read, or is missing in the
bookie's own list. Entries that the
ledger's record does not give the bookie are none of its business. An entry of which every copy is bad stays reported: it is
never deleted, and it is said loudly once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from magnetar.ledger.core.metadata import Fragment, LedgerMetadata
from magnetar.ledger.replicas import SILENT
from magnetar.ledger.transport import BookieTransport
from magnetar.proto.errors import EntryNotFound, LedgerNotFound, MagnetarError, UnknownLedgerState

from .copying import EntryCopier, SourceFailed, TargetFailed

_LIST = 1000
_AT_ONCE = 10_000  # entries that are copied before they are read at the bookie
_MAX_LOST = 1000  # entries that are named; beyond it they are counted


@dataclass(slots=True)
class Healed:
    """What became of a request."""

    written: int = 0  # written again
    lost: list[int] = field(default_factory=list)  # entries of which every copy is bad
    postponed: str = ""  # why some could not be looked at now; "": all were

    @property
    def whole(self) -> bool:
        """Whether every entry is good now."""
        return not self.lost and not self.postponed


class Healer:
    """For all repairs of a process."""

    def __init__(self, transport: BookieTransport, copier: EntryCopier) -> None:
        self._transport = transport
        self._copier = copier

    async def heal(
        self,
        ledger_id: int,
        metadata: LedgerMetadata,
        bookie: str,
        ranges: Sequence[tuple[int, int]],
        registered: Mapping[str, None],
    ) -> Healed:
        """Reads each of these entries at the bookie, and writes what is bad again."""
        healing = _Healing(self._copier, ledger_id, metadata, registered)
        for part in _parts(metadata, bookie):
            for first, last in part.clipped(ranges):
                await healing.heal(part, first, last)
        return healing.healed

    async def complete(
        self, ledger_id: int, metadata: LedgerMetadata, bookie: str, registered: Mapping[str, None]
    ) -> Healed:
        """Asks the bookie for the list of its entries, and writes those that it lacks again."""
        healing = _Healing(self._copier, ledger_id, metadata, registered)
        parts = list(_parts(metadata, bookie))
        try:
            missing = await self._missing(ledger_id, parts, bookie)
        except MagnetarError as error:
            return Healed(postponed=error.message)
        for part in parts:
            for first, last in part.clipped(missing):
                for at in range(first, last + 1, _AT_ONCE):
                    await healing.write(part, at, min(last, at + _AT_ONCE - 1))
        return healing.healed

    async def _missing(self, ledger_id: int, parts: Sequence[_Part], bookie: str) -> list[tuple[int, int]]:
        """Ranges without any entry at the bookie, in which the record gives it some."""
        missing: list[tuple[int, int]] = []

        def gap(first: int, last: int) -> None:
            if any(
                part.stripe.ids(begin, end, 1)
                for part in parts
                for begin, end in part.clipped([(first, last)])
            ):
                missing.append((first, last))

        expected = parts[0].first if parts else 0
        at = expected
        while at >= 0 and parts:
            try:
                page = await self._transport.list_entries(bookie, ledger_id, first=at, count=_LIST)
            except (LedgerNotFound, UnknownLedgerState):
                break  # it has nothing, or does not know what it has
            for first, last in page.ranges:
                gap(expected, first - 1)
                expected = max(expected, last + 1)
            at = page.following
        end = max((part.last for part in parts if part.last is not None), default=-1)
        gap(expected, end)
        return missing


class _Healing:
    """What is healed of one ledger, and what becomes of it."""

    def __init__(
        self, copier: EntryCopier, ledger_id: int, metadata: LedgerMetadata, registered: Mapping[str, None]
    ) -> None:
        self.healed = Healed()
        self.ledger_id = ledger_id
        self.metadata = metadata
        self.registered = registered
        self.absent = 0  # entries of an open ledger that no bookie has
        self._copier = copier

    async def heal(self, part: _Part, first: int, last: int) -> None:
        """Reads what the bookie has, and writes what is bad again, some entries at a time.

        Of an open ledger the end is not known, and a report may name any: nothing is behind a thousand that no bookie has.
        """
        bad: list[int] = []
        at_once = _AT_ONCE if part.last is not None else _LIST
        async for entry_id in self._bad(part, first, last):
            bad.append(entry_id)
            if len(bad) == at_once:
                absent = self.absent
                await self._write_runs(part, bad)
                if self.absent - absent == at_once:
                    return
                bad.clear()
        await self._write_runs(part, bad)

    async def _write_runs(self, part: _Part, entries: Sequence[int]) -> None:
        for first, last in part.runs(entries):
            await self.write(part, first, last)

    async def write(self, part: _Part, first: int, last: int) -> None:
        """Copies these entries to the bookie, and reads them there."""
        healed = self.healed
        if healed.postponed:
            return
        unreadable: dict[int, None] = {}

        def skip(error: SourceFailed) -> bool:
            if not error.lost:
                return False
            if part.last is None:  # the writer of an open ledger may not have written it yet
                self.absent += isinstance(error.reason, EntryNotFound)
            elif len(healed.lost) < _MAX_LOST:
                healed.lost.append(error.entry_id)
            unreadable[error.entry_id] = None
            return True

        fragment = part.fragment._replace(first=first, last=last)
        targets = {part.position: part.bookie}
        try:
            healed.written += await self._copier.copy(
                self.ledger_id, self.metadata, fragment, targets, self.registered, skip
            )
        except (TargetFailed, SourceFailed) as error:
            healed.postponed = str(error)
            return
        async for entry_id in self._bad(part, first, last):
            if entry_id not in unreadable:
                healed.postponed = (
                    f"entry {entry_id} was written again at bookie {part.bookie}, and is not good yet"
                )

    async def _bad(self, part: _Part, first: int, last: int) -> AsyncIterator[int]:
        """Those that the bookie lacks, or has damaged. Where that is not known it ends, and the request is postponed."""
        following = part.next(first)
        while following <= last and not self.healed.postponed:
            good = await self._read_own(part, following, last)
            if isinstance(good, str):
                self.healed.postponed = good
                return
            if not good:
                yield following
            following = part.after(following, max(good, 1), last)

    async def _read_own(self, part: _Part, first: int, last: int) -> int | str:
        """How many entries from `first` on are good at the bookie; 0: the first is not. A text: that is not known."""
        try:
            return len(await self._copier.read_copy(part.bookie, self.ledger_id, first, last, part.stripe))
        except SILENT as error:
            return error.message
        except MagnetarError as error:
            if error.retryable:
                return error.message
            return 0  # damaged, missing, or the bookie does not know


class _Part:
    """The entries of one fragment that the record gives a bookie."""

    def __init__(self, metadata: LedgerMetadata, fragment: Fragment, bookie: str) -> None:
        self.bookie = bookie
        self.first, self.last = fragment.first, fragment.last
        self.fragment = fragment
        self.position = fragment.bookies.index(bookie)
        self.stripe = metadata.striping.stripe_of([self.position])

    def next(self, entry_id: int) -> int:
        """The first entry of this part from `entry_id` on."""
        while not self.stripe.holds(entry_id):
            entry_id += 1
        return entry_id

    def after(self, first: int, count: int, last: int) -> int:
        """The entry of this part after `count` of them."""
        return self.next(self.stripe.ids(first, last, count)[-1] + 1)

    def clipped(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """What of the ranges lies in this part."""
        for first, last in ranges:
            first = max(first, self.first)
            last = last if self.last is None else min(last, self.last)
            if first <= last:
                yield first, last

    def runs(self, entries: Sequence[int]) -> Iterator[tuple[int, int]]:
        """These entries, as ranges in which this part has no others."""
        begin = 0
        for place in range(1, len(entries) + 1):
            if place == len(entries) or entries[place] != self.next(entries[place - 1] + 1):
                yield entries[begin], entries[place - 1]
                begin = place


def _parts(metadata: LedgerMetadata, bookie: str) -> Iterator[_Part]:
    for fragment in metadata.fragments():
        if bookie in fragment.bookies and not fragment.empty:
            yield _Part(metadata, fragment, bookie)
