"""Reads of entries that readers of the same region share: one that is in flight, and a window of what was read just now.

    wanted --in the window--> given, without a read
       |--a read in flight will bring it--> waited for, then looked for again
       `--else--> read, up to where a read in flight begins; what it brings stays in the window until newer reads push it out

Twenty readers that start at the same place cost the bookies one reader's reads, as long as they stay within the window of
each other; one that drifts further away reads for itself. Entries in the window are the same bytes objects that readers
hold, and the window has a byte budget of its own, over all topics: neither the tail cache nor what subscriptions hold is
pushed out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from magnetar.proto.errors import MagnetarError

from ..cursors.core.acks import EntryKey

_OBJECT_BYTES = 250  # around the bytes of an entry

Fetch = Callable[[int, int], Awaitable[list[bytes]]]


@dataclass(slots=True, eq=False)
class _ReadInFlight:
    first: int
    end: int  # behind the last entry that it is expected to bring
    done: asyncio.Future[MagnetarError | None]


class SharedReads:
    """The reads of all topics of a broker. Stored ids of ledgers are unique, so they are keys over all topics."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of the window."""
        self.limit = limit
        self.used = 0
        # Reads that were answered from the window, also after they had waited for another one.
        self.joined = 0
        self.fetched_bytes = 0  # by the others
        self._window: OrderedDict[EntryKey, bytes] = OrderedDict()  # in the order of reading
        self._in_flight: dict[int, list[_ReadInFlight]] = {}  # by ledger

    async def read(
        self, ledger: int, first: int, last: int, fetch: Fetch, *, max_bytes: int, entry_bytes: int
    ) -> list[bytes]:
        """Entries first..last of a ledger: at least one, else as many as fit in `max_bytes`.

        `fetch(first, last)` reads them if need be, at most `max_bytes`; `entry_bytes`: about the size of one. Raises what
        `fetch` raised, also to those who waited for the same first entry.
        """
        end = min(first + max(1, max_bytes // max(entry_bytes, 1)), last + 1)
        waited: _ReadInFlight | None = None
        while not (found := self._from_window(ledger, first, last, max_bytes)):
            others = self._in_flight.get(ledger, ())
            bringing = next((one for one in others if one.first <= first < one.end), None)
            if bringing is None or waited is not None:
                # Entries were smaller or larger than expected, or the one who read gave up: no second wait.
                last = min([last, *(one.first - 1 for one in others if first < one.first < end)])
                return await self._fetch(ledger, first, last, end, fetch)
            waited = bringing
            error = await asyncio.shield(bringing.done)
            if error is not None and bringing.first == first:
                raise type(error)(error.message)
        self.joined += 1
        return found

    def _from_window(self, ledger: int, first: int, last: int, max_bytes: int) -> list[bytes]:
        window = self._window
        found: list[bytes] = []
        size = 0
        for entry_id in range(first, last + 1):
            entry = window.get((ledger, entry_id))
            if entry is None:
                break
            size += len(entry)
            if found and size > max_bytes:
                break
            found.append(entry)
        return found

    async def _fetch(self, ledger: int, first: int, last: int, end: int, fetch: Fetch) -> list[bytes]:
        reading = _ReadInFlight(first, min(end, last + 1), asyncio.get_running_loop().create_future())
        in_flight = self._in_flight.setdefault(ledger, [])
        in_flight.append(reading)
        failure: MagnetarError | None = None
        try:
            entries = await fetch(first, last)
            self.fetched_bytes += sum(map(len, entries))
            for number, entry in enumerate(entries):
                self._keep((ledger, first + number), entry)
            return entries
        except MagnetarError as error:
            failure = error
            raise
        finally:  # also when the one who reads is cancelled: those who wait read for themselves
            in_flight.remove(reading)
            if not in_flight:
                del self._in_flight[ledger]
            reading.done.set_result(failure)

    def _keep(self, key: EntryKey, entry: bytes) -> None:
        if key in self._window:
            return
        self._window[key] = entry
        self.used += len(entry) + _OBJECT_BYTES
        while self.used > self.limit:
            _, old = self._window.popitem(last=False)
            self.used -= len(old) + _OBJECT_BYTES
