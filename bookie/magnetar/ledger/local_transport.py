"""The transport to bookies of the same process: standalone, tests, the simulation.

`cli` wires it, which sees both rooms; here a bookie is anything with the methods of `LocalBookie`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from magnetar.proto.errors import BookieUnavailable, ConnectionLost, MagnetarError, RequestTimeout
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

from .awaited_adds import AwaitedAdds
from .transport import (
    AddCallback,
    EntryPage,
    LastConfirmed,
    LedgerPage,
    ListedLedger,
    LongPollAnswer,
    ReadResult,
)
from .waiting_adds import WaitingAdds

T = TypeVar("T")


class LocalBookie(Protocol):
    """What the transport needs of a bookie (bookie.Bookie has it). `add` never calls `done` from within."""

    # Called when `accepting` becomes true again.
    on_accepting: list[Callable[[], None]]

    @property
    def accepting(self) -> bool:
        """False while adds wait for room in its write cache."""
        ...

    def add(
        self,
        entry: bytes,
        *,
        recovery: bool,
        done: Callable[[int, int, int], None],
        deferred: bool = False,
    ) -> None:
        """Stores an entry. A deferred one is answered with ADD_ACCEPTED as well."""
        ...

    def request_force(self, ledger_id: int) -> None:
        """Deferred adds of the ledger shall become durable."""
        ...

    async def read(
        self, ledger_id: int, first: int, last: int, *, max_bytes: int, fence: bool, stripe: Stripe
    ) -> tuple[list[bytes], int]:
        """Entries and LAC."""
        ...

    async def read_last_confirmed(self, ledger_id: int, *, fence: bool) -> tuple[int, int]:
        """LAC and last entry."""
        ...

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit LAC."""
        ...

    async def wait_last_confirmed(
        self, ledger_id: int, last_add_confirmed: int, *, timeout_s: float, max_entries: int, max_bytes: int
    ) -> tuple[int, bool, list[bytes]]:
        """LAC, whether the ledger is fenced, and entries."""
        ...

    async def delete_ledger(self, ledger_id: int) -> None:
        """Drops it."""
        ...

    def list_ledgers(self, after: int, count: int) -> tuple[Sequence[tuple[int, bool, bool, int, int]], bool]:
        """Ledgers, and whether there are more."""
        ...

    async def list_entries(
        self, ledger_id: int, first: int, count: int
    ) -> tuple[Sequence[tuple[int, int]], int]:
        """Ranges, and where to go on."""
        ...

    def info(self) -> dict[str, Any]:
        """Disks, state and load."""
        ...


class LocalTransport:
    """BookieTransport over bookies of this process, which it does not own.

    An add that a bookie has no room for waits here, `add_wait_s` at most (see `waiting_adds`); one that it took and does not
    answer fails after `add_timeout_s` (see `awaited_adds`), a request after `read_timeout_s` (rule 21).
    """

    def __init__(
        self,
        bookies: Mapping[str, LocalBookie],
        *,
        add_wait_s: float = 10.0,
        add_timeout_s: float = 5.0,
        read_timeout_s: float = 5.0,
    ) -> None:
        self._bookies = bookies
        self._add_wait_s = add_wait_s
        self._add_timeout_s = add_timeout_s
        self._read_timeout_s = read_timeout_s
        self._awaited: dict[str, AwaitedAdds] = {}
        self._waiting: dict[str, WaitingAdds] = {}
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
        """See BookieTransport."""
        target = self._bookies.get(bookie)
        if target is None or self._closed:
            code = ConnectionLost.code if self._closed else BookieUnavailable.code
            asyncio.get_running_loop().call_soon(done, bookie, ledger_id, entry_id, code)
            return
        awaited = self._awaited.get(bookie) or self._await(bookie)
        answer = (awaited.add_deferred if deferred else awaited.add)(ledger_id, entry_id, done)
        if target.accepting and not self._waiting.get(bookie):
            _give(target, entry, ledger_id, entry_id, recovery, answer, deferred)
        else:
            waiting = self._waiting.get(bookie) or self._waiting_adds(bookie, target)
            waiting.put(entry, ledger_id, entry_id, recovery, answer, deferred)

    def force(self, bookie: str, ledger_id: int) -> None:
        """See BookieTransport."""
        target, awaited = self._bookies.get(bookie), self._awaited.get(bookie)
        if target is None or awaited is None or self._closed:
            return
        awaited.force(ledger_id)
        if (waiting := self._waiting.get(bookie)) is not None:
            waiting.force(ledger_id)
        target.request_force(ledger_id)

    def expect(self, bookie: str) -> None:
        """See BookieTransport: nothing to reach here."""

    def _await(self, bookie: str) -> AwaitedAdds:
        awaited = AwaitedAdds(bookie, self._add_timeout_s, partial(self._full, bookie))
        self._awaited[bookie] = awaited
        return awaited

    def _full(self, bookie: str) -> bool:
        return not self._bookies[bookie].accepting

    def _waiting_adds(self, bookie: str, target: LocalBookie) -> WaitingAdds:
        waiting = self._waiting.get(bookie)
        if waiting is None:
            waiting = WaitingAdds(partial(_give, target), lambda: target.accepting, self._add_wait_s)
            self._waiting[bookie] = waiting
            target.on_accepting.append(waiting.release)
        return waiting

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
        """See BookieTransport."""
        read = self._bookie(bookie).read(
            ledger_id, first, last, max_bytes=max_bytes, fence=fence, stripe=stripe
        )
        return ReadResult(*await self._in_time(bookie, read))

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> LastConfirmed:
        """See BookieTransport."""
        read = self._bookie(bookie).read_last_confirmed(ledger_id, fence=fence)
        return LastConfirmed(*await self._in_time(bookie, read))

    async def write_last_confirmed(self, bookie: str, ledger_id: int, last_add_confirmed: int) -> None:
        """See BookieTransport."""
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
        """See BookieTransport."""
        wait = self._bookie(bookie).wait_last_confirmed(
            ledger_id,
            last_add_confirmed,
            timeout_s=max(timeout_s, 0.001),
            max_entries=max_entries,
            max_bytes=max_bytes,
        )
        return LongPollAnswer(*await self._in_time(bookie, wait, timeout_s))

    async def delete_ledger(self, bookie: str, ledger_id: int) -> None:
        """See BookieTransport."""
        await self._in_time(bookie, self._bookie(bookie).delete_ledger(ledger_id))

    async def list_ledgers(self, bookie: str, *, after: int = -1, count: int = 1000) -> LedgerPage:
        """See BookieTransport."""
        ledgers, more = self._bookie(bookie).list_ledgers(after, count)
        return LedgerPage([ListedLedger(*ledger) for ledger in ledgers], more)

    async def list_entries(
        self, bookie: str, ledger_id: int, *, first: int = 0, count: int = 1000
    ) -> EntryPage:
        """See BookieTransport."""
        entries = self._bookie(bookie).list_entries(ledger_id, first, count)
        ranges, following = await self._in_time(bookie, entries)
        return EntryPage([(begin, end) for begin, end in ranges], following)

    async def info(self, bookie: str) -> dict[str, Any]:
        """See BookieTransport."""
        return self._bookie(bookie).info()

    async def close(self) -> None:
        """Refuses further calls; the bookies stay open."""
        self._closed = True
        for bookie, waiting in self._waiting.items():
            self._bookies[bookie].on_accepting.remove(waiting.release)
            waiting.fail(ConnectionLost.code)
        self._waiting.clear()
        for awaited in self._awaited.values():
            awaited.fail(ConnectionLost.code)
        self._awaited.clear()

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


def _give(
    target: LocalBookie,
    entry: bytes,
    ledger_id: int,
    entry_id: int,
    recovery: bool,
    done: Callable[[int, int, int], None],
    deferred: bool,
) -> None:
    try:
        if deferred:
            target.add(entry, recovery=recovery, done=done, deferred=True)
        else:
            target.add(entry, recovery=recovery, done=done)
    except MagnetarError as error:  # bytes that are no entry
        asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, error.code)
