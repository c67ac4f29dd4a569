"""An entry whose place was recorded before it is appended, so that whoever loads the topic finds out whether it is there.

    hold --> room --record `next_place` in the list--> append there, while it still is the next place --> release

While somebody holds, nobody else appends; what was appended before goes on being confirmed. Such an entry stays at its
place: if its ledger is closed without it, it is withdrawn, where others move to the next ledger. See ARCHITECTURE.md, small
batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from magnetar.proto.errors import FinalError, TopicNotServed
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..resources.stores import Ledgers
from .ledger_list import LedgerList

if TYPE_CHECKING:
    from .managed_ledger import ManagedLedger

_log = logging.getLogger(__name__)

_DIGEST_BYTES = 16


def digest_of(payload: bytes) -> bytes:
    """By which an entry is known again."""
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()


class PlacedEntry:
    """What becomes of such an entry.

    `settled`: True once it is confirmed, False if its ledger was closed without it. `confirmed` is called at once then,
    before anything else can happen to the ledger.
    """

    __slots__ = ("_confirmed", "settled")

    def __init__(self, confirmed: Callable[[], None]) -> None:
        self._confirmed = confirmed
        self.settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def settle(self, confirmed: bool) -> None:
        """Its outcome is known."""
        if confirmed:
            self._confirmed()
        if not self.settled.done():
            self.settled.set_result(confirmed)

    def abandon(self) -> None:
        """Nobody here will know: whoever loads the topic next finds out."""
        if not self.settled.done():
            self.settled.set_exception(
                TopicNotServed("the topic is not served here any more; look it up again")
            )


class Placing:
    """Who may append to a managed ledger: everybody, or the one who holds."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """`ready`: tells those who wait to append that they may again."""
        self.held = False
        self._ready = ready
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Nobody else appends meanwhile; one holder at a time."""
        assert not self.held
        self.held = True
        try:
            yield
        finally:
            self.held = False
            self._ready()

    def look_again(self) -> None:
        """The ledger's state, or what is pending, changed."""
        self._changed.set()

    async def room(self, ledger: ManagedLedger[Any]) -> None:
        """For who holds: returns when there is a `next_place`. Raises TopicNotServed."""
        while ledger.next_place is None:
            ledger.check_served()
            self._changed.clear()
            ledger.wake()
            await self._changed.wait()


async def settle_places(ledgers: LedgerList, stores: Ledgers) -> None:
    """At loading, when all ledgers are closed: which of the recorded entries were appended. To be stored."""
    for query, state in ledgers.record.publishing.items():
        info = ledgers.info(state.ledger_id)
        if state.confirmed or info is None or state.entry_id >= info.entries:
            continue
        try:
            reader = await stores.open(info.stored_id, recover=False)
            data = (await reader.read(state.entry_id, state.entry_id))[0]
        except FinalError as error:  # lost, but it was there; who else would have appended it?
            _log.warning(
                "topic %s: batch %d of %s cannot be read: %s", ledgers.name, state.batch, query, error
            )
            state.confirmed = True
        else:
            state.confirmed = digest_of(data[LEDGER_ENTRY_HEADER_BYTES:]) == state.digest
