"""The whole standalone service, as `magnetar standalone` assembles it, on a simulated machine.

Real: metadata tree, bookie (journal, write cache, entry logs, checkpoints, recovery), ledger client, broker, framed
connections, clients. Simulated: disk, network, clock, chance; the journal device is the inline one, location index and
metadata storage are models that keep what was flushed or synced.
"""

from __future__ import annotations

import asyncio
import errno
import random
import signal
from collections.abc import Callable, Mapping, Sequence

from magnetar.bookie import BookieSettings
from magnetar.bookie.index import Location
from magnetar.broker import BrokerSettings
from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.cli.wiring.service import Components, Service
from magnetar.cli.wiring.settings import DaemonSettings, ServiceSettings
from magnetar.ledger import LedgerSettings
from magnetar.ledger.replication.settings import RepairSettings
from magnetar.metadata.local import KeyValue, LocalMetadataStore
from magnetar.proto.errors import MagnetarError, StorageFailed
from sim.storm import PORT, play_storm
from support.index_model import ModelLocationIndex, ModelStorage
from support.inline_devices import inline_components
from support.memory_metadata import ModelKeyValue
from support.sim import ProcessKilled, SimClock, SimDisk, SimFiles, SimLoop, SimProcess, Trace

EXPECTED_FAULTS = (
    "crash_process",
    "crash_power",
    "crash_at_call",
    "power_loss",
    "lost_page",
    "cut",
    "partition",
    "pause",
    "sync_EIO",
    "uncached_read",
    "clock_set",
    "stop",
    "kill_consumer",
    "leave",
    "pause_consumer",
    "seek",
)
MIB = 1024 * 1024
DATA = "/data"

# Small, so that rolls, checkpoints, cache pressure, snapshots and full queues happen within a run.
SETTINGS = ServiceSettings(
    DaemonSettings(data=DATA, port=PORT, drain_s=1.0),
    BookieSettings(
        data_directory=f"{DATA}/bookie",
        journal_file_bytes=2 * MIB,
        journal_spare_bytes=4 * MIB,
        journal_ring_bytes=2 * MIB,
        write_cache_bytes=MIB,
        read_cache_bytes=256 * 1024,
        read_ahead_bytes=64 * 1024,
        entry_log_bytes=MIB,
        max_entry_bytes=256 * 1024,
        checkpoint_interval_s=1.0,
        disk_minimum_free_bytes=MIB,
        disk_recovery_bytes=MIB // 4,
    ),
    BrokerSettings(
        service_url=f"magnetar://127.0.0.1:{PORT}",
        pulsar_port=0,
        memory_budget_bytes=8 * MIB,
        max_topic_publish_bytes=MIB,
        max_outstanding_bytes=512 * 1024,
        max_ledger_entries=40,
        max_entry_bytes=64 * 1024,
        max_cursor_ledger_entries=25,
        max_outstanding_entries=3,
        maintenance_interval_s=3.0,
        min_ledger_age_ms=500,
        max_ledger_age_ms=2_000,
    ),
    LedgerSettings(ensemble_size=1, write_quorum=1, ack_quorum=1),
    RepairSettings(),
    BalanceSettings(),
)


class EagerIndex(ModelLocationIndex):
    """Also flushes of its own accord, as RocksDB does when its memtable is full.

    A flush takes as long as a job of an executor, and it is a call of the disk, which may be its last, or fail.
    """

    def __init__(self, storage: ModelStorage, rng: random.Random, files: SimFiles) -> None:
        super().__init__(storage)
        self._rng = rng
        self._files = files

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """See LocationIndex."""
        super().put_locations(locations)
        if self._rng.random() < 0.2:
            self.flush_locations_early()

    async def flush_locations(self) -> None:
        """See LocationIndex."""
        await self._flush("locations", self.flush_locations_early)

    async def flush_ledgers(self) -> None:
        """See LocationIndex."""
        await self._flush("ledgers", self.flush_ledgers_early)

    async def _flush(self, family: str, flush: Callable[[], None]) -> None:
        def work() -> None:
            try:
                self._files.call("sync", f"index of {family}", "flushing")
            except (MagnetarError, ProcessKilled) as error:
                if self._rng.random() < 0.5:
                    flush()
                if isinstance(error, ProcessKilled):
                    raise
                raise StorageFailed(f"the index failed: {error}") from error
            flush()

        await asyncio.get_running_loop().run_in_executor(None, work)


class SyncedKeyValue:
    """The metadata's storage: each write is a call of the disk, and may be its last, or fail."""

    def __init__(self, storage: KeyValue, files: SimFiles) -> None:
        self._storage = storage
        self._files = files
        self.get = storage.get
        self.first_key = storage.first_key
        self.keys = storage.keys
        self.close = storage.close

    def write_synced(self, changes: Mapping[bytes, bytes | None]) -> None:
        """See KeyValue."""
        disk = self._files.disk
        try:
            disk.call("sync", "metadata", len(changes))
            self._files.check_alive()
        except (OSError, ProcessKilled) as error:
            if disk.rng.random() < 0.5:  # it is durable all the same, and unacknowledged
                self._storage.write_synced(changes)
            if isinstance(error, ProcessKilled):
                raise
            raise StorageFailed(f"the metadata store cannot write: {error}") from error
        self._storage.write_synced(changes)
        self._files.disk.block()

    async def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        """See KeyValue. What it changes is shown a little later than it is durable."""
        await asyncio.get_running_loop().run_in_executor(None, self.write_synced, changes)


class StandaloneBackend:
    """See sim.storm.Backend."""

    def __init__(self, loop: SimLoop, settings: ServiceSettings = SETTINGS) -> None:
        self._loop = loop
        self._settings = settings
        self.disk = SimDisk(
            random.Random(loop.rng.getrandbits(64)),
            trace=loop.trace,
            consume=loop.consume,
            uncached_reads=0.05,
        )
        self._metadata = ModelKeyValue()
        self._index = ModelStorage()
        self._serving: SimProcess | None = None

    async def serve(self, process: SimProcess) -> None:
        """See Backend."""
        files = self.disk.mount(process)
        clock = SimClock(self._loop)
        clock.set_now_and_then(process)
        rng = random.Random(self._loop.rng.getrandbits(64))
        ended: asyncio.Future[None] = self._loop.create_future()

        def fail(error: MagnetarError) -> None:
            if not ended.done():
                ended.set_exception(error)
                ended.exception()  # the start may fail by itself before anybody waits for this

        def stop() -> None:
            if not ended.done():
                ended.set_result(None)

        components = Components(
            files=files,
            clock=clock,
            rng=rng,
            open_metadata=lambda path: LocalMetadataStore(SyncedKeyValue(self._metadata.open(), files)),
            bookie=inline_components(files, rng, lambda path: EagerIndex(self._index, rng, files)),
        )
        service = Service(self._settings, components, on_failure=fail)
        addresses = await service.start_standalone()
        assert addresses.broker["magnetar"][1] == PORT
        self._loop.trace.record("ready")
        self._loop.add_signal_handler(signal.SIGTERM, stop)
        self._serving = process
        await ended
        await service.close()

    def stop(self, process: SimProcess) -> bool:
        """See Backend."""
        if self._serving is not process:
            return False
        self._loop.deliver_signal(process, signal.SIGTERM)
        return True

    def crashed(self, *, power: bool) -> None:
        """See Backend."""
        if power:
            self.disk.lose_power()

    def crash_during_disk_call(self, crash: Callable[[], None]) -> bool:
        """See Backend."""
        self.disk.at_call(self.disk.calls + self._loop.rng.randrange(300), crash)
        return True

    def break_disk(self) -> bool:
        """See Backend."""
        kind = self._loop.rng.choice(("sync", "sync", "sync", "write", "sync_directory"))
        self.disk.fail(kind, skip=self._loop.rng.randrange(100), error=errno.EIO)
        return True

    def heal(self) -> None:
        """See Backend."""
        self.disk.clear_faults()


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    return play_storm(seed, trace, StandaloneBackend)
