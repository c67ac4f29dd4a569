"""What an operator asks for: drain bookies, see how far that is, and remove one that nothing names any more.

These work over the metadata store alone, whichever processes repair; so do `AutoRecovery.recover_bookie` and `full_check`.
A drain that cannot end is refused before it begins: every ensemble that names one of the bookies is given to the placement
policy, as a repair would do, so groups, zones and racks count.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from magnetar.ledger.core.events import ChooseBookies, NoBookies
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import RegisteredBookies
from magnetar.ledger.health import BookieHealth
from magnetar.ledger.placement.chooser import BOOKIE_GROUP_PROPERTY, BookieChooser
from magnetar.ledger.placement.policy import Placement
from magnetar.ledger.settings import LedgerSettings
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.paths import DRAINING_BOOKIES_PATH, cookie_path
from magnetar.metadata.store import MetadataStore
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import InvalidArgument, NotFoundInStore
from magnetar.runtime.clock import Clock

from .auditor import LedgerAudit
from .cluster_watch import ClusterWatch, PlacedBookies
from .core.request import Reason
from .queue import UnderreplicatedLedgers
from .records import records_naming

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain is; it has ended when `ledgers` is 0."""

    ledgers: int  # whose record names one of the bookies, or cannot be read
    open_ledgers: int  # of these: open ones, which wait for their writers
    notes: dict[int, str]  # of these: why the last attempt did not succeed; the first hundred


async def drain_progress(store: MetadataStore, bookies: Collection[str], clock: Clock) -> DrainProgress:
    """Looks through all records, and queues what a client with an old view has placed on drained ones since."""
    store = TimedStore(store, _TIMEOUT_S)
    ledgers, queue = StoredLedgers(store), UnderreplicatedLedgers(store)
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


class NewLedgers(NamedTuple):
    """Ledgers that will be made, as a policy wants them."""

    whose: str  # for people
    striping: Striping  # the smallest that the policy accepts
    bookie_group: str = ""


async def obstacles_to_drain(
    store: MetadataStore,
    bookies: Collection[str],
    expected: Collection[NewLedgers],
    settings: LedgerSettings,
    rng: random.Random,
) -> list[str]:
    """Why these bookies, marked or not yet, cannot be drained besides all others that are marked; none: they can.

    `settings`: timeouts, and the placement of all ledgers. Raises what the store raises.
    """
    store = TimedStore(store, settings.metadata_timeout_s)
    watch = ClusterWatch(store)
    await watch.read()
    directory = await RegisteredBookies.open(store)
    try:
        chooser = BookieChooser(
            PlacedBookies(directory, watch),
            Placement.of(settings),
            BookieHealth(settings, directory),
            rng,
            lambda _: None,
        )
        drained = {name: None for name in watch.view.draining if name not in bookies}
        watch.view = watch.view._replace(draining=drained)
        wanted = [
            one
            for one in expected
            if chooser.of({BOOKIE_GROUP_PROPERTY: one.bookie_group}).can_place(one.striping)
        ]
        leaving = {**drained, **dict.fromkeys(bookies)}
        watch.view = watch.view._replace(draining=leaving)
        found = await _of_stored_ledgers(StoredLedgers(store), chooser, bookies, leaving)
        return found + [
            f"{one.whose} wants ledgers on {one.striping.ensemble_size} bookies"
            + (f" of {one.bookie_group}" if one.bookie_group else "")
            for one in wanted
            if not chooser.of({BOOKIE_GROUP_PROPERTY: one.bookie_group}).can_place(one.striping)
        ]
    finally:
        await directory.close()


async def _of_stored_ledgers(
    ledgers: StoredLedgers, chooser: BookieChooser, bookies: Collection[str], leaving: Collection[str]
) -> list[str]:
    """One for each reason, with the number of ledgers. A million ledgers have few different ensembles."""
    refusals: dict[tuple[object, ...], str] = {}  # "": it can be replaced
    counts: dict[str, list[int]] = {}
    async for ledger_id, metadata in records_naming(ledgers, bookies):
        if isinstance(metadata, InvalidArgument):
            counts.setdefault(metadata.message, []).append(ledger_id)
            continue
        reason = ""
        for fragment in metadata.fragments():
            positions = tuple(place for place, one in enumerate(fragment.bookies) if one in leaving)
            if reason or not positions:
                continue
            group = metadata.properties.get(BOOKIE_GROUP_PROPERTY, "")
            key = (metadata.sizes, group, fragment.bookies)
            if key not in refusals:
                chosen = chooser.replacements(ChooseBookies(positions, tuple(fragment.bookies), metadata))
                refusals[key] = chosen.reason if isinstance(chosen, NoBookies) else ""
            reason = refusals[key]
        if reason:
            counts.setdefault(reason, []).append(ledger_id)
    return [
        f"{len(ids):,} ledgers cannot move, ledger {ids[0]} among them: {reason}"
        for reason, ids in counts.items()
    ]
