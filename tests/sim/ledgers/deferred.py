"""Writers of ledgers with deferred sync: what `force` confirmed is never lost, nor anything that a reader saw.

Entries are answered when they are accepted, which is no promise: the history hears of an entry when the writer's
last-add-confirmed reaches it. A force may not return before that; now and then the power fails everywhere when it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from magnetar.ledger import LedgerClient, LedgerWriter
from magnetar.proto.errors import EntriesNotForced, MagnetarError
from sim.deliveries import Violation
from sim.ledgers.clients import SIZES, Writer

MAX_UNCONFIRMED = 150
ORDINARY = 0.2  # of the writers
FORCE = 0.25  # after a burst
OUTAGE = 0.1  # after a force
REST = 0.08  # after a burst: nothing is under way, bookies restart, and then it forces
REST_S = (0.2, 0.9)


class DeferredWriter(Writer):
    """Most of them defer; the others sync the journals that all share."""

    _accepted = -1
    _forcing: asyncio.Task[None] | None = None

    async def create(self, client: LedgerClient) -> Any:
        """Instead of an ordinary writer."""
        if self._rng.random() < ORDINARY:
            return await super().create(client)
        writer = await client.create(deferred_sync=True)
        assert writer.deferred_sync
        self._listen(writer)
        return writer

    def _listen(self, writer: LedgerWriter) -> None:
        confirm = writer._confirm

        def confirmed(first: int, adds: Sequence[Any], error: MagnetarError | None) -> None:
            assert self.ledger is not None
            for entry_id, add in enumerate(adds if error is None else (), first):
                self._context.loop.trace.record("durable", self.ledger.ledger_id, entry_id)
                self._context.history.acknowledged(self.ledger, entry_id, add.entry)
            confirm(first, adds, error)

        writer._confirm = confirmed  # type: ignore[method-assign,assignment]

    def _append(self, count: int) -> None:
        ledger, writer = self.ledger, self.writer
        if writer is None or not writer.deferred_sync:
            super()._append(count)
            return
        assert ledger is not None
        for _ in range(count):
            if len(ledger.sent) - ledger.confirmed > MAX_UNCONFIRMED or len(ledger.sent) >= self.limit:
                break
            payload = b"%d/%d/" % (ledger.ledger_id, len(ledger.sent)) + bytes(self._rng.choice(SIZES))
            entry_id = writer.append(payload, self._answered)
            if entry_id >= 0:
                self._context.history.sent(ledger, entry_id, payload)
            else:
                self._context.history.refused += 1
        if self._rng.random() < REST:
            self.quiet = True
            self._context.loop.call_later(self._rng.uniform(*REST_S), self._rested, writer)
        elif self._rng.random() < FORCE:
            self._start_force(writer)

    def _rested(self, writer: LedgerWriter) -> None:
        self.quiet = False
        self._start_force(writer)

    def _start_force(self, writer: LedgerWriter) -> None:
        if self._forcing is None or self._forcing.done():
            self._forcing = self._context.loop.create_task(self._force(writer), name="force")

    def _answered(self, entry_id: int, _entry: bytes, error: MagnetarError | None) -> None:
        assert self.ledger is not None
        if error is not None:
            self.error = error
            self._context.history.refused += 1
        elif entry_id != self._accepted + 1:
            raise Violation(f"ledger {self.ledger.ledger_id}: {entry_id} was answered after {self._accepted}")
        else:
            self._accepted = entry_id
            self._context.loop.trace.record("accepted", self.ledger.ledger_id, entry_id)

    async def _close(self, writer: LedgerWriter) -> None:
        try:
            await super()._close(writer)
        except EntriesNotForced as error:  # closed, with less than was answered; somebody else reads it
            self.error = error

    async def _force(self, writer: LedgerWriter) -> None:
        ledger, context = self.ledger, self._context
        assert ledger is not None
        last = writer.last_add_pushed
        try:
            await writer.force()
        except MagnetarError as error:
            self.error = self.error or error
            return
        if ledger.confirmed < last or writer.last_add_confirmed < last:
            raise Violation(
                f"ledger {ledger.ledger_id}: force returned with {ledger.confirmed} confirmed, {last} was to be"
            )
        if self._rng.random() < OUTAGE:
            context.loop.trace.fault("outage_after_force")
            context.loop.call_outside(0.0, context.power_fails)
