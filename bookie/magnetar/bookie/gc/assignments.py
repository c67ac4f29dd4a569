"""Who has which entries of a ledger, as its record says: the seam to the records, which belong to the ledger client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol


class Unassigned(Protocol):
    """Entries of a closed ledger that are other bookies'."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """Both ends included, rising."""
        ...


class Assigned(Protocol):
    """What a record gives this bookie."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def closed(self) -> bool:
        """Its record gives nobody any further entry."""
        ...

    def gives(self, entry_id: int) -> bool:
        """Whether the entry is this bookie's; of an open ledger each may be."""
        ...

    def whole(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Of a closed ledger: whether these entries (both ends included, rising) are all that this bookie should have."""
        ...


class Assignments(Protocol):
    """What metadata says about who has which entries. Injected: the records are the ledger client's."""

    async def unassigned(self, ledger_id: int) -> Unassigned | None:
        """Reads the record. None: nothing is certain to be another bookie's. Raises MagnetarError if that is not known."""
        ...

    async def assigned(self, ledger_id: int) -> Assigned | None:
        """Of a ledger that exists; it may give this bookie nothing. Raises MagnetarError if that is not known."""
        ...

    def assigned_below(self, ledger_id: int) -> AsyncIterator[Assigned]:
        """Every ledger with a lower id whose record names this bookie. Raises MagnetarError if not all can be read."""
        ...

    async def confirm(self, found: Any) -> bool:
        """Of what `unassigned` returned: raises the version of the record; False if it has changed since it was read."""
        ...
