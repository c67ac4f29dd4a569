"""The transport to bookies of the same process: standalone, tests, the simulation.

`cli` wires it, which sees both rooms; here a bookie is anything with the methods of `LocalBookie`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from magnetar.proto.commands import Command
from magnetar.proto.errors import BookieUnavailable, ConnectionLost, RequestTimeout
from magnetar.runtime.timeouts import TimeLimit

from .core.outstanding_adds import AddCallback
from .local_bookie import LocalBookie
from .local_link import LocalLink
from .transport import Answer, BookieTransport


class LocalTransport(BookieTransport):
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

    async def ask(self, bookie: str, command: Command, longer_s: float = 0.0) -> Answer:
        if self._closed:
            raise ConnectionLost("the transport to the bookies is closed")
        target = self._bookies.get(bookie)
        if target is None:
            raise BookieUnavailable(
                f"bookie {bookie} is not one of this process ({', '.join(self._bookies)})"
            )
        late = f"bookie {bookie} did not answer within read_timeout_s={self._read_timeout_s:g} s"
        async with TimeLimit(self._read_timeout_s + longer_s, lambda: RequestTimeout(late)):
            return Answer(*await target.answer(command))

    async def close(self) -> None:
        """Refuses further calls; the bookies stay open."""
        self._closed = True
        for link in (*self._links.values(), *self._recovery_links.values()):
            if not link.failed:
                link.fail(ConnectionLost.code)
