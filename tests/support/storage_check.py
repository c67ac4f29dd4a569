"""One bookie on a simulated machine: a small workload, a crash or a fault at a disk call, and what must hold after it.

Everything happens in the loop (inline journal device and disk worker, model index) over `SimDisk`, in virtual time, so a
run is identified by (seed, call) alone. `Promises` is what the bookie has acknowledged; `verify` reads all of it back.

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
from dataclasses import replace
from functools import partial
from typing import Any

from magnetar.bookie import Bookie, BookieSettings, open_bookie
from magnetar.bookie.cookie import decode_cookie
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.offline.index_rebuild import RebuildReport, rebuild_index
from magnetar.proto.errors import MagnetarError, RequestTimeout
from support.index_model import ModelLocationIndex, ModelStorage
from support.inline_devices import inline_components
from support.sim import SimClock, SimDisk, SimLoop, SimProcess
from support.storage_index import CountedIndex
from support.storage_session import Key, Promises, Session

__all__ = ["DATA", "KIB", "SETTINGS", "WIDE", "Broken", "Key", "Machine", "Promises", "Script", "Session"]

KIB = 1024
DATA = "/data/bookie"
Script = Callable[[Session], Awaitable[None]]

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
    disk_recovery_bytes=0,
)

# Several directories of each kind, small entry logs, and garbage collection only when a script asks for it.
WIDE = replace(
    SETTINGS,
    journal_directories=("/journals/a", "/journals/b"),
    ledger_directories=("/ledgers/a", "/ledgers/b"),
    entry_log_bytes=1536,
    gc_interval_s=0.0,
    compaction_bytes_per_s=0,
)


class Broken(AssertionError):
    """A promise does not hold. The message names the seed and the calls, which replay it."""


class ListedLedgers:
    """The metadata store as garbage collection sees it: what was `created` (before its first add) and is not `deleted`."""

    def __init__(self) -> None:
        self.created: dict[int, None] = {}
        self.deleted: dict[int, None] = {}
        # It cannot be asked.
        self.unreachable = False

    async def next_ledger_id(self) -> int:
        """See ExistingLedgers: above all that there are."""
        return 1 << 62

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """See ExistingLedgers."""
        await asyncio.sleep(0)
        if self.unreachable:
            raise RequestTimeout("the metadata store does not answer")
        return [ledger_id for ledger_id in ledger_ids if ledger_id not in self.listed()]

    def listed(self) -> dict[int, None]:
        """What exists now."""
        return {ledger_id: None for ledger_id in self.created if ledger_id not in self.deleted}


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
        self.existing = ListedLedgers()
        self.promises = Promises()
        self.history: list[str] = [f"seed {seed}"]
        self.starts = 0
        # Entries that were answered with damage; None: damage is not to be expected.
        self.damaged: list[Key] | None = None
        # Kind and path of the call that failed, None before.
        self.faulted: tuple[str, str] | None = None
        self.failure: MagnetarError | None = None
        self.bookie: Bookie | None = None
        self.session: Session | None = None
        self.violations: list[Broken] = []
        # An index that was made anew may name an older copy of an entry added with other bytes, which no client does.
        self.older_copies = False
        # Whose sync failed; -1: none.
        self.failed_journal = -1
        self._process: SimProcess | None = None

    def broken(self, what: str) -> None:
        """Raises Broken; `start` raises it again, should somebody swallow it (a callback of the journal may not fail)."""
        violation = Broken(f"{what} ({', '.join(self.history)})")
        self.violations.append(violation)
        raise violation

    def acknowledge(self, what: str, *, ledger_id: int | None = None) -> None:
        """Something was acknowledged: never after the bookie has failed (rule 4).

        What a callback says of `ledger_id` is not said in the moment before either, when the sync of its journal has
        failed; a coroutine that was woken by an earlier sync may run in it.
        """
        if ledger_id is not None and self.failed_journal >= 0 and self.bookie is not None:
            if ledger_id % len(self.bookie.journals.all) == self.failed_journal:
                self.broken(f"{what} was acknowledged after the failed {self.faulted}")
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
            journals = self.bookie.journals.all if self.bookie is not None and kind == "sync" else []
            for number, journal in enumerate(journals):
                if journal.files and path == self.bookie.layout.journal_file(number, journal.files[-1]):  # type: ignore[union-attr]
                    self.failed_journal = number
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

        Raises what `open_bookie` raises, and Broken. With `close` the bookie is then stopped in order.
        """
        try:
            return self.open() and self.do(script) and (not close or self.close_bookie())
        finally:
            self.kill()

    def open(self) -> bool:
        """A new process that opens the bookie and lives on between calls of `do`. False if it died over it."""
        self.starts += 1
        self.failure = None
        self.failed_journal = -1
        self._process = self.loop.start_process(f"bookie-{self.starts}")
        return self._run(self._open)

    async def _open(self) -> None:
        files = self.disk.mount(self._process)
        rng = random.Random(self.seed * 1000 + self.starts)
        components = replace(
            inline_components(files, rng, lambda path: CountedIndex(self.index, files, rng, path)),
            clock=SimClock(self.loop),
            existing_ledgers=self.existing,
        )
        bookie = await open_bookie(self.settings, components)
        bookie.on_failure = self._failed
        self.bookie = bookie
        self.session = Session(self, bookie)

    def do(self, script: Script) -> bool:
        """Runs a script in the open bookie's process. False if it died over it, True for its end. Raises Broken."""
        assert self.session is not None
        return self._run(partial(script, self.session))

    def close_bookie(self) -> bool:
        """Stops the bookie in order. False if its process died over it."""
        assert self.bookie is not None
        return self._run(self.bookie.close)

    def kill(self) -> None:
        """kill -9, if the process lives."""
        if self._process is not None and self._process.alive:
            self._process.kill()
        self.bookie = self.session = None
        self.disk.clear_faults()

    @property
    def alive(self) -> bool:
        """Whether there is a process with an open bookie."""
        return self._process is not None and self._process.alive and self.session is not None

    def _run(self, work: Callable[[], Awaitable[None]]) -> bool:
        """The work as a task of the process. False if it was killed meanwhile."""
        assert self._process is not None
        if not self._process.alive:  # killed in the very turn in which the last work ended
            return False
        over: asyncio.Future[bool] = self.loop.create_future()

        async def run() -> None:
            try:
                await work()
            except Exception as error:
                if not over.done():
                    over.set_exception(error)
            else:
                over.set_result(True)

        def died() -> None:
            if not over.done():
                over.set_result(False)

        self._process.at_death(died)
        self._process.spawn(run(), name="script")
        try:
            return bool(self.loop.run_until_complete(over))
        except MagnetarError:
            raise
        except AssertionError as error:
            if self.violations:
                raise self.violations[0] from error
            raise Broken(f"{error!r} ({', '.join(self.history)})") from error

    def _failed(self, error: MagnetarError) -> None:
        self.failure = error

    def must_start(self, script: Script, *, close: bool = False) -> bool:
        """`start` after a crash: a bookie that refuses is broken as well."""
        try:
            return self.start(script, close=close)
        except MagnetarError as error:
            raise Broken(f"the bookie does not start: {error} ({', '.join(self.history)})") from error

    def rebuild_index(self) -> RebuildReport:
        """The index is lost with its disk, and made anew from the entry logs as `magnetar bookie index rebuild` does it."""
        self.history.append("index rebuilt")
        files = self.disk.mount()
        layout = DataLayout.of(self.settings)
        logs = {
            log_id: f"{directory}/{name}"
            for directory in layout.ledgers
            for name in files.list(directory)
            if (log_id := layout.entry_log_id(name)) is not None
        }
        cookie = decode_cookie(files.read(layout.cookie), layout.cookie)
        new = ModelStorage()
        rebuilding = rebuild_index(
            files,
            layout.index,
            logs,
            cookie.instance,
            open_index=lambda path: ModelLocationIndex(new),
            dry_run=True,  # it renames directories otherwise, and this index is no directory
        )
        report: RebuildReport = self.loop.run_until_complete(rebuilding)
        self.index = new
        return report

    def copy(self) -> Machine:
        """The same disk and index under another loop; no process may be running."""
        other = Machine(self.seed, self.settings)
        other.disk.names = copy.deepcopy(self.disk.names)
        other.index = copy.deepcopy(self.index)
        other.existing = copy.deepcopy(self.existing)
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
