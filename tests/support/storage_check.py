"""One bookie on a simulated machine: a small workload, a crash or a fault at a disk call, and what must hold after it.

Everything happens in the loop (inline journal device and disk worker, model index) over `SimDisk`, in virtual time, so a
run is told by (seed, call) alone. `Promises` is what the bookie has acknowledged; `verify` reads all of it back.

    run = Machine(seed)
    run.crash_at(call)            # kill at this disk call, at the first or at any later start
    run.start(workload)           # True: the workload came to its end
    run.lose_power()              # or not: the page cache outlives a process
    run.start(verify)             # every start must succeed, and every promise hold

What was served after a recovery was flushed by it, so it is a promise from then on.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from magnetar.bookie import Bookie, BookieSettings, inline_components
from magnetar.bookie.index import LedgerRecord, Location, ModelLocationIndex, ModelStorage
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    StorageFailed,
)
from magnetar.proto.ledger_entry import NO_ENTRY, encode_ledger_entry
from support.sim import SimDisk, SimFiles, SimLoop, SimProcess

KIB = 1024
DATA = "/data/bookie"
Key = tuple[int, int]
Script = Callable[["Session"], Awaitable[None]]

SETTINGS = BookieSettings(
    data_directory=DATA,
    journal_file_bytes=16 * KIB,
    journal_spare_bytes=40 * KIB,
    journal_ring_bytes=1024 * KIB + 16 * KIB,
    write_cache_bytes=24 * KIB,
    read_cache_bytes=6 * KIB,
    read_ahead_entries=4,
    read_ahead_bytes=8 * KIB,
    entry_log_bytes=10 * KIB,
    max_entry_bytes=8 * KIB,
    checkpoint_interval_s=0.05,
    disk_check_interval_s=0.05,
    disk_read_only_ratio=1.0,
    disk_minimum_free_bytes=0,
)


class Broken(AssertionError):
    """A promise does not hold. The message names the seed and the calls, which replay it."""


class CountedIndex(ModelLocationIndex):
    """A flush is a call of the disk: it may fail, or be the last. Some puts are flushed early, as RocksDB does."""

    def __init__(self, storage: ModelStorage, files: SimFiles, rng: random.Random) -> None:
        super().__init__(storage)
        self._files = files
        self._rng = rng

    def put_locations(self, locations: Sequence[tuple[int, int, Location]]) -> None:
        """See LocationIndex."""
        super().put_locations(locations)
        if self._rng.random() < 0.2:
            self._storage.locations.update(self._locations)

    def put_ledgers(self, ledgers: Sequence[tuple[int, LedgerRecord]]) -> None:
        """See LocationIndex."""
        super().put_ledgers(ledgers)
        if self._rng.random() < 0.2:
            self._storage.ledgers.update(self._ledgers)

    async def flush_locations(self) -> None:
        """See LocationIndex."""
        self._call("locations")
        await super().flush_locations()

    async def flush_ledgers(self) -> None:
        """See LocationIndex."""
        self._call("ledgers")
        await super().flush_ledgers()

    def _call(self, family: str) -> None:
        try:
            self._files.disk.call("sync", f"{DATA}/index/{family}")
        except OSError as error:
            raise StorageFailed(f"the index failed: {error}") from error
        self._files.check_alive()


class Promises:
    """What the bookie acknowledged, and what it was asked for."""

    def __init__(self) -> None:
        # All bytes that were ever added under a key, in order, and how many of them are the past: index of the
        # newest acknowledged one. A key is here from the moment it is asked for.
        self.versions: dict[Key, list[bytes]] = {}
        self.acknowledged: dict[Key, int] = {}
        self.fenced: dict[int, None] = {}
        self.last_confirmed: dict[int, int] = {}
        # Of the acknowledged entries. One that a flush saved without its journal record may lie beyond it.
        self.last_entry: dict[int, int] = {}

    def asked(self, key: Key, entry: bytes) -> int:
        """An entry goes to the bookie; returns the number of this version."""
        versions = self.versions.setdefault(key, [])
        versions.append(entry)
        return len(versions) - 1

    def holds(self, key: Key, version: int) -> None:
        """This version, or a later one, is durable."""
        self.acknowledged[key] = max(version, self.acknowledged.get(key, -1))

    def confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """The bookie said that it knows of this last add confirmed."""
        known = self.last_confirmed.get(ledger_id, NO_ENTRY)
        self.last_confirmed[ledger_id] = max(known, last_add_confirmed)


class Session:
    """One process of the bookie, while a script runs in it."""

    def __init__(self, machine: Machine, bookie: Bookie) -> None:
        self.machine = machine
        self.bookie = bookie
        self.promises = machine.promises
        self.rng = random.Random(machine.seed)

    def add_soon(
        self, ledger_id: int, entry_id: int, *, recovery: bool = False, size: int = 0
    ) -> asyncio.Future[int]:
        """Adds an entry of its own bytes; the future has the code of the answer."""
        promises, loop = self.promises, asyncio.get_running_loop()
        version = len(promises.versions.get((ledger_id, entry_id), []))
        text = b"%d:%d version %d " % (ledger_id, entry_id, version)
        payload = (text * (1 + (size or self.rng.choice((50, 700, 2000, 5000))) // len(text)))[: 7 * KIB]
        data = encode_ledger_entry(ledger_id, entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload)
        assert promises.asked((ledger_id, entry_id), data) == version
        answer: asyncio.Future[int] = loop.create_future()

        def done(ledger: int, entry: int, code: int) -> None:
            assert (ledger, entry) == (ledger_id, entry_id)
            if not code:
                self.machine.acknowledge(f"add {ledger}:{entry}", at_once=True)
                promises.holds((ledger, entry), version)
                promises.confirmed(ledger, entry - 1)
                promises.last_entry[ledger] = max(entry, promises.last_entry.get(ledger, NO_ENTRY))
                if ledger_id in promises.fenced and not recovery and version == 0:
                    self.machine.broken(f"an add to the fenced ledger {ledger} was acknowledged")
            answer.set_result(code)

        self.bookie.add(data, recovery=recovery, done=done)
        return answer

    async def fence(self, ledger_id: int) -> None:
        """Fences by way of a read, as a recovery does."""
        try:
            await self.bookie.read_last_confirmed(ledger_id, fence=True)
        except MagnetarError:
            return
        self.machine.acknowledge(f"fence {ledger_id}")
        self.promises.fenced[ledger_id] = None

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit last add confirmed."""
        try:
            await self.bookie.write_last_confirmed(ledger_id, last_add_confirmed)
        except MagnetarError:
            return
        self.machine.acknowledge(f"last confirmed {ledger_id}")
        self.promises.confirmed(ledger_id, last_add_confirmed)

    async def checkpoint(self) -> None:
        """A checkpoint; a failure shows elsewhere."""
        try:
            await self.bookie.checkpoint()
        except MagnetarError:
            return

    async def check_entry(self, key: Key) -> None:
        """An entry is what was added last, or later; one that was not acknowledged may be missing."""
        versions, known = self.promises.versions.get(key, []), self.promises.acknowledged.get(key, -1)
        try:
            found, _ = await self.bookie.read(key[0], key[1], key[1])
        except EntryNotFound:
            if known >= 0:
                self.machine.broken(f"the acknowledged entry {key} is said not to exist")
            return
        except EntryDamaged as error:
            if self.machine.damaged is None:
                self.machine.broken(f"entry {key} is damaged: {error}")
            self.machine.damaged.append(key)  # type: ignore[union-attr]
            return
        if found[0] not in versions:
            self.machine.broken(f"wrong bytes for entry {key}")
        # The bytes before the last acknowledged ones are as wrong as any others.
        if found[0] not in versions[max(known, 0) :]:
            self.machine.broken(f"entry {key} is an old copy")

    async def check_range(self, ledger_id: int, first: int, last: int) -> None:
        """Reads on as a sequential reader does, and checks each entry."""
        while first <= last:
            known = [self.promises.acknowledged.get((ledger_id, n), 0) for n in range(first, last + 1)]
            try:
                found, _ = await self.bookie.read(ledger_id, first, last, max_bytes=6 * KIB)
            except (EntryNotFound, EntryDamaged):
                await self.check_entry((ledger_id, first))
                first += 1
                continue
            for number, data in enumerate(found, first):
                versions = self.promises.versions[ledger_id, number]
                if data not in versions[known[number - first] :]:
                    self.machine.broken(f"entry {(ledger_id, number)} is an old or a wrong copy")
            first += len(found)

    async def check_promises(self) -> None:
        """Everything at once."""
        promises = self.promises
        for key in sorted(promises.versions):
            await self.check_entry(key)
        for ledger_id in sorted({ledger for ledger, _ in promises.versions} | {*promises.fenced}):
            try:
                known, last_entry = await self.bookie.read_last_confirmed(ledger_id)
            except LedgerNotFound:
                known, last_entry = NO_ENTRY, NO_ENTRY
                if ledger_id in promises.fenced:
                    self.machine.broken(f"the fenced ledger {ledger_id} is not known")
            if known < promises.last_confirmed.get(ledger_id, NO_ENTRY):
                self.machine.broken(f"the last add confirmed of ledger {ledger_id} fell to {known}")
            if last_entry < promises.last_entry.get(ledger_id, NO_ENTRY):
                self.machine.broken(f"the last entry of ledger {ledger_id} fell to {last_entry}")
            if ledger_id in promises.fenced and await self.add_soon(ledger_id, 999) != LedgerFenced.code:
                self.machine.broken(f"the fence of ledger {ledger_id} is gone")

    async def promote(self) -> None:
        """What a bookie serves after its start is durable: from now on it is a promise."""
        promises = self.promises
        for key in sorted(promises.versions):
            try:
                found, _ = await self.bookie.read(key[0], key[1], key[1])
            except MagnetarError:
                continue
            versions = promises.versions[key]
            promises.holds(key, max(n for n, data in enumerate(versions) if data == found[0]))


class Machine:
    """A disk, an index and the processes of one bookie, one after another."""

    def __init__(self, seed: int, settings: BookieSettings = SETTINGS) -> None:
        self.seed = seed
        self.settings = settings
        self.loop = SimLoop(seed, limit_seconds=100.0)
        self.disk = SimDisk(
            random.Random(seed), trace=self.loop.trace, consume=self.loop.consume, uncached_reads=0.2
        )
        self.index = ModelStorage()
        self.promises = Promises()
        self.history: list[str] = [f"seed {seed}"]
        self.starts = 0
        # Entries that were answered with damage; None: damage is not to be expected.
        self.damaged: list[Key] | None = None
        # Kind and path of the call that failed, None before.
        self.faulted: tuple[str, str] | None = None
        self.failure: MagnetarError | None = None
        self.bookie: Bookie | None = None
        self.violations: list[Broken] = []
        self.journal_in_use = ""
        self._process: SimProcess | None = None

    def broken(self, what: str) -> None:
        """Raises Broken; `start` raises it again, should somebody swallow it (a callback of the journal may not fail)."""
        violation = Broken(f"{what} ({', '.join(self.history)})")
        self.violations.append(violation)
        raise violation

    def acknowledge(self, what: str, *, at_once: bool = False) -> None:
        """Something was acknowledged: never after the bookie has failed (rule 4).

        What a callback says `at_once` is not said in the moment before either, when the journal's own sync has failed; a
        coroutine that was woken by an earlier sync may run in it.
        """
        if (
            at_once
            and self.faulted is not None
            and self.faulted[0] == "sync"
            and self.faulted[1] == self.journal_in_use
        ):
            self.broken(f"{what} was acknowledged after the failed {' of '.join(self.faulted)}")
        if self.failure is not None:
            self.broken(f"{what} was acknowledged after {self.failure}")

    def crash_at(self, call: int) -> None:
        """The process dies in place of this changing call, counted from now on."""
        self.history.append(f"crash at {call}")
        self.disk.at_call(self.disk.calls + call, self._kill)

    def fail_at(self, call: int, error: int) -> None:
        """This changing call fails, counted from now on."""
        self.history.append(f"{errno.errorcode[error]} at {call}")

        def fail() -> None:
            kind, path = self.disk.trace.tail(1).split()[-2:]
            self.faulted = (kind, path)
            bookie = self.bookie
            if bookie is not None and bookie.journal.files:
                self.journal_in_use = bookie.layout.journal_file(bookie.journal.files[-1])
            raise OSError(error, os.strerror(error))

        self.disk.at_call(self.disk.calls + call, fail)

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def lose_power(self) -> None:
        """Between two starts."""
        self.history.append("power lost")
        self.disk.lose_power()

    def start(self, script: Script, *, close: bool = False) -> bool:
        """Opens the bookie in a new process and runs the script. False if the process was killed meanwhile.

        Raises what `Bookie.open` raises, and Broken. With `close` the bookie is then stopped in order.
        """
        self.starts += 1
        self.failure = None
        process = self._process = self.loop.start_process(f"bookie-{self.starts}")
        over: asyncio.Future[bool] = self.loop.create_future()

        async def run() -> None:
            try:
                files = self.disk.mount(process)
                rng = random.Random(self.seed * 1000 + self.starts)
                components = inline_components(files, rng, lambda path: CountedIndex(self.index, files, rng))
                bookie = await Bookie.open(self.settings, components)
                bookie.on_failure = self._failed
                self.bookie = bookie
                await script(Session(self, bookie))
                if close:
                    await bookie.close()
            except Exception as error:
                if not over.done():
                    over.set_exception(error)
            else:
                over.set_result(True)

        def died() -> None:
            if not over.done():
                over.set_result(False)

        process.at_death(died)
        process.spawn(run(), name="script")
        try:
            return bool(self.loop.run_until_complete(over))
        except MagnetarError:
            raise
        except AssertionError as error:
            if self.violations:
                raise self.violations[0] from error
            raise Broken(f"{error!r} ({', '.join(self.history)})") from error
        finally:
            if process.alive:
                process.kill()
            self.disk.clear_faults()

    def _failed(self, error: MagnetarError) -> None:
        self.failure = error

    def must_start(self, script: Script, *, close: bool = False) -> bool:
        """`start` after a crash: a bookie that refuses is broken as well."""
        try:
            return self.start(script, close=close)
        except MagnetarError as error:
            raise Broken(f"the bookie does not start: {error} ({', '.join(self.history)})") from error

    def copy(self) -> Machine:
        """The same disk and index under another loop; no process may be running."""
        other = Machine(self.seed, self.settings)
        other.disk.names = copy.deepcopy(self.disk.names)
        other.index = copy.deepcopy(self.index)
        other.promises = copy.deepcopy(self.promises)
        other.history = list(self.history)
        other.starts = self.starts
        return other

    def close(self) -> None:
        """Frees the loop."""
        self.loop.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
