"""What an operator asks for: drain bookies, see how far that is, and remove one that nothing names any more.

These work over the metadata store alone, whichever processes repair; so do `AutoRecovery.recover_bookie` and `full_check`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from magnetar.ledger.directory import BOOKIES_PATH
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.paths import DRAINING_BOOKIES_PATH, cookie_path
from magnetar.metadata.store import MetadataStore
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import AlreadyExists, InvalidArgument, NotFoundInStore
from magnetar.runtime.clock import Clock

from .audit_pass import LedgerAudit, records_naming
from .cluster_watch import ClusterWatch, encode_drain
from .core.request import Reason
from .queue import RepairQueue

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain is; it has ended when `ledgers` is 0."""

    ledgers: int  # whose record names one of the bookies, or cannot be read
    open_ledgers: int  # of these: open ones, which wait for their writers
    notes: dict[int, str]  # of these: why the last attempt did not succeed; the first hundred


async def begin_drain(store: MetadataStore, bookie: str, zone: str = "") -> bool:
    """Marks the bookie; the auditor queues its ledgers. False if it was marked before. InvalidArgument: never registered.

    `zone`: its own, by which it is found while it is not registered.
    """
    if await store.get(cookie_path(bookie)) is None and await store.get(f"{BOOKIES_PATH}/{bookie}") is None:
        raise InvalidArgument(
            f"no bookie {bookie!r} was ever registered; `magnetar cluster status` shows their names"
        )
    try:
        await store.create(f"{DRAINING_BOOKIES_PATH}/{bookie}", encode_drain(zone))
    except AlreadyExists:
        return False
    return True


async def cancel_drain(store: MetadataStore, bookie: str) -> bool:
    """Ledgers that are still there stay, and new ones come. False if it was not drained."""
    try:
        await store.delete(f"{DRAINING_BOOKIES_PATH}/{bookie}")
    except NotFoundInStore:
        return False
    return True


async def drain_progress(store: MetadataStore, bookies: Collection[str], clock: Clock) -> DrainProgress:
    """Looks through all records, and queues what a client with an old view has placed on drained ones since."""
    store = TimedStore(store, _TIMEOUT_S)
    ledgers, queue = StoredLedgers(store), RepairQueue(store)
    draining = set(await store.children(DRAINING_BOOKIES_PATH))
    replaced = {bookie: Reason.DRAINING for bookie in bookies if bookie in draining}
    if replaced:
        await LedgerAudit(ledgers, queue, clock).run(replaced)
    named, open_ledgers, notes = 0, 0, dict[int, str]()
    async for ledger_id, metadata in records_naming(ledgers, bookies):
        named += 1
        note = ""
        try:
            if isinstance(metadata, InvalidArgument):
                raise metadata
            open_ledgers += not metadata.closed
            if len(notes) < 100 and (found := await queue.get(ledger_id)) is not None:
                note = found[0].note
        except InvalidArgument as error:  # its record, or its node of the queue: other ledgers go on
            note = error.message
        if note and len(notes) < 100:
            notes[ledger_id] = note
    return DrainProgress(named, open_ledgers, notes)


async def remove_bookie(store: MetadataStore, bookie: str) -> None:
    """Forgets a stopped bookie that no ledger names: its cookie and its mark. InvalidArgument while it is not so."""
    watch = ClusterWatch(TimedStore(store, _TIMEOUT_S))
    await watch.read()
    if bookie in watch.view.registered:
        raise InvalidArgument(f"bookie {bookie!r} is registered; stop it first")
    found = records_naming(StoredLedgers(store), [bookie], decode_all=True)
    if named := [(ledger_id, metadata) async for ledger_id, metadata in found]:
        unreadable = [record.message for _, record in named if isinstance(record, InvalidArgument)]
        raise InvalidArgument(
            f"{len(named)} ledgers name bookie {bookie!r}, ledger {named[0][0]} among them; drain it, or recover it first"
            + (f"; {len(unreadable)} records that may name it: {unreadable[0]}" if unreadable else "")
        )
    for path in (cookie_path(bookie), f"{DRAINING_BOOKIES_PATH}/{bookie}"):
        try:
            await store.delete(path)
        except NotFoundInStore:
            continue
