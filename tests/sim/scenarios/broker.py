"""Broker, ledger client, metadata and clients for real; the bookie is a model that is durable after a while.

The model answers an add when it is durable. A crash keeps what is durable and, of the rest, what the seed has it keep.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from typing import Any

from magnetar.broker import Broker, BrokerSettings, listener
from magnetar.ledger import LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import EntryNotFound, LedgerFenced, LedgerNotFound
from magnetar.proto.ledger_entry import verify_ledger_entry
from magnetar.proto.stripe import EVERY_ENTRY, Stripe
from magnetar.runtime.connection import ConnectionOptions, start_server
from sim.storm import PORT, play_storm
from support.answering import Answering
from support.memory_metadata import MemoryMetadataStore, ModelKeyValue
from support.sim import SimClock, SimLoop, SimProcess, Trace

EXPECTED_FAULTS = ("crash_process", "crash_power", "cut", "partition", "pause", "stop")

# Small, so that rollovers, cursor snapshots and full queues happen within a run.
BROKER_SETTINGS = BrokerSettings(
    max_ledger_entries=40,
    max_entry_bytes=64 * 1024,
    max_cursor_ledger_entries=25,
    max_outstanding_entries=3,
    maintenance_interval_s=3.0,
    min_ledger_age_ms=500,
    max_ledger_age_ms=2_000,
)
Done = Callable[[int, int, int], None]


class ModelBookie(Answering):
    """`ledger.local_transport.LocalBookie` whose storage survives its process."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.entries: dict[tuple[int, int], bytes] = {}
        self.fenced: dict[int, None] = {}
        self.deleted: dict[int, None] = {}
        self._pending: dict[tuple[int, int], bytes] = {}
        self.accepting = True
        self.waits_for_room = False
        self.on_accepting: list[Callable[[], None]] = []

    def crashed(self) -> None:
        """Some of what was not durable is."""
        for key, entry in self._pending.items():
            if self._loop.rng.random() < 0.5:
                self.entries[key] = entry
        self._pending.clear()

    def request_force(self, ledger_id: int) -> None:
        """See LocalBookie: the broker defers nothing."""

    def add(self, entry: bytes, *, recovery: bool, done: Done, deferred: bool = False) -> None:
        """See LocalBookie."""
        header = verify_ledger_entry(entry)
        ledger_id, entry_id = header.ledger_id, header.entry_id
        if ledger_id in self.fenced and not recovery:
            self._loop.call_soon(done, ledger_id, entry_id, LedgerFenced.code)
            return
        self._pending[ledger_id, entry_id] = entry

        def durable() -> None:
            self.entries[ledger_id, entry_id] = self._pending.pop((ledger_id, entry_id), entry)
            done(ledger_id, entry_id, 0)

        self._loop.call_later(self._loop.rng.uniform(0.0001, 0.003), durable)

    async def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        max_bytes: int,
        fence: bool,
        stripe: Stripe = EVERY_ENTRY,
    ) -> tuple[list[bytes], int]:
        """See LocalBookie."""
        await self._fence(ledger_id, fence)
        found: list[bytes] = []
        size = 0
        for entry_id in stripe.ids(first, last):
            entry = self.entries.get((ledger_id, entry_id))
            if entry is None or (found and max_bytes and size + len(entry) > max_bytes):
                break
            found.append(entry)
            size += len(entry)
        if not found:
            raise EntryNotFound(f"no entry {first}")
        return found, self._last_confirmed(ledger_id)

    async def read_last_confirmed(self, ledger_id: int, *, fence: bool) -> tuple[int, int]:
        """See LocalBookie."""
        await self._fence(ledger_id, fence)
        ids = [entry_id for ledger, entry_id in self.entries if ledger == ledger_id]
        if not ids and ledger_id not in self.fenced:
            raise LedgerNotFound(f"no ledger {ledger_id}")
        return self._last_confirmed(ledger_id), max(ids, default=-1)

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """See LocalBookie: it may be forgotten."""
        await asyncio.sleep(0)

    async def wait_last_confirmed(
        self, ledger_id: int, last_add_confirmed: int, *, timeout_s: float, max_entries: int, max_bytes: int
    ) -> tuple[int, bool, list[bytes]]:
        """See LocalBookie: the broker does not ask."""
        await asyncio.sleep(timeout_s)
        return self._last_confirmed(ledger_id), ledger_id in self.fenced, []

    async def delete_ledger(self, ledger_id: int) -> None:
        """See LocalBookie: it may be forgotten."""
        await asyncio.sleep(self._loop.rng.uniform(0.0, 0.002))
        if ledger_id in self.deleted:
            return
        self.deleted[ledger_id] = None
        self.entries = {key: entry for key, entry in self.entries.items() if key[0] != ledger_id}

    def list_ledgers(self, after: int, count: int) -> tuple[Sequence[tuple[int, bool, bool, int, int]], bool]:
        """See LocalBookie: nobody asks."""
        return [], False

    async def list_entries(
        self, ledger_id: int, first: int, count: int
    ) -> tuple[Sequence[tuple[int, int]], int]:
        """See LocalBookie: nobody asks."""
        return [], -1

    def info(self) -> dict[str, Any]:
        """See LocalBookie."""
        return {"bookie_id": "b", "free_bytes": 1 << 30, "total_bytes": 1 << 31, "read_only": False}

    async def _fence(self, ledger_id: int, fence: bool) -> None:
        await asyncio.sleep(self._loop.rng.uniform(0.0, 0.002))
        if fence:
            self.fenced[ledger_id] = None

    def _last_confirmed(self, ledger_id: int) -> int:
        confirmed = [
            verify_ledger_entry(entry).last_add_confirmed
            for (ledger, _), entry in self.entries.items()
            if ledger == ledger_id
        ]
        return max(confirmed, default=-1)


class BrokerBackend:
    """See sim.storm.Backend."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._metadata = ModelKeyValue()
        self._bookie = ModelBookie(loop)
        self._serving: SimProcess | None = None

    async def serve(self, process: SimProcess) -> None:
        """See Backend."""
        clock = SimClock(self._loop)
        metadata = MemoryMetadataStore(self._metadata)
        rng = random.Random(self._loop.rng.getrandbits(64))
        ledgers = LedgerClient(
            StoredLedgers(metadata),
            LocalTransport({"b": self._bookie}),
            StaticBookies({"b": ("127.0.0.1", 3181)}),
            LedgerSettings(ensemble_size=1, write_quorum=1, ack_quorum=1),
            rng,
            clock,
        )
        broker = Broker(metadata, ledgers, BROKER_SETTINGS, clock)
        await broker.start()
        options = ConnectionOptions("broker", ping_interval_s=2.0)
        server = await start_server("127.0.0.1", PORT, listener(broker), options)
        stopping = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGTERM, stopping.set)
        self._serving = process
        await stopping.wait()
        server.stop_accepting()
        await broker.close(drain_seconds=0.5)
        await server.close(0.25)

    def stop(self, process: SimProcess) -> bool:
        """See Backend."""
        if self._serving is not process:
            return False
        self._loop.deliver_signal(process, signal.SIGTERM)
        return True

    def crashed(self, *, power: bool) -> None:
        """See Backend."""
        self._bookie.crashed()

    def crash_during_disk_call(self, crash: Callable[[], None]) -> bool:
        """See Backend."""
        return False

    def break_disk(self) -> bool:
        """See Backend."""
        return False

    def heal(self) -> None:
        """See Backend."""


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    return play_storm(seed, trace, BrokerBackend)
