"""Opens a bookie: lock, cookie, index, replay, flush, a new journal file. Only then anything is served.

A crash at any point of it is a start like any other: the mark moves to the new journal file only after everything replayed
is durable in entry logs and index, and the new file is begun only after the mark points to it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial

from magnetar.proto.errors import DataDirectoryError, DiskFull, MagnetarError
from magnetar.proto.ledger_entry import NO_ENTRY
from magnetar.runtime.files import FileLock, Files, wait_for_lock

from .components import BookieComponents
from .cookie import JOURNAL_ROLE, MAX_INCARNATIONS, Cookie
from .directories import data_names, forget_copy, is_ours, open_data_directory
from .disk_space import give_back_reserve
from .engine import Bookie
from .index import ALL_LEDGERS, LocationIndex
from .index.locations import ledger_pages
from .journal import Journal, Journals
from .journal.recovery import Recovered, begun_files, journal_files
from .layout import DataLayout, journal_path
from .mark import JournalPosition, Mark, decode_mark, encode_mark
from .replay import replay
from .settings import BookieSettings

_log = logging.getLogger(__name__)
# A start that finds no old file to take over waits for this part of a new one to be zero-filled.
_FIRST_FILE_PART = 8
# And takes no more than this part of what is free. On a full disk it is for fences and deletions only.
_FREE_PART = 2
_PAGE_BYTES = 4096
# Ledgers whose state goes to entry logs in one flush of a first start after a rebuild.
_STATES_AT_ONCE = 10_000


async def open_bookie(settings: BookieSettings, components: BookieComponents) -> Bookie:
    """Locks the directory, checks its cookie, replays the journals and serves.

    Raises DataDirectoryError (locked, missing parts, damaged, another version), DiskFull or StorageFailed.
    """
    layout = DataLayout.of(settings)
    files = components.files
    if not settings.journal_sync_data:
        _log.warning(
            "UNSAFE: journal_sync_data is off, what is acknowledged was not synced: a power failure loses it. For tests only"
        )
    files.make_directory(layout.root)
    lock = await wait_for_lock(files, layout.lock, settings.lock_timeout_s)
    worker = components.disk_worker
    try:
        await worker.start(lock)
        bookie = await _open_locked(settings, components, layout, lock)
    except BaseException:
        await worker.close()
        lock.release()
        raise
    return bookie


async def _open_locked(
    settings: BookieSettings, components: BookieComponents, layout: DataLayout, lock: FileLock
) -> Bookie:
    files = components.files
    _sync_names(files, layout.root)
    give_back_reserve(files, layout, settings.disk_recovery_bytes)
    # Before the cookie names them: the copies in them may be those of a start that was killed.
    existing = [path for path in (*layout.journals, *layout.ledgers) if files.exists(path)]
    for directory in existing:
        _sync_names(files, directory)
    cookie = open_data_directory(
        files, layout, settings.bookie_id, components.rng, cluster=components.cluster
    )
    for directory in _directories(layout, cookie):
        if directory not in existing:
            _sync_names(files, directory)
    mark = await _read_mark(components, layout, cookie)
    journals = _make_journals(settings, components, layout, cookie, lock)
    # A mark without rows: no journal was ever begun, so nothing was ever served.
    if mark and not components.index_exists(layout.index):
        raise DataDirectoryError(
            f"the index {layout.index} is missing although this bookie has data; restore it (is its disk mounted?), or "
            "rebuild it from the entry logs (magnetar bookie index rebuild): without it every entry would be said not to "
            "exist",
            path=layout.index,
        )
    files.make_directory(os.path.dirname(layout.index) or ".")
    index = components.open_index(layout.index)
    try:
        _check_index(components, layout, cookie, index)
    except BaseException:
        index.close()
        raise
    bookie = Bookie(settings, components, layout, cookie, lock, index, mark, journals)
    try:
        bookie.logs.open()
        bookie.collector.open()
        recovered = await replay(bookie, mark)
        bookie.replayed_records = sum(journal.records for journal in recovered.values())
        # Rule 5: flush after replay. Everything replayed is out of the journals once this returns, or waits for space in
        # memory: then the mark stays where it is, and the old journal files with it.
        with contextlib.suppress(DiskFull):
            await bookie.checkpointer.run(None)
        await _log_states(bookie, index)
        await _begin_journals(bookie, recovered)
        await _leave_journals(bookie)
        _count_start(bookie)
        bookie.start_tasks()
    except BaseException:
        with contextlib.suppress(MagnetarError):  # those that were begun: their writers hold the lock
            await bookie.journals.close()
        bookie.release()
        raise
    if bookie.failure is not None:  # `on_failure` has no listener yet
        await bookie.close()
        raise bookie.failure
    return bookie


def _count_start(bookie: Bookie) -> None:
    """A new incarnation: an older copy of these directories, started again, will not have it (rule 35). Durable.

    Before anything is served. A start that ends earlier has acknowledged nothing, and need not count.
    """
    cookie = bookie.cookie
    kept = (*cookie.incarnations, bookie.components.rng.getrandbits(64) or 1)[-MAX_INCARNATIONS:]
    introductions, next_ledger_id = bookie.introductions, bookie.ledgers.next_ledger_id
    introductions.next_ledger_id_at_start = next_ledger_id
    introductions.change_cookie(
        cookie._replace(starts=cookie.starts + 1, incarnations=kept, next_ledger_id=next_ledger_id)
    )


async def _log_states(bookie: Bookie, index: LocationIndex) -> None:
    """Once in the life of an index: what it alone knows of ledgers goes to entry logs.

    A rebuild found some of it in the old index only, or made it: fences of ledgers that lost entries. The next rebuild may
    have neither that index nor the damaged log, and would let stale writers in again.
    """
    if index.states_are_logged():
        return
    with contextlib.suppress(DiskFull):  # the next start tries again
        for rows in ledger_pages(index, _STATES_AT_ONCE):
            for ledger_id, record in rows:
                if record.fenced or record.explicit_lac != NO_ENTRY or record.deleted_at_ms or record.unknown:
                    bookie.ledgers.rewrite_state(ledger_id)
            await bookie.checkpointer.run(None)
        index.set_states_logged()


def _directories(layout: DataLayout, cookie: Cookie) -> list[str]:
    """Every journal and ledger directory that exists, whether the settings name it or only the cookie does."""
    known = [layout.directory(name) for name in cookie.journal_directories]
    return list(dict.fromkeys([*layout.journals, *layout.ledgers, *known]))


def _sync_names(files: Files, root: str) -> None:
    """Makes durable what names this start sees, before it depends on them (rule 12a).

    A predecessor that was killed between a rename and the sync of the directory leaves names that only the page cache has:
    a mark whose predecessor would come back with a power loss, after the journals it needs were recycled.
    """
    path = os.path.abspath(root)
    if files.exists(path):
        files.sync_directory(path)
    while (parent := os.path.dirname(path)) != path:
        path = parent
        try:
            files.sync_directory(path)
        except DataDirectoryError:  # one that we may not read: not of our making
            return


async def _read_mark(components: BookieComponents, layout: DataLayout, cookie: Cookie) -> Mark:
    """The mark; a new one without rows if the directory was just made (or its making was cut short)."""
    files = components.files
    mark: Mark | None = None
    if files.exists(layout.mark):
        mark = decode_mark(files.read(layout.mark), layout.mark)
    if mark:
        return mark
    logs = [name for path in layout.ledgers for name in data_names(files, path)]
    if logs or any(_begun(files, path, cookie.instance) for path in _directories(layout, cookie)):
        what = "is missing" if mark is None else "is older than this bookie's data"
        raise DataDirectoryError(
            f"the checkpoint mark {layout.mark} {what}; restore it from a backup of this directory",
            path=layout.mark,
        )
    if mark is None:
        mark = {}
        await components.disk_worker.replace(layout.mark, encode_mark(mark))
    return mark


def _begun(files: Files, directory: str, instance: int) -> bool:
    """True if a journal file in the directory holds records of this bookie."""
    sequences = [sequence for sequence, _ in journal_files(files, directory)]
    return bool(begun_files(files, directory, instance, sequences))


def _check_index(
    components: BookieComponents, layout: DataLayout, cookie: Cookie, index: LocationIndex
) -> None:
    """An empty index in place of a lost one would answer "no such entry" for everything (rule 8)."""
    found = index.instance()
    if found is None and not any(data_names(components.files, path) for path in layout.ledgers):
        if cookie.repairing:  # it replaces a bookie that may have held any ledger that there is (rule 9)
            index.set_incomplete(ALL_LEDGERS)
        index.set_instance(cookie.instance)
        # No entry log is made before the index's own name is durable (rule 12a).
        components.files.sync_directory(os.path.dirname(os.path.abspath(layout.index)))
    elif found != cookie.instance:
        what = "is missing" if found is None else "belongs to another bookie"
        raise DataDirectoryError(
            f"the index {layout.index} {what} although {layout.ledgers[0]} holds entries; restore it, or rebuild it "
            "(magnetar bookie index rebuild): without it this bookie cannot tell which entries it has",
            path=layout.index,
        )


def _make_journals(
    settings: BookieSettings, components: BookieComponents, layout: DataLayout, cookie: Cookie, lock: FileLock
) -> Journals:
    """Not begun yet: a replay comes first. Their files get sequences that were never used."""
    directories = _directories(layout, cookie)
    used = [sequence for path in directories for sequence, _ in journal_files(components.files, path)]
    take_sequence = itertools.count(max(used, default=0) + 1).__next__
    journals: dict[str, Journal] = {}
    for directory in layout.journals:
        device = components.make_journal_device(settings, directory, lock)
        worker, instance = components.disk_worker, cookie.instance
        journals[layout.name_of(directory)] = Journal(
            device, worker, directory, settings, instance, take_sequence
        )
    return Journals(journals, take_sequence)


async def _begin_journals(bookie: Bookie, recovered: dict[str, Recovered]) -> None:
    """New files; the mark points to all of them before one is begun, or, on a full disk, still to the old ones."""
    settings, files, worker = bookie.settings, bookie.components.files, bookie.components.disk_worker
    old_mark, full_disk = bookie.checkpointer.mark, bookie.checkpointer.stopped_by_full_disk
    if full_disk and (left_out := sorted(old_mark.keys() - bookie.journals.by_name.keys())):
        raise DiskFull(f"no space for what is in the journals {left_out}: name them again, or free some")
    mark: dict[str, JournalPosition] = {}
    begins: list[Callable[[], Awaitable[None]]] = []
    for name, journal in bookie.journals.by_name.items():
        directory, sequence = journal.directory, bookie.journals.take_sequence()
        present = journal_files(files, directory)
        found = recovered.get(name) or Recovered(0, present, present, 0, [])
        # An old file that no recovery would read is taken over, so that no start waits for zeros to be written.
        free_pages = files.free_bytes(directory)[0] // _PAGE_BYTES
        size = max(1, free_pages // _FREE_PART) * _PAGE_BYTES
        size, source, taken = min(size, settings.journal_file_bytes // _FIRST_FILE_PART), "", None
        for old, old_size in found.unneeded:
            if old_size >= settings.journal_file_bytes:
                taken, size, source = old, old_size, journal_path(directory, old)
                break
        await worker.prepare(journal_path(directory, sequence), size, source, hurry=True)
        position = JournalPosition(sequence, found.end_offset, found.end_offset)
        needed = [old for old in found.files if full_disk and old not in found.unneeded]
        # Before a later file says that it begins behind them: what was replayed may not be durable yet.
        for old, _ in needed:
            await worker.sync(journal_path(directory, old))
        released = [old for old in found.files if old[0] != taken and old not in needed]
        mark[name] = old_mark.get(name, position) if full_disk else position
        begins.append(partial(journal.start, position, size, released, needed))
    moved = await bookie.checkpointer.move_mark(mark, directories_change=True)
    assert full_disk or moved is not None, "new files are always ahead of the mark"
    for begin in begins:
        await begin()


async def _leave_journals(bookie: Bookie) -> None:
    """Empties the journal directories that the settings no longer name: the mark does not name them any more either."""
    components, layout = bookie.components, bookie.layout
    files = components.files
    for name in bookie.cookie.journal_directories:
        directory = layout.directory(name)
        if directory in layout.journals:
            continue
        ours = is_ours(files, layout, bookie.cookie, JOURNAL_ROLE, directory)
        if ours:
            for sequence, _ in journal_files(files, directory):
                await components.disk_worker.delete(journal_path(directory, sequence))
            files.sync_directory(directory)
        others = tuple(known for known in bookie.cookie.journal_directories if known != name)
        bookie.introductions.change_cookie(bookie.cookie._replace(journal_directories=others))
        if ours:
            forget_copy(files, directory)
        _log.info("the journal directory %s is not used any more", directory)
