"""The transport to bookies of the same process: standalone, tests, the simulation.

It is wired by whoever sees both rooms; here a bookie is anything with the methods of `LocalBookie`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from magnetar.proto.errors import BookieUnavailable, ConnectionLost, MagnetarError

from .transport import AddCallback, LastConfirmed, ReadResult


class LocalBookie(Protocol):
    """What the transport needs of a bookie (bookie.Bookie has it). `add` never calls `done` from within."""

    def add(self, entry: bytes, *, recovery: bool, done: Callable[[int, int, int], None]) -> None:
        """Stores an entry."""
        ...

    async def read(
        self, ledger_id: int, first: int, last: int, *, max_bytes: int, fence: bool
    ) -> tuple[list[bytes], int]:
        """Entries and LAC."""
        ...

    async def read_last_confirmed(self, ledger_id: int, *, fence: bool) -> tuple[int, int]:
        """LAC and last entry."""
        ...

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit LAC."""
        ...

    def info(self) -> dict[str, Any]:
        """Free space and state."""
        ...


class LocalTransport:
    """BookieTransport over bookies of this process, which it does not own."""

    def __init__(self, bookies: Mapping[str, LocalBookie]) -> None:
        self._bookies = bookies
        self._closed = False

    def add(
        self, bookie: str, entry: bytes, ledger_id: int, entry_id: int, *, recovery: bool, done: AddCallback
    ) -> None:
        """See BookieTransport."""
        target = self._bookies.get(bookie)
        if target is None or self._closed:
            code = ConnectionLost.code if self._closed else BookieUnavailable.code
            asyncio.get_running_loop().call_soon(done, bookie, ledger_id, entry_id, code)
            return
        try:
            target.add(entry, recovery=recovery, done=partial(done, bookie))
        except MagnetarError as error:
            asyncio.get_running_loop().call_soon(done, bookie, ledger_id, entry_id, error.code)

    async def read(
        self, bookie: str, ledger_id: int, first: int, last: int, *, max_bytes: int = 0, fence: bool = False
    ) -> ReadResult:
        """See BookieTransport."""
        return ReadResult(
            *await self._bookie(bookie).read(ledger_id, first, last, max_bytes=max_bytes, fence=fence)
        )

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> LastConfirmed:
        """See BookieTransport."""
        return LastConfirmed(*await self._bookie(bookie).read_last_confirmed(ledger_id, fence=fence))

    async def write_last_confirmed(self, bookie: str, ledger_id: int, last_add_confirmed: int) -> None:
        """See BookieTransport."""
        await self._bookie(bookie).write_last_confirmed(ledger_id, last_add_confirmed)

    async def info(self, bookie: str) -> dict[str, Any]:
        """See BookieTransport."""
        return self._bookie(bookie).info()

    async def close(self) -> None:
        """Refuses further calls; the bookies stay open."""
        self._closed = True

    def _bookie(self, name: str) -> LocalBookie:
        if self._closed:
            raise ConnectionLost("the transport to the bookies is closed")
        found = self._bookies.get(name)
        if found is None:
            raise BookieUnavailable(f"bookie {name} is not one of this process ({', '.join(self._bookies)})")
        return found
