"""Defects of ownership: who serves a topic, how that changes, and how clients find out (broker/CLUSTER.md)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from magnetar.broker.ownership import bundle_ownership
from magnetar.broker.ownership.bundle_ownership import BundleOwnership, Held, State
from magnetar.broker.ownership.cluster_ownership import ClusterOwnership
from magnetar.broker.ownership.cluster_view import KnownOwner
from magnetar.broker.ownership.ownership import Located
from magnetar.broker.ownership.records import DRAINED, DRAINING, READY, STOPPING, owner_path, transfer_path
from magnetar.broker.ownership.transfers import Transfers
from magnetar.broker.topics.registry import Broker, TopicState
from magnetar.broker.topics.topic import Topic
from magnetar.client.connection.core.search import Search
from magnetar.client.connection.lookups import Lookups
from magnetar.metadata.registration import Registration
from magnetar.metadata.store import Check, Create, Put
from magnetar.metadata.watched import Watched
from magnetar.proto.errors import MagnetarError, VersionConflict
from sim.defects.registry import cluster_defect

bundles_of: Any = BundleOwnership
registrations: Any = Registration
transfers_of: Any = Transfers
module: Any = bundle_ownership
_for_ever = asyncio.Event  # nobody sets it


def _metadata_wrapped(wrap: Any) -> None:
    """Each broker's ownership has the store that `wrap` makes of its own."""
    init = bundles_of.__init__

    def wrapped(self: Any, metadata: Any, *arguments: Any) -> None:
        init(self, wrap(metadata), *arguments)

    bundles_of.__init__ = wrapped


class _Store:
    """A MetadataStore that passes everything on."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


# --- taking a bundle ---------------------------------------------------------------------------------------------------


@cluster_defect
def bundle_taken_without_looking_at_bounds() -> None:
    """A bundle that was divided meanwhile is owned as a whole."""
    module.Check = lambda path, version: Check("/nowhere", None)


@cluster_defect
def bundle_taken_though_it_has_an_owner() -> None:
    """AlreadyExists is taken for success."""
    make = bundles_of._make_node

    async def taken(self: Any, bundle: Any, held: Any, bounds_version: int) -> None:
        await make(self, bundle, held, bounds_version)
        if bundle not in self.held and self.valid:
            self.held[bundle] = Held(State.OWNED)

    bundles_of._make_node = taken


@cluster_defect
def owner_node_outlives_its_session() -> None:
    """It is not ephemeral."""
    module.Create = lambda path, value, session: Create(path, value, None)


@cluster_defect
def node_of_a_former_session_is_adopted() -> None:
    """Any node of our name is ours, whatever session made it."""

    def adopt(self: Any, bundle: Any, owner: KnownOwner) -> None:
        if bundle not in self.held and self.valid and owner.record.broker == self.name:
            self.held[bundle] = Held(State.OWNED, owner.version)
            self.look.set()

    bundles_of._adopt = adopt


# --- what a broker knows -----------------------------------------------------------------------------------------------


@cluster_defect
def view_is_never_dropped() -> None:
    """What was read once is believed until this broker changes it itself."""
    watched: Any = Watched
    init = watched.__init__

    def blind(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._watch.close()

    watched.__init__ = blind


@cluster_defect
def lookup_answers_a_dead_owner_for_ever() -> None:
    """The first answer is kept."""
    locate = bundles_of.locate

    async def kept(self: Any, name: Any, **options: Any) -> Located:
        answers = self.__dict__.setdefault("answers", {})
        if name not in answers:
            answers[name] = await locate(self, name, **options)
        found: Located = answers[name]
        return found

    bundles_of.locate = kept


@cluster_defect
def unreachable_owner_is_waited_for_without_end() -> None:
    """The owner lives, and only that client cannot reach it."""
    module._HELD_TIMEOUTS = 1e6


def _some_look_ups_wait(seconds: float | None) -> None:
    """Before they are answered: each tenth of those that a broker gets. None: for ever."""
    locate = bundles_of.locate

    async def waits(self: Any, name: Any, **options: Any) -> Located:
        self.__dict__["asked"] = asked = self.__dict__.get("asked", 0) + 1
        if asked % 10 == 0:
            await (_for_ever().wait() if seconds is None else asyncio.sleep(seconds))
        found: Located = await locate(self, name, **options)
        return found

    bundles_of.locate = waits


@cluster_defect
def some_look_ups_are_never_answered() -> None:
    """The one who asks hears nothing, and others do."""
    _some_look_ups_wait(None)


@cluster_defect
def some_look_ups_are_answered_late() -> None:
    """As if each wait had all of its time once more."""
    _some_look_ups_wait(30.0)


@cluster_defect
def brokers_node_outlives_its_session() -> None:
    """A broker that is dead takes bundles for ever, and its successor is never registered."""

    class Eternal(_Store):
        async def create(self, path: str, value: bytes, *, session: Any = None) -> int:
            version: int = await self.store.create(path, value)
            return version

    _metadata_wrapped(Eternal)


# --- sessions ----------------------------------------------------------------------------------------------------------


@cluster_defect
def lost_session_fences_nothing() -> None:
    """The broker opens another one, and goes on with the topics that it has."""

    bundles_of._lost = lambda self: self.forget(list(self.held))


@cluster_defect
def validity_is_not_read_from_the_clock() -> None:
    """Rule 31: a broker that stood still confirms what it finds, before it is told that its session is over."""
    ClusterOwnership.valid = property(lambda self: self._registration._session is not None)  # type: ignore[assignment,method-assign]


@cluster_defect
def topic_ignores_a_fence() -> None:
    """What was appended is confirmed, though its session is lost or its ledger is somebody else's."""
    Topic.fence = lambda self, error: None  # type: ignore[method-assign]


@cluster_defect
def no_second_session() -> None:
    """A broker that has lost its session has none any more."""
    hold = registrations._hold

    async def once(self: Any, session: Any) -> None:
        await hold(self, session)
        await _for_ever().wait()

    registrations._hold = once


# --- serving -----------------------------------------------------------------------------------------------------------


@cluster_defect
def topic_is_loaded_without_asking() -> None:
    """Whoever is asked for a topic serves it."""
    ClusterOwnership.check = lambda self, name: None  # type: ignore[method-assign]


@cluster_defect
def ownership_is_not_checked_after_a_load() -> None:
    """The bundle went while the topic was being loaded."""
    check = ClusterOwnership.check

    def once(self: Any, name: Any) -> None:
        held = self.host._held.get(str(name))
        if held is None or held.state is not TopicState.LOADING:
            check(self, name)

    ClusterOwnership.check = once  # type: ignore[method-assign]


# --- moving ------------------------------------------------------------------------------------------------------------


@cluster_defect
def topics_stay_open_when_their_bundle_moves() -> None:
    """The node is deleted, and nothing else happens."""

    async def nothing(self: Any, bundle: Any, error: MagnetarError, destination: Any = None) -> None:
        return

    transfers_of._close_topics = nothing


@cluster_defect
def unload_does_not_wait() -> None:
    """The bundle is given away while its topics still confirm what is queued."""

    async def unload(self: Any, name: Any, error: MagnetarError) -> None:
        if (held := self._held.get(str(name))) is not None:
            self._unload(held, error)

    Broker.unload = unload  # type: ignore[method-assign]


@cluster_defect
def arrival_never_ends() -> None:
    """The destination does not notice that the source is done."""

    async def arrive(self: Any, bundle: Any, held: Any) -> None:
        await _for_ever().wait()

    bundles_of._await_arrival = arrive


@cluster_defect
def request_is_never_deleted() -> None:
    """It is done, and whoever made it waits."""

    async def finished(self: Any, bundle: Any, version: int | None = None) -> None:
        return

    transfers_of._finished = finished


@cluster_defect
def request_is_deleted_before_it_is_done() -> None:
    """Whoever made it is told that the bundle has moved."""
    carry_out = transfers_of._carry_out

    async def hasty(self: Any, bundle: Any, held: Any, known: Any) -> None:
        await self._bundles.metadata.delete(transfer_path(bundle))
        await carry_out(self, bundle, held, known)

    transfers_of._carry_out = hasty


# --- dividing ----------------------------------------------------------------------------------------------------------


@cluster_defect
def split_loses_the_node_of_a_half() -> None:
    """The second part is held without its node."""
    split = transfers_of._split

    async def careless(self: Any, bundle: Any, held: Any) -> None:
        await split(self, bundle, held)
        second = max(part for part in self._bundles.held if bundle.first <= part.first <= bundle.last)
        await self._bundles.metadata.delete(owner_path(second))

    transfers_of._split = careless


@cluster_defect
def split_without_compare_and_set() -> None:
    """The bounds that another broker has changed meanwhile are overwritten."""

    class Blind(_Store):
        async def commit(self, operations: Sequence[Any]) -> None:
            try:
                await self.store.commit(operations)
            except VersionConflict:
                if not any(isinstance(one, Put) for one in operations):
                    raise
                blindly = [
                    one._replace(version=(await self.store.get(one.path)).version)
                    if isinstance(one, Put)
                    else one
                    for one in operations
                ]
                await self.store.commit(blindly)

    _metadata_wrapped(Blind)


@cluster_defect
def split_keeps_the_whole() -> None:
    """The bounds are changed, and the owner's node is not."""

    class Careless(_Store):
        async def commit(self, operations: Sequence[Any]) -> None:
            puts = [one for one in operations if isinstance(one, Put)]
            await self.store.commit(puts or operations)

    _metadata_wrapped(Careless)


# --- drains and stops --------------------------------------------------------------------------------------------------


@cluster_defect
def drained_broker_gets_bundles() -> None:
    """Placement looks at what runs, and not at what is to be emptied."""

    async def careless(self: Any, bundle: Any, *, excluded_url: str = "", excluded: str = "") -> str:
        brokers = await self.view.brokers.get()
        rows = [row for row in brokers.values() if row.state != STOPPING]
        rows = [row for row in rows if row.name != excluded and (row.url != excluded_url or not excluded_url)]
        return random.Random(f"{bundle} {len(rows)}").choice(rows).name if rows else str(self.name)

    bundles_of.choose = careless


@cluster_defect
def drain_moves_nothing() -> None:
    """The drained broker gets no new bundles, and keeps those that it has."""

    async def drain(self: Any, bundle: Any, held: Any) -> None:
        return

    transfers_of._drain = drain


@cluster_defect
def stopping_broker_takes_bundles() -> None:
    """It goes on saying that it is ready, while it hands over."""

    def set_state(self: Any, state: str) -> None:
        self.state = READY if state == STOPPING else state
        self._registration.changed()

    bundles_of.set_state = set_state


@cluster_defect
def end_of_a_drain_is_not_noticed() -> None:
    """A broker that was drained once gets no bundle any more."""
    set_state = bundles_of.set_state

    def stays(self: Any, state: str) -> None:
        if self.state not in (DRAINING, DRAINED):
            set_state(self, state)

    bundles_of.set_state = stays


# --- clients -----------------------------------------------------------------------------------------------------------


@cluster_defect
def client_ignores_final() -> None:
    """It goes to the broker that was named for the next question, as if the topic were served there."""
    answered = Search.answered
    Search.answered = lambda self, url, final: answered(self, url, True)  # type: ignore[method-assign]


@cluster_defect
def client_keeps_an_answer_for_ever() -> None:
    """TopicNotServed does not make it look the topic up."""
    Lookups.moved = lambda self, topic, error: False  # type: ignore[method-assign]
