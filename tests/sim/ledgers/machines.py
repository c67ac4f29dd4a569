"""Simulated machines, each with one real bookie: its disk and index outlive the processes that a supervisor starts on it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import errno
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from magnetar.bookie import Bookie, BookieSettings, open_bookie
from magnetar.bookie.disk_space import clear_read_only, marker_path, set_read_only
from magnetar.bookie.gc.assignments import Assignments
from magnetar.bookie.gc.existing_ledgers import MetadataLedgers
from magnetar.bookie.server import BookieServer
from magnetar.ledger.directory import BOOKIES_PATH, encode_registration
from magnetar.metadata.paths import cookie_path
from magnetar.proto.errors import AlreadyExists, MagnetarError
from magnetar.runtime.connection import ConnectionOptions
from sim.deliveries import Violation
from sim.ledgers.disk_processes import with_processes
from sim.ledgers.metadata import MetadataService, ServiceClient, ServiceSession
from sim.ledgers.plan import Storage
from sim.scenarios.standalone import EagerIndex
from support.index_model import ModelStorage
from support.inline_devices import inline_components
from support.sim import SimClock, SimDisk, SimLoop, SimProcess
from support.sim.namespace import Namespace

PORT = 3181
DATA = "/data"
KIB = 1024
MAX_ENTRY_BYTES = 8 * KIB
SESSION_S = 0.8
REGISTRATION_CHECK_S = 1.0

# Small, so that journals and logs roll, caches are full and checkpoints happen within a run.
SETTINGS = BookieSettings(
    data_directory=DATA,
    journal_file_bytes=256 * KIB,
    journal_spare_bytes=256 * KIB,
    journal_ring_bytes=2048 * KIB,
    write_cache_bytes=1024 * KIB,  # an add that was read must find room to wait in a quarter of it
    read_cache_bytes=32 * KIB,
    read_ahead_bytes=16 * KIB,
    entry_log_bytes=64 * KIB,
    max_entry_bytes=MAX_ENTRY_BYTES,
    checkpoint_interval_s=0.7,
    add_backpressure_timeout_s=0.5,
    long_poll_timeout_s=1.0,
    disk_minimum_free_bytes=128 * KIB,
    disk_recovery_bytes=32 * KIB,
    disk_check_interval_s=0.5,
    gc_interval_s=1.5,
    minor_compaction_interval_s=3.0,
    major_compaction_interval_s=6.0,
    tombstone_retention_s=3600.0,
    scrub_interval_s=0.0,
)
STORAGE = Storage()
_DAMAGED_FILES = ("/entrylog", "/journal-", f"{DATA}/mark", f"{DATA}/cookie")
_DAMAGED_WEIGHTS = (10, 4, 1, 1)
CONNECTION = ConnectionOptions("sim", ping_interval_s=1.0, handshake_timeout_s=1.0)


class Contents:
    """What a bookie has stored: its directories, and its index. `owner`: which bookie, as its cookie knows it.

    `storage` says how many directories there are and when deletions are forgotten, wherever these are mounted.
    """

    def __init__(self, owner: str, storage: Storage) -> None:
        self.owner = owner
        self.storage = storage
        self.names = Namespace()
        self.index = ModelStorage()

    def copied(self) -> Contents:
        """As a backup of a stopped bookie."""
        made = Contents(self.owner, self.storage)
        made.names, made.index = copy.deepcopy(self.names), copy.deepcopy(self.index)
        return made


class Backup(NamedTuple):
    """A copy of what a bookie had, and its number of starts then."""

    contents: Contents
    starts: int


class Machine:
    """One machine. `may_be_damaged`: bits of its entry logs may flip, so it may refuse to start again, for good."""

    def __init__(
        self,
        loop: SimLoop,
        metadata: MetadataService,
        name: str,
        *,
        may_be_damaged: bool,
        storage: Storage = STORAGE,
        keep_backups: bool = False,
        settings: BookieSettings = SETTINGS,
    ) -> None:
        self.loop = loop
        self.name = name
        self.may_be_damaged = may_be_damaged
        self.damaged = False
        self.lost = False  # it refused to start after damage
        self.starts = 0
        self.bookie: Bookie | None = None  # while it serves
        self.on_ready: Callable[[Machine], None] = lambda machine: None  # it serves, again
        self.process: SimProcess | None = None
        self.contents = Contents(name, storage)
        # It runs on contents that are not its own, until somebody puts it right. It counts as not running then.
        self.wrong = False
        self.backup: Backup | None = None  # an older copy of its own contents
        self._own = self.contents
        self._served = 0  # starts of its own contents
        self._registered = 0  # session that made the node which the metadata has for this bookie
        self.live_index: EagerIndex | None = None  # of the running bookie
        self.disk = SimDisk(
            random.Random(loop.rng.getrandbits(64)),
            trace=loop.trace,
            consume=self._block,
            uncached_reads=0.05,
            capacity_bytes=64 * KIB * KIB,
        )
        self.disk.names = self.contents.names
        self._metadata = metadata
        self._keep_backups = keep_backups
        self._may_fail = 0  # failures of the disk that were planted: the bookie may stop by itself
        self._read_only_until = 0.0  # by its operator
        self._storage = storage
        self._settings = settings

    def start(self) -> None:
        """Starts a process for the bookie."""
        if self.process is not None or self.lost:
            return
        self.starts += 1
        process = self.process = self.loop.start_process(self.name)
        process.spawn(self._run(process), name=self.name)

    # --- faults ----------------------------------------------------------------------------------------------------

    def crash(self, power: bool) -> None:
        """kill -9, or the power fails; started again a little later."""
        process = self.process
        if process is None:
            return
        self.process = self.bookie = None
        self.loop.trace.fault("crash_power" if power else "crash_process", self.name)
        try:
            process.kill(power=power)
        finally:  # killed from inside a disk call: the rest happens outside of it
            self.loop.call_outside(0.0, self._after_crash, power)

    def come_back_with(self, contents: Contents, seconds: float) -> None:
        """It is killed, and comes back with what is not its own; so much later with its own again."""
        self.crash(False)
        self.wrong = True
        self._own, self.contents = self.contents, contents
        self.disk.names = contents.names
        self.loop.call_outside(seconds, self.put_right)

    def put_right(self) -> None:
        """Its own contents again."""
        if self.wrong:
            self.crash(False)
            self.wrong = False
            self.contents = self._own
            self.disk.names = self.contents.names

    def registered_start(self) -> int:
        """The number of its start that the metadata has; 0: no client has met it yet."""
        node = self._metadata.node(cookie_path(self.name))
        return 0 if node is None else int(msgpack.unpackb(node.value)["start"])

    def crash_at_call(self, power: bool) -> None:
        """In the middle of one of the next disk calls."""
        number = self.disk.calls + self.loop.rng.randrange(120)
        self.disk.at_call(number, lambda: self.crash(power))

    def break_disk(self) -> None:
        """One of the next calls fails, and the bookie stops by itself."""
        rng = self.loop.rng
        self._may_fail += 1
        kind = rng.choice(("sync", "sync", "write", "sync_directory", "read"))
        self.disk.fail(kind, skip=rng.randrange(40), error=errno.EIO)

    def fill_disk(self, seconds: float, *, at_once: bool = False) -> None:
        """No space for so long. `at_once`: the bookie looks now, instead of half a second later at most."""
        self._may_fail += 1
        self.loop.trace.fault("no_space", self.name)
        whole = self.disk.capacity_bytes
        self.disk.capacity_bytes = self.disk.used_bytes() + self.loop.rng.choice((0, 8, 32)) * KIB

        def free() -> None:
            self.disk.capacity_bytes = max(whole, self.disk.capacity_bytes)

        self.loop.call_outside(seconds, free)
        if at_once:
            self._operate(look_at_disk)

    def delay_journal(self, wait_s: float, seconds: float) -> None:
        """Delays syncs and nothing else, as a journal writer process would (the inline device blocks)."""
        bookie = self.bookie
        if bookie is None:
            return
        for journal in bookie.journals.all:
            device: Any = journal.device
            self.loop.call_outside(seconds, setattr, device, "_wait_s", device._wait_s)
            device._wait_s = wait_s

    def turn_read_only(self, seconds: float) -> None:
        """By its operator; recoveries may still add."""
        self.loop.trace.fault("read_only", self.name)
        self._read_only_until = max(self._read_only_until, self.loop.now + seconds)
        self._operate(self._mark_read_only)
        self.loop.call_outside(seconds + 0.001, self._operate, self._mark_read_only)

    def _mark_read_only(self, bookie: Bookie) -> None:
        files, layout = bookie.components.files, bookie.layout
        if self.loop.now < self._read_only_until:
            set_read_only(files, layout, "simulated")
        elif files.exists(marker_path(layout)):
            clear_read_only(files, layout)
        look_at_disk(bookie)

    def _operate(self, work: Callable[[Bookie], None]) -> None:
        """Somebody does something with the bookie, on its machine; what of it fails with the disk is tried no more."""
        bookie, process = self.bookie, self.process
        if bookie is None or process is None:
            return

        async def operate() -> None:
            with contextlib.suppress(MagnetarError):
                work(bookie)

        process.spawn(operate(), name="operator")

    def flip_bit(self) -> bool:
        """Silent damage of a file; False if there is none."""
        (part,) = self.loop.rng.choices(_DAMAGED_FILES, _DAMAGED_WEIGHTS)
        files = [path for path in self.disk.files() if part in path]
        files = [path for path in files if (inode := self.disk.names.file(path)) is not None and inode.size]
        if not files or self.wrong or not self.may_be_damaged:
            return False
        self.damaged = True
        self.disk.flip_bit(self.loop.rng.choice(files))
        return True

    def slow_down(self, seconds: float) -> None:
        """Syncs take long for a while."""
        self.loop.trace.fault("slow_disk", self.name)
        self.disk.sync_seconds = (0.02, 0.3)

        def recover() -> None:
            self.disk.sync_seconds = (50e-6, 1e-3)

        self.loop.call_outside(seconds, recover)

    def pause(self, seconds: float) -> None:
        """The process stands still."""
        if self.process is not None:
            self.process.pause(seconds)

    def heal(self) -> None:
        """The storm is over."""
        self.put_right()
        self.disk.clear_faults()
        self.disk.capacity_bytes = 1 << 40
        self.disk.sync_seconds = (50e-6, 1e-3)
        self._read_only_until = 0.0
        self._operate(self._mark_read_only)

    def end_of_faults(self) -> None:
        """From here on a bookie that stops by itself is a failure."""
        self._may_fail = 0

    # --- what the test may look at --------------------------------------------------------------------------------------

    def has(self, ledger_id: int, entry_id: int) -> bool | None:
        """Whether the running bookie has the entry in memory or index; None while none runs. Damaged ones are excused."""
        bookie = self.bookie
        if self.damaged:
            return True
        if bookie is None:
            return None
        return bookie.cache.get(ledger_id, entry_id) is not None or (
            self.live_index is not None and self.live_index.get(ledger_id, entry_id) is not None
        )

    @property
    def forgets_deletions(self) -> bool:
        """Whether a ledger's tombstone, and its fence with it, may be over within the run (rule 7)."""
        return self._storage.tombstone_s < STORAGE.tombstone_s

    def fences(self) -> list[int]:
        """Ledgers that the running bookie has durably fenced."""
        if self.bookie is None:
            return []
        states = self.bookie.ledgers.by_id.items()
        return [ledger_id for ledger_id, state in states if state.fenced and state.fence_durable is None]

    def assignments(self, metadata: ServiceClient) -> Assignments | None:
        """Who says which entries here are other bookies' by now; None: leftovers stay."""
        return None

    # --- the process -------------------------------------------------------------------------------------------------

    async def _run(self, process: SimProcess) -> None:
        try:
            await self._serve(process)
        except MagnetarError as error:
            self.loop.trace.record("fail_stop", self.name, type(error).__name__)
            if self.wrong:
                pass
            elif self.damaged and self.bookie is None:
                self.loop.trace.fault("refused_to_start", self.name)
                self.lost = True
            elif not self._may_fail and not self.damaged:
                raise
        self.loop.call_outside(0.0, self.crash, False)

    async def _serve(self, process: SimProcess) -> None:
        files = self.disk.mount(process)
        rng = random.Random(self.loop.rng.getrandbits(64))
        metadata = self._metadata.view()
        failed: asyncio.Future[None] = self.loop.create_future()

        def fail(error: MagnetarError) -> None:
            if not failed.done():
                failed.set_exception(error)
                failed.exception()

        def open_index(path: str) -> EagerIndex:
            self.live_index = EagerIndex(self.contents.index, rng, files)
            return self.live_index

        clock = SimClock(self.loop)
        clock.set_now_and_then(process)
        components = inline_components(files, rng, open_index, self._storage.group_wait_ms)
        if self._storage.processes:
            components = with_processes(components, rng, self._storage.group_wait_ms)
        components = dataclasses.replace(
            components,
            clock=clock,
            existing_ledgers=MetadataLedgers(metadata, timeout_s=2.0),
            assignments=self.assignments(metadata),
        )
        stored = self.contents.storage
        settings = dataclasses.replace(
            self._settings,
            journal_directories=_directories("journal", stored.journals),
            ledger_directories=_directories("ledgers", stored.ledger_directories),
            tombstone_retention_s=stored.tombstone_s,
        )
        bookie = await open_bookie(settings, components)
        bookie.on_failure = fail
        if bookie.failure is not None:
            raise bookie.failure
        await BookieServer.start(bookie, self.name, PORT, CONNECTION)
        self.loop.trace.record("ready", self.name)
        if not self.wrong:
            self.bookie = bookie
            self._served = bookie.cookie.starts
            self._operate(self._mark_read_only)
            self.on_ready(self)
            if self._storage.scrub_s:
                process.spawn(self._scrub(bookie), name="scrub")
        process.spawn(self._register(metadata), name="registration")
        await failed

    async def _scrub(self, bookie: Bookie) -> None:
        """The bookie's own begins after half a minute, which no run has. What it calls damaged was damaged."""
        while True:
            await asyncio.sleep(self._storage.scrub_s)
            before = bookie.damage.found
            await bookie.scrubber.verify_everything()
            if bookie.damage.found > before and not (self.damaged or self.bookie is not bookie):
                found = (bookie.damage.files(), bookie.damage.ledgers())
                raise Violation(f"the scrub of {self.name} found damage that nobody did: {found}")

    async def _register(self, metadata: ServiceClient) -> None:
        """Keeps the bookie's ephemeral node alive."""
        value = encode_registration(f"{self.name}:{PORT}")
        while True:
            lost = asyncio.Event()
            try:
                session = await metadata.open_session(SESSION_S)
                session.when_lost(lost.set)
                await self._create_node(metadata, session, value)
                while True:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(REGISTRATION_CHECK_S):
                            await lost.wait()
                            break
                    # A delete that the last life sent may arrive late, and meet the node of this one.
                    await self._create_node(metadata, session, value)
            except MagnetarError:
                await asyncio.sleep(0.1)

    async def _create_node(self, metadata: ServiceClient, session: ServiceSession, value: bytes) -> None:
        path = f"{BOOKIES_PATH}/{self.name}"
        while not session.lost:
            try:
                await metadata.create(path, value, session=session)
                self._registered = session.session_id
                return
            except AlreadyExists:  # of this bookie's last life, or of the create whose answer was lost
                if self._registered == session.session_id:
                    return
                await metadata.delete(path)

    def _after_crash(self, power: bool) -> None:
        if power:
            self.disk.lose_power()
        if not self.wrong and self._keep_backups and self.loop.rng.random() < 0.7:
            self.backup = Backup(self.contents.copied(), self._served)
        self.loop.call_outside(self.loop.rng.uniform(0.02, 0.5), self.start)

    def _block(self, seconds: float) -> None:
        """A sync stops this process, and nobody else."""
        if self.process is not None:
            self.process.busy(seconds)


def _directories(name: str, count: int) -> tuple[str, ...]:
    """() has the bookie take the one that it has without a setting."""
    return tuple(f"{DATA}/{name}-{letter}" for letter in "abc"[:count]) if count > 1 else ()


def look_at_disk(bookie: Bookie) -> None:
    """What it does twice a second by itself."""
    bookie._check_disk()
