"""Who has which entries of a ledger, as its record says: the seam to the records, which belong to the ledger client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Assignments", "Unassigned"]


class Unassigned(Protocol):
    """Entries of a closed ledger that are other bookies'."""

    @property
    def ledger_id(self) -> int: ...

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """Both ends included, rising."""
        ...


class Assignments(Protocol):
    """What metadata says about who has which entries. Injected: the records are the ledger client's."""

    async def unassigned(self, ledger_id: int) -> Unassigned | None:
        """Reads the record. None: nothing is certain to be another bookie's. Raises MagnetarError if that is not known."""
        ...

    async def ours(self, ledger_id: int) -> Callable[[int], bool]:
        """Whether an entry may be this bookie's, by the record as it is now. Raises MagnetarError if that is not known."""
        ...

    async def confirm(self, found: Any) -> bool:
        """Of what `unassigned` returned: raises the version of the record; False if it has changed since it was read."""
        ...
