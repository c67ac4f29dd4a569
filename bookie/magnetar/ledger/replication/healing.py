"""Healing the copies of one bookie that are reported damaged, or that it may lack.

    the copy is read again ──good──> nothing to do
                 └─bad or missing──> a good one is read from another replica, added again, and read once more

A report is a request and no proof (`metadata.damage`), so nothing is written before the copy was read. Entries that the
ledger's record does not give the bookie are none of its business. An entry of which every copy is bad stays reported: it is
never deleted, and it is said loudly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.replicas import SILENT
from magnetar.ledger.transport import BookieTransport
from magnetar.proto.errors import LedgerNotFound, MagnetarError, UnknownLedgerState
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

from .copying import EntryCopier, SourceFailed, TargetFailed, in_order
from .core.fragments import Fragment, fragments_of, residues_of

__all__ = ["Healed", "Healer"]

_LIST = 1000
_MAX_LOST = 1000  # entries that are named; beyond it they are counted


@dataclass(slots=True)
class Healed:
    """What became of a request."""

    entries: int = 0  # read or found, good ones included
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
        healed = Healed()
        for part in _parts(metadata, bookie):
            for first, last in ranges:
                await self._heal_part(ledger_id, part, max(first, part.first), last, registered, healed)
                if healed.postponed:
                    return healed
        return healed

    async def complete(
        self, ledger_id: int, metadata: LedgerMetadata, bookie: str, registered: Mapping[str, None]
    ) -> Healed:
        """Asks the bookie for the list of its entries, and writes those that it lacks again."""
        healed = Healed()
        try:
            missing = await self._missing(ledger_id, metadata, bookie, healed)
        except MagnetarError as error:
            healed.postponed = error.message
            return healed
        found = healed.entries
        if missing:
            healed = await self.heal(ledger_id, metadata, bookie, missing, registered)
        healed.entries += found
        return healed

    async def _missing(
        self, ledger_id: int, metadata: LedgerMetadata, bookie: str, healed: Healed
    ) -> list[tuple[int, int]]:
        """Ranges without any entry at the bookie, in which the record gives it some."""
        parts = list(_parts(metadata, bookie))
        missing: list[tuple[int, int]] = []

        def gap(first: int, last: int) -> None:
            if any(True for part in parts for _ in part.entries(first, last)):
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
                healed.entries += last - first + 1
                expected = max(expected, last + 1)
            at = page.following
        end = max((part.last for part in parts if part.last is not None), default=-1)
        gap(expected, end)
        return missing

    async def _heal_part(
        self,
        ledger_id: int,
        part: _Part,
        first: int,
        last: int,
        registered: Mapping[str, None],
        healed: Healed,
    ) -> None:
        if part.last is not None:
            last = min(last, part.last)
        following = part.next(first)
        while following <= last:
            good = await self._read_own(ledger_id, part, following, last)
            if isinstance(good, str):
                healed.postponed = good
                return
            if good:
                healed.entries += good
                following = part.after(following, good, last)
                continue
            sources = [b for b in part.sources(following, registered, ledger_id) if b != part.bookie]
            try:
                entries = await self._copier.read(ledger_id, following, following, EVERY_ENTRY, sources)
                await self._copier.write_again(ledger_id, [(following, entries[0])], part.bookie)
            except TargetFailed as error:
                healed.postponed = str(error)
                return
            except SourceFailed as error:
                if part.last is None:
                    return  # the writer of an open ledger may not have written it yet
                if not error.lost:
                    healed.postponed = str(error)
                    return
                if len(healed.lost) < _MAX_LOST:
                    healed.lost.append(following)
            else:
                healed.written += 1
                if await self._read_own(ledger_id, part, following, following) != 1:
                    healed.postponed = (
                        f"entry {following} was written again at bookie {part.bookie}, and is not good yet"
                    )
                    return
            healed.entries += 1
            following = part.next(following + 1)

    async def _read_own(self, ledger_id: int, part: _Part, first: int, last: int) -> int | str:
        """How many entries from `first` on are good at the bookie; 0: the first is not. A text: that is not known."""
        try:
            return len(await self._copier.read_copy(part.bookie, ledger_id, first, last, part.stripe))
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
        self._fragment = fragment
        self._striping = striping = metadata.striping
        position = fragment.bookies.index(bookie)
        size = striping.ensemble_size
        whole = size == striping.write_quorum
        self.stripe = EVERY_ENTRY if whole else Stripe(size, residues_of(striping, (position,)))

    def next(self, entry_id: int) -> int:
        """The first entry of this part from `entry_id` on."""
        while not self.stripe.holds(entry_id):
            entry_id += 1
        return entry_id

    def after(self, first: int, count: int, last: int) -> int:
        """The entry of this part after `count` of them."""
        return self.next(self.stripe.ids(first, last, count)[-1] + 1)

    def entries(self, first: int, last: int) -> Iterator[int]:
        """The entries of this part in a range."""
        entry_id = self.next(max(first, self.first))
        last = last if self.last is None else min(last, self.last)
        while entry_id <= last:
            yield entry_id
            entry_id = self.next(entry_id + 1)

    def sources(self, entry_id: int, registered: Mapping[str, None], turn: int) -> list[str]:
        """The bookies of the entry's write set, in the order in which they are asked."""
        return in_order(self._fragment.bookies, self._striping.write_set(entry_id), registered, turn)


def _parts(metadata: LedgerMetadata, bookie: str) -> Iterator[_Part]:
    for fragment in fragments_of(metadata):
        if bookie in fragment.bookies and not fragment.empty:
            yield _Part(metadata, fragment, bookie)
