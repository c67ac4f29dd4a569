"""Hypothesis: flushes into three directories that fill up, fail and lose power, against a dictionary.

Whatever a flush said to be durable is read back as it was, from wherever it went; the bytes by ledger of every log are those
of its records; nothing that was not asked for comes out of a scan.
"""

import asyncio
import contextlib
import errno
import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from magnetar.bookie.entry_log.entry_logs import EntryLogs
from magnetar.bookie.entry_log.records import STATE_ENTRY
from magnetar.bookie.index import LedgerRecord, Location
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.write_cache import WriteCache
from magnetar.proto.errors import DiskFull, MagnetarError, StorageFailed
from support.bookie_kit import entry
from support.inline_devices import InlineDiskWorker
from support.sim import SimDisk

DIRECTORIES = 3
# (kind of call, directory, error, calls that pass before)
FAULTS = st.tuples(
    st.sampled_from(["write", "sync", "sync_directory", "open", "truncate"]),
    st.integers(0, DIRECTORIES - 1),
    st.sampled_from([errno.EIO, errno.ENOSPC]),
    st.integers(0, 3),
)
LAYOUT = DataLayout("/d", (), tuple(f"/d/ledgers-{n}" for n in range(DIRECTORIES)), "/d/index")


class EntryLogMachine(RuleBasedStateMachine):
    """The index is the model: `durable` has an entry and its place once a flush has ended well."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = SimDisk(random.Random(5))
        for path in LAYOUT.ledgers:
            self.disk.mount().make_directory(path)
        self.durable: dict[tuple[int, int], tuple[bytes, Location]] = {}
        # Everything that was ever given to a flush.
        self.given: dict[tuple[int, int], list[bytes]] = {}
        self.cache = WriteCache(1 << 30)
        self.states: list[tuple[int, LedgerRecord]] = []
        self.versions = 0
        # A flush that a full disk stopped, or nothing.
        self.waiting: Any = None
        self.full: dict[int, None] = {}
        # Directories that this process gave up.
        self.failed: dict[int, None] = {}
        self.seen_ids: dict[int, None] = {}
        self.gone_ids: dict[int, None] = {}
        self.open()

    def open(self) -> None:
        files = self.disk.mount()
        self.logs = EntryLogs(files, InlineDiskWorker(files), LAYOUT, 3000)
        self.logs.on_directory_failed = lambda number, error: self.failed.update({number: None})
        self.failed.clear()
        self.logs.open()

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def add(self, ledger_id: int, entry_id: int, size: int) -> None:
        self.versions += 1
        data = entry(ledger_id, entry_id, b"%d " % self.versions + bytes(size))
        self.given.setdefault((ledger_id, entry_id), []).append(data)
        self.cache.put(ledger_id, entry_id, data)

    @rule(
        adds=st.lists(
            st.tuples(st.integers(1, 7), st.integers(0, 9), st.sampled_from([10, 700, 2500])),
            min_size=1,
            max_size=15,
        ),
        states=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 99)), max_size=2),
        fault=st.none() | FAULTS,
        power=st.sampled_from(["stays", "lost", "lost before the sync"]),
    )
    def flush(
        self,
        adds: list[tuple[int, int, int]],
        states: list[tuple[int, int]],
        fault: tuple[str, int, int, int] | None,
        power: str,
    ) -> None:
        """Adds and flushes; a call of one directory may fail on the way, and the power afterwards."""
        for row in adds:
            self.add(*row)
        self.states += [(ledger_id, LedgerRecord(True, explicit)) for ledger_id, explicit in states]
        if fault is not None:
            kind, directory, error, skip = fault
            where = f"ledgers-{directory}" if kind == "sync_directory" else f"ledgers-{directory}/"
            self.disk.fail(kind, where, error, skip=skip)
        if power == "lost before the sync":
            half, said = self.waiting or (self.cache.swap(), self.states)
            with contextlib.suppress(MagnetarError):
                self.run(self.logs.append(half, said))
        else:
            self.write_out()
        if not self.full:
            self.disk.clear_faults()
        if power != "stays":
            self.lose_power()
        self.scan_everything()

    def write_out(self) -> None:
        if self.waiting is None:
            self.waiting = (self.cache.swap(), self.states)
            self.states = []
        half, states = self.waiting
        try:
            placed = self.run(self.logs.append(half, states))
            while self.run(self.logs.sync()):
                placed = self.run(self.logs.append(half, states))
        except DiskFull:
            assert self.disk.trace.faults
            return
        except StorageFailed:
            assert len(self.failed) >= DIRECTORIES - 1
            self.lose_power()  # fail-stop
            return
        for part in placed:
            for ledger_id, entry_id, place in part.locations():
                if entry_id != STATE_ENTRY:
                    self.durable[ledger_id, entry_id] = (half.ledgers[ledger_id][entry_id], place)
        self.waiting = None
        self.cache.drop_flushing()

    @rule(skip=st.integers(0, 3))
    def fill(self, skip: int) -> None:
        """No space anywhere: what waits is tried again later."""
        for directory in range(DIRECTORIES):
            self.disk.fail("write", f"ledgers-{directory}/", errno.ENOSPC, skip=skip, times=1 << 30)
            self.full[directory] = None

    @rule()
    def empty(self) -> None:
        self.disk.clear_faults()
        self.full.clear()
        for number in range(DIRECTORIES):
            self.logs.set_full(number, False)
        if self.waiting is not None:
            self.write_out()

    @rule()
    def lose_power(self) -> None:
        """The journal has what was not flushed; here it is simply gone, and may be added again."""
        self.logs.abandon()
        self.disk.clear_faults()
        self.full.clear()
        self.disk.lose_power()
        self.waiting = None
        self.cache = WriteCache(1 << 30)
        self.states = []
        self.open()

    @rule()
    @precondition(lambda self: self.waiting is None and not self.failed)
    def restart(self) -> None:
        self.disk.clear_faults()
        self.full.clear()
        self.run(self.logs.close())
        self.open()

    @rule()
    def collect(self) -> None:
        """Garbage collection, as one who knows everything would do it."""
        wanted = {place.log_id for _, place in self.durable.values()}
        for info in self.logs.logs():
            if not info.current and info.log_id not in wanted and info.directory not in self.failed:
                try:
                    self.run(self.logs.delete(info.log_id))
                except MagnetarError:
                    self.lose_power()
                    return

    @rule(ledger_id=st.integers(1, 7))
    def forget_ledger(self, ledger_id: int) -> None:
        for key in [key for key in self.durable if key[0] == ledger_id]:
            del self.durable[key]

    @invariant()
    def everything_durable_is_read(self) -> None:
        for (ledger_id, entry_id), (data, place) in self.durable.items():
            assert self.run(self.logs.reader.read(ledger_id, [(entry_id, place)])) == [data]

    @invariant()
    def log_ids_are_used_once(self) -> None:
        there = dict.fromkeys(info.log_id for info in self.logs.logs())
        assert not self.gone_ids.keys() & there.keys()
        self.gone_ids |= {log_id: None for log_id in self.seen_ids if log_id not in there}
        self.seen_ids |= there

    async def _look(self, log_id: int) -> None:
        counted: dict[int, int] = {}
        found: dict[tuple[int, int], None] = {}
        async for records in self.logs.scan(log_id):
            for record in records:
                if record.data is None:
                    assert record.torn, record
                    continue
                counted[record.ledger_id] = counted.get(record.ledger_id, 0) + 32 + record.length
                if record.entry_id != STATE_ENTRY:
                    assert record.data in self.given[record.ledger_id, record.entry_id]
                    found[record.ledger_id, record.offset] = None
        for (ledger_id, _), (_, place) in self.durable.items():
            assert place.log_id != log_id or (ledger_id, place.offset) in found
        info = next(info for info in self.logs.logs() if info.log_id == log_id)
        statistics = await self.logs.statistics(log_id)
        assert statistics.whole
        # After a failed sync the page cache may lose what was not synced at any moment, also between the two scans.
        if info.directory not in self.failed and (not info.current or self.waiting is None):
            assert statistics.ledgers == counted

    def scan_everything(self) -> None:
        self.disk.uncached_reads = 0.3
        for info in self.logs.logs():
            self.run(self._look(info.log_id))
        self.disk.uncached_reads = 0.0

    def teardown(self) -> None:
        self.logs.abandon()
        self.loop.close()


TestEntryLogs = EntryLogMachine.TestCase
TestEntryLogs.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
