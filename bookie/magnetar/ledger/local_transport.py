"""The transport to bookies of the same process: standalone, tests, the simulation.

`cli` wires it, which sees both rooms; here a bookie is anything with the methods of `LocalBookie`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from magnetar.proto.errors import BookieUnavailable, ConnectionLost, RequestTimeout
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

from .local_bookie import LocalBookie
from .local_link import LocalLink
from .transport import (
    AddCallback,
    EntryPage,
    LastConfirmed,
    LedgerPage,
    ListedLedger,
    LongPollAnswer,
    ReadResult,
)

T = TypeVar("T")


class LocalTransport:
    """BookieTransport over bookies of this process, which it does not own.

    Adds fail as over TCP (see `core.outstanding_adds`), a request after `read_timeout_s` (rule 21).
    """

    def __init__(
        self,
        bookies: Mapping[str, LocalBookie],
        *,
        add_timeout_s: float = 5.0,
        read_timeout_s: float = 5.0,
        max_outstanding_bytes: int = 256 << 20,
    ) -> None:
        self._bookies = bookies
        self._add_timeout_s = add_timeout_s
        self._read_timeout_s = read_timeout_s
        self._max_outstanding_bytes = max_outstanding_bytes
        # Re-adds of recoveries apart: an answer does not say which of two adds of an entry it belongs to.
        self._links: dict[str, LocalLink] = {}
        self._recovery_links: dict[str, LocalLink] = {}
        self._closed = False

    def add(
        self,
        bookie: str,
        entry: bytes,
        ledger_id: int,
        entry_id: int,
        *,
        recovery: bool,
        done: AddCallback,
        deferred: bool = False,
    ) -> None:
        target = self._bookies.get(bookie)
        if target is None or self._closed:
            code = ConnectionLost.code if self._closed else BookieUnavailable.code
            asyncio.get_running_loop().call_soon(done, bookie, ledger_id, entry_id, code)
            return
        link = (self._recovery_links if recovery else self._links).get(bookie)
        if link is None or link.failed or link.target is not target:
            link = self._link(bookie, target, recovery)
        link.add(entry, ledger_id, entry_id, done, deferred)

    def force(self, bookie: str, ledger_id: int) -> None:
        link = self._links.get(bookie)
        if link is not None and not link.failed:
            link.force(ledger_id)

    def expect(self, bookie: str) -> None:
        """See BookieTransport: nothing to reach here."""

    def _link(self, bookie: str, target: LocalBookie, recovery: bool) -> LocalLink:
        links = self._recovery_links if recovery else self._links
        earlier = links.get(bookie)
        if earlier is not None and not earlier.failed:  # another bookie goes by this name now
            earlier.fail(ConnectionLost.code)
        link = LocalLink(bookie, target, recovery, self._add_timeout_s, self._max_outstanding_bytes)
        links[bookie] = link
        return link

    async def read(
        self,
        bookie: str,
        ledger_id: int,
        first: int,
        last: int,
        *,
        max_bytes: int = 0,
        fence: bool = False,
        stripe: Stripe = EVERY_ENTRY,
    ) -> ReadResult:
        read = self._bookie(bookie).read(
            ledger_id, first, last, max_bytes=max_bytes, fence=fence, stripe=stripe
        )
        return ReadResult(*await self._in_time(bookie, read))

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> LastConfirmed:
        read = self._bookie(bookie).read_last_confirmed(ledger_id, fence=fence)
        return LastConfirmed(*await self._in_time(bookie, read))

    async def write_last_confirmed(self, bookie: str, ledger_id: int, last_add_confirmed: int) -> None:
        write = self._bookie(bookie).write_last_confirmed(ledger_id, last_add_confirmed)
        await self._in_time(bookie, write)

    async def wait_last_confirmed(
        self,
        bookie: str,
        ledger_id: int,
        last_add_confirmed: int,
        *,
        timeout_s: float,
        max_entries: int = 0,
        max_bytes: int = 0,
    ) -> LongPollAnswer:
        wait = self._bookie(bookie).wait_last_confirmed(
            ledger_id,
            last_add_confirmed,
            timeout_s=max(timeout_s, 0.001),
            max_entries=max_entries,
            max_bytes=max_bytes,
        )
        return LongPollAnswer(*await self._in_time(bookie, wait, timeout_s))

    async def delete_ledger(self, bookie: str, ledger_id: int) -> None:
        await self._in_time(bookie, self._bookie(bookie).delete_ledger(ledger_id))

    async def list_ledgers(self, bookie: str, *, after: int = -1, count: int = 1000) -> LedgerPage:
        ledgers, more = self._bookie(bookie).list_ledgers(after, count)
        return LedgerPage([ListedLedger(*ledger) for ledger in ledgers], more)

    async def list_entries(
        self, bookie: str, ledger_id: int, *, first: int = 0, count: int = 1000
    ) -> EntryPage:
        entries = self._bookie(bookie).list_entries(ledger_id, first, count)
        ranges, following = await self._in_time(bookie, entries)
        return EntryPage([(begin, end) for begin, end in ranges], following)

    async def info(self, bookie: str) -> dict[str, Any]:
        return self._bookie(bookie).info()

    async def close(self) -> None:
        """Refuses further calls; the bookies stay open."""
        self._closed = True
        for link in (*self._links.values(), *self._recovery_links.values()):
            if not link.failed:
                link.fail(ConnectionLost.code)

    async def _in_time(self, bookie: str, work: Coroutine[Any, Any, T], longer_s: float = 0.0) -> T:
        try:
            async with asyncio.timeout(self._read_timeout_s + longer_s):
                return await work
        except TimeoutError:
            raise RequestTimeout(
                f"bookie {bookie} did not answer within read_timeout_s={self._read_timeout_s:g} s"
            ) from None

    def _bookie(self, name: str) -> LocalBookie:
        if self._closed:
            raise ConnectionLost("the transport to the bookies is closed")
        found = self._bookies.get(name)
        if found is None:
            raise BookieUnavailable(f"bookie {name} is not one of this process ({', '.join(self._bookies)})")
        return found
