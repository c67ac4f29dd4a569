"""Copying entries from good replicas to bookies that are to have them.

    read (verified digest, one replica after another) ──> throttle ──> recovery add to the target ──> durable

An entry is copied exactly as it was written. Bytes that are on their way are bounded, and so is the rate of all copies of
this process. When `copy` returns, every entry is durable at its targets; when it raises, or is cancelled, some may be there,
which does no harm: the record does not name the target yet, and an entry that is added again replaces itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from magnetar.ledger.components import LedgerComponents
from magnetar.ledger.core.metadata import Fragment, LedgerMetadata
from magnetar.ledger.core.outstanding_adds import MAX_ADD_TIMEOUTS
from magnetar.ledger.replicas import SILENT, first_good, most_significant, verified
from magnetar.proto.errors import (
    EntryDamaged,
    MagnetarError,
    TooManyRequests,
    error_name,
)
from magnetar.proto.stripe import EVERY_ENTRY, Stripe

_READ_BYTES = 1 << 20  # of one answer, unless its first entry is larger
# Added in one turn of the loop. Short bursts disturb writers less than long ones at the same rate.
_SLICE_BYTES = 64 * 1024
_SLICE_ENTRIES = 50
_BUSY_PAUSE_S = 0.2  # before a target that had too much to do gets an entry again
_LEAST_SLEEP_S = 0.005  # shorter sleeps cost more than they spread

# (bookie, ledger id, first entry, last entry, reason): a copy that turned out to be damaged.
DamageFound = Callable[[str, int, int, int, str], None]


class TargetFailed(Exception):
    """A bookie does not take the entries."""

    def __init__(self, bookie: str, reason: str) -> None:
        super().__init__(f"bookie {bookie} does not take entries: {reason}")
        self.bookie = bookie


class SourceFailed(Exception):
    """No replica has a good copy of an entry that can be read now. `lost`: none will have, all of them answered."""

    def __init__(self, entry_id: int, error: MagnetarError) -> None:
        super().__init__(f"no good copy of entry {entry_id} can be read: {error.message}")
        self.entry_id = entry_id
        self.reason = error
        self.lost = not isinstance(error, SILENT) and not error.retryable


class Throttle:
    """Bytes per second over all copies of this process."""

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = float(bytes_per_s)
        self._ahead_until = 0.0
        self.copied_bytes = 0

    async def spend(self, size: int) -> None:
        """Waits until so many more bytes may be copied. Gives the loop a turn in any case."""
        now = asyncio.get_running_loop().time()
        self.copied_bytes += size
        self._ahead_until = max(self._ahead_until, now) + size / self._rate
        wait_s = self._ahead_until - now
        await asyncio.sleep(wait_s if wait_s > _LEAST_SLEEP_S else 0)


class EntryCopier:
    """Reads and copies for all repairs of a process."""

    def __init__(
        self,
        components: LedgerComponents,
        throttle: Throttle,
        bytes_in_flight: int,
        damage_found: DamageFound,
    ) -> None:
        self.copied_entries = 0
        self._components = components
        self._throttle = throttle
        self._bytes_in_flight = bytes_in_flight
        self._damage_found = damage_found

    async def copy(
        self,
        ledger_id: int,
        metadata: LedgerMetadata,
        fragment: Fragment,
        targets: Mapping[int, str],
        registered: Mapping[str, None],
        skip: Callable[[SourceFailed], bool] = lambda _: False,
    ) -> int:
        """What these positions hold of the fragment is durable at their targets when it returns; how many entries were read.

        TargetFailed, SourceFailed unless it `skip` that entry. `registered`: other bookies are asked last.
        """
        copied = 0
        if fragment.empty:
            return copied
        assert fragment.last is not None
        striping = metadata.striping
        window = _Adds(self._components, ledger_id, self._bytes_in_flight)
        wanted = striping.stripe_of(targets)
        for residue in range(wanted.cycle):
            if not wanted.holds(residue):
                continue
            stripe = Stripe(wanted.cycle, 1 << residue)  # each has a write set of its own
            write_set = striping.write_sets[residue]
            takers = [targets[position] for position in write_set if position in targets]
            sources = in_order(fragment.bookies, write_set, registered, ledger_id)
            sources = [bookie for bookie in sources if bookie not in takers]
            following = fragment.first + (residue - fragment.first) % stripe.cycle
            while following <= fragment.last:
                try:
                    entries = await self.read(ledger_id, following, fragment.last, stripe, sources)
                except SourceFailed as error:
                    if not skip(error):
                        raise
                    following += stripe.cycle
                    continue
                copied += len(entries)
                ids = stripe.ids(following, fragment.last, len(entries))
                for bookie in takers:
                    await self._add(window, bookie, list(zip(ids, entries, strict=True)))
                following = ids[-1] + stripe.cycle
        await window.drained()
        return copied

    async def _add(self, window: _Adds, bookie: str, entries: Sequence[tuple[int, bytes]]) -> None:
        """In slices, so that neither a turn of the loop nor a burst of bytes is long."""
        slice_bytes = slice_entries = 0
        for entry_id, entry in entries:
            if slice_bytes >= _SLICE_BYTES or slice_entries >= _SLICE_ENTRIES:
                await self._throttle.spend(slice_bytes)
                slice_bytes = slice_entries = 0
            await window.add(bookie, entry_id, entry)
            self.copied_entries += 1
            slice_bytes += len(entry)
            slice_entries += 1
        await self._throttle.spend(slice_bytes)

    async def read(
        self, ledger_id: int, first: int, last: int, stripe: Stripe, sources: Sequence[str]
    ) -> list[bytes]:
        """Verified entries of the stripe from `first` on, at least one. SourceFailed."""

        def ask(bookie: str) -> Coroutine[Any, Any, list[bytes]]:
            return self.read_copy(bookie, ledger_id, first, last, stripe)

        errors: list[MagnetarError] = []
        c = self._components
        entries = await first_good(sources, ask, c.settings.speculative_read_s, c.health.slow, errors)
        if entries is None:
            raise SourceFailed(first, most_significant(errors, ledger_id, first))
        return entries

    async def read_copy(
        self, bookie: str, ledger_id: int, first: int, last: int, stripe: Stripe = EVERY_ENTRY
    ) -> list[bytes]:
        """The copies of one bookie, verified, up to the first one that is missing or damaged; as its errors say."""
        try:
            result = await self._components.transport.read(
                bookie, ledger_id, first, last, max_bytes=_READ_BYTES, stripe=stripe
            )
            return verified(result.entries, ledger_id, stripe.ids(first, last, len(result.entries)), bookie)
        except SILENT as error:
            self._components.health.failed(bookie, error.code)
            raise
        except EntryDamaged as error:
            self._damage_found(bookie, ledger_id, first, first, error.message)
            raise


class _Adds:
    """Recovery adds on their way, bounded in bytes. The first bookie that fails fails all of them."""

    def __init__(self, components: LedgerComponents, ledger_id: int, limit: int) -> None:
        self._components = components
        self._ledger_id = ledger_id
        self._limit = limit
        self._bytes = 0
        self._entries: dict[tuple[str, int], bytes] = {}  # without an answer, or waiting to be sent again
        self._changed = asyncio.Event()
        self._failed: TargetFailed | None = None
        # Loop time since which bookies only say that they have too much to do.
        self._busy_since: float | None = None
        self._done = self._on_done

    async def add(self, bookie: str, entry_id: int, entry: bytes) -> None:
        """Sends an entry as soon as there is room. TargetFailed."""
        while self._entries and self._bytes + len(entry) > self._limit:
            await self._wait()
        if self._failed is not None:
            raise self._failed
        self._entries[bookie, entry_id] = entry
        self._bytes += len(entry)
        self._send(bookie, entry_id, entry)

    async def drained(self) -> None:
        """Returns when all of them are durable. TargetFailed."""
        while self._entries:
            await self._wait()
        if self._failed is not None:
            raise self._failed

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        if self._failed is not None:
            raise self._failed

    def _send(self, bookie: str, entry_id: int, entry: bytes) -> None:
        self._components.transport.add(
            bookie, entry, self._ledger_id, entry_id, recovery=True, done=self._done
        )

    def _on_done(self, bookie: str, _ledger_id: int, entry_id: int, code: int) -> None:
        entry = self._entries.get((bookie, entry_id))
        if entry is None or self._failed is not None:
            return
        loop = asyncio.get_running_loop()
        if code == TooManyRequests.code and self._still_patient(loop.time()):
            loop.call_later(_BUSY_PAUSE_S, self._send_again, bookie, entry_id)
            return
        if code:
            self._components.health.failed(bookie, code)
            self._failed = TargetFailed(bookie, error_name(code))
        else:
            self._busy_since = None
            del self._entries[bookie, entry_id]
            self._bytes -= len(entry)
        self._changed.set()

    def _still_patient(self, now: float) -> bool:
        if self._busy_since is None:
            self._busy_since = now
        return now - self._busy_since <= MAX_ADD_TIMEOUTS * self._components.settings.add_timeout_s

    def _send_again(self, bookie: str, entry_id: int) -> None:
        entry = self._entries.get((bookie, entry_id))
        if entry is not None and self._failed is None:
            self._send(bookie, entry_id, entry)


def in_order(
    bookies: Sequence[str], write_set: Sequence[int], registered: Mapping[str, None], start: int
) -> list[str]:
    """The bookies of a write set, in the order in which a repair asks them: those that are not registered come last."""
    begin = start % len(write_set)
    order = [bookies[position] for position in (*write_set[begin:], *write_set[:begin])]
    return sorted(order, key=lambda bookie: bookie not in registered)
