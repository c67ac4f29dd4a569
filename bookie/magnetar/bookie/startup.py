"""Opening a bookie: lock, cookie, index, replay, flush, a new journal file, and only then anything is served.

A crash at any point of it is a start like any other: the mark moves to the new journal file only after everything replayed
is durable in entry logs and index, and the new file is begun only after the mark points to it.
"""

from __future__ import annotations

import logging
import os

from magnetar.proto.errors import DataDirectoryError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS
from magnetar.runtime.files import FileLock, Files, wait_for_lock

from .components import BookieComponents
from .cookie import Cookie, open_data_directory
from .engine import Bookie
from .index import LocationIndex
from .journal.journal import Journal, JournalPosition
from .journal.records import FENCE, LAST_CONFIRMED, Record, RecordType, incarnation_of, probe_begin
from .journal.recovery import Recovered, replay_journals
from .layout import DataLayout
from .mark import decode_mark, encode_mark
from .settings import BookieSettings

__all__ = ["open_bookie"]

_log = logging.getLogger(__name__)
# A start that finds no old file to take over waits for this part of a new one to be zero-filled.
_FIRST_FILE_PART = 8


async def open_bookie(settings: BookieSettings, components: BookieComponents) -> Bookie:
    """See `Bookie.open`."""
    layout = DataLayout(settings.data_directory)
    files = components.files
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
    _settle_names(files, layout.root)
    cookie = open_data_directory(files, layout, settings.bookie_id, components.rng)
    mark = await _read_mark(components, layout, cookie, settings)
    # The first start left the first journal file behind it with an index open.
    if mark[0].sequence > 1 and not components.index_exists(layout.index):
        raise DataDirectoryError(
            f"the index {layout.index} is missing although this bookie has data; restore it (is its disk mounted?), or "
            "replace this bookie and let its ledgers be repaired: without it every entry would be said not to exist",
            path=layout.index,
        )
    index = components.open_index(layout.index)
    bookie = Bookie(settings, components, layout, cookie, lock, index, mark)
    try:
        _check_index(components, layout, cookie, index)
        bookie.logs.open()
        recovered = await _replay(bookie, mark[0])
        bookie.replayed_records = recovered.records
        # Rule 5: flush after replay. Everything replayed is out of the journals once this returns.
        await bookie.checkpointer.run(None)
        await _begin_journal(bookie, recovered)
        bookie.start_tasks()
    except BaseException:
        bookie.release()
        raise
    return bookie


def _settle_names(files: Files, root: str) -> None:
    """Makes durable what names this start sees, before it depends on them (rule 12a).

    A predecessor that was killed between a rename and the sync of the directory leaves names that only the page cache has:
    a mark whose predecessor would come back with a power loss, after the journals it needs were recycled.
    """
    path = os.path.abspath(root)
    files.sync_directory(path)
    while (parent := os.path.dirname(path)) != path:
        path = parent
        try:
            files.sync_directory(path)
        except DataDirectoryError:  # one that we may not read: not of our making
            return


async def _read_mark(
    components: BookieComponents, layout: DataLayout, cookie: Cookie, settings: BookieSettings
) -> list[JournalPosition]:
    """The mark; a new one with its journal file if the directory was just made (or its making was cut short)."""
    files = components.files
    if files.exists(layout.mark):
        return decode_mark(files.read(layout.mark), layout.mark)
    first = layout.journal_file(1)
    more = any(layout.journal_sequence(name) != 1 for name in files.list(layout.journal))
    if files.exists(first):
        file = files.open(first, read_only=True)
        try:
            begin = probe_begin(file.read_at, file.size(), incarnation_of(cookie.instance, 1))
        finally:
            file.close()
        more = more or begin is not None
    if more or files.list(layout.ledgers):
        raise DataDirectoryError(
            f"the checkpoint mark {layout.mark} is missing although this bookie has data; restore it from a "
            "backup of this directory",
            path=layout.mark,
        )
    # A part only: the first start waits for it.
    await components.disk_worker.prepare(first, settings.journal_file_bytes // _FIRST_FILE_PART, hurry=True)
    mark = [JournalPosition(1, 0, 0)]
    await components.disk_worker.replace(layout.mark, encode_mark(mark))
    return mark


def _check_index(
    components: BookieComponents, layout: DataLayout, cookie: Cookie, index: LocationIndex
) -> None:
    """An empty index in place of a lost one would answer "no such entry" for everything (rule 8)."""
    found = index.instance()
    if found is None and not components.files.list(layout.ledgers):
        index.set_instance(cookie.instance)
        # No entry log is made before the index's own name is durable (rule 12a).
        components.files.sync_directory(layout.root)
    elif found != cookie.instance:
        what = "is missing" if found is None else "belongs to another bookie"
        raise DataDirectoryError(
            f"the index {layout.index} {what} although {layout.ledgers} holds entries; restore it: "
            "without it this bookie cannot tell which entries it has",
            path=layout.index,
        )


async def _replay(bookie: Bookie, mark: JournalPosition) -> Recovered:
    """Puts every record from the mark on back into write cache and ledger states. Doing it twice changes nothing."""
    cache, ledgers = bookie.cache, bookie.ledgers

    async def apply(record: Record) -> None:
        payload = record.payload
        if record.type == RecordType.ADD:
            ledger_id, entry_id, last_add_confirmed, _ = LEDGER_ENTRY_FIELDS.unpack_from(payload)
            if not cache.has_room(len(payload)):
                await bookie.checkpointer.run(None)  # under memory pressure: the mark stays (rule 3)
            cache.put(ledger_id, entry_id, payload)
            ledgers.note_entry(ledgers.load(ledger_id), ledger_id, entry_id, last_add_confirmed)
        elif record.type == RecordType.FENCE:
            (ledger_id,) = FENCE.unpack(payload)
            state = ledgers.load(ledger_id)
            state.fenced = True
            ledgers.mark_dirty(state, ledger_id)
        elif record.type == RecordType.LAST_CONFIRMED:
            ledger_id, explicit = LAST_CONFIRMED.unpack(payload)
            state = ledgers.load(ledger_id)
            state.explicit_lac = max(state.explicit_lac, explicit)
            ledgers.mark_dirty(state, ledger_id)
        else:
            raise DataDirectoryError(
                f"a journal holds a record of type {record.type}, which this program does not know; "
                "run the version of magnetar that wrote it"
            )

    recovered = await replay_journals(
        bookie.components.files, bookie.layout, bookie.cookie.instance, mark, apply
    )
    if recovered.records:
        _log.info("replayed %d journal records", recovered.records)
    return recovered


async def _begin_journal(bookie: Bookie, recovered: Recovered) -> None:
    """A new file under a sequence that was never used; the mark points to it before it is begun."""
    components, layout, settings = bookie.components, bookie.layout, bookie.settings
    sequence = recovered.files[-1][0] + 1
    # An old file that no recovery would read is taken over, so that no start waits for zeros to be written.
    size, source = settings.journal_file_bytes // _FIRST_FILE_PART, ""
    taken = None
    for old, old_size in recovered.unneeded:
        if old_size >= settings.journal_file_bytes:
            taken, size, source = old, old_size, layout.journal_file(old)
            break
    await components.disk_worker.prepare(layout.journal_file(sequence), size, source, hurry=True)
    position = JournalPosition(sequence, recovered.end_offset, recovered.end_offset)
    moved = await bookie.checkpointer.move_mark([position])
    assert moved is not None, "a new file is always ahead of the mark"
    device = components.make_journal_device(settings, layout, bookie.lock)
    bookie.journal = Journal(device, components.disk_worker, layout, settings, bookie.cookie.instance)
    released = [old for old in recovered.files if old[0] != taken]
    await bookie.journal.start(position, size, released)
