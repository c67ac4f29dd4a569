"""Whether the bookies that remain could hold what is on those that are to be drained.

Every ensemble that names one of them is given to the placement policy, as a repair would do: groups, zones and racks count.
A drain that cannot end is refused before it begins.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

from magnetar.ledger.core.events import ChooseBookies, NoBookies
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import RegisteredBookies
from magnetar.ledger.health import BookieHealth
from magnetar.ledger.placement.chooser import BOOKIE_GROUP_PROPERTY, BookieChooser
from magnetar.ledger.placement.policy import Placement
from magnetar.ledger.settings import LedgerSettings
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.store import MetadataStore
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import InvalidArgument

from .audit_pass import records_naming
from .cluster_watch import ClusterWatch, PlacedBookies
from .core.fragments import fragments_of


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
        for fragment in fragments_of(metadata):
            positions = tuple(place for place, one in enumerate(fragment.bookies) if one in leaving)
            if reason or not positions:
                continue
            group = metadata.properties.get(BOOKIE_GROUP_PROPERTY, "")
            key = (metadata.sizes, group, fragment.bookies)
            if key not in refusals:
                ask = ChooseBookies(positions, tuple(fragment.bookies))
                chosen = chooser.of(metadata.properties).replacements(ask, metadata.striping)
                refusals[key] = chosen.reason if isinstance(chosen, NoBookies) else ""
            reason = refusals[key]
        if reason:
            counts.setdefault(reason, []).append(ledger_id)
    return [
        f"{len(ids):,} ledgers cannot move, ledger {ids[0]} among them: {reason}"
        for reason, ids in counts.items()
    ]
