"""The ownership of a broker in a cluster: a session, the bundles held in it, and look-ups (broker/CLUSTER.md).

    (nothing)  --acquire-->                   ACQUIRING
    ACQUIRING  --node made-->                 OWNED         --somebody was first-->               (nothing)
    OWNED      --transfer-->                  MOVING        --topics closed, node deleted-->      (nothing)
    (nothing)  --a client comes from the owner, which moves the bundle here--> ARRIVING
    ARRIVING   --its node is gone-->          ACQUIRING     --it does not move here any more-->   (nothing)
    any        --session lost-->              (nothing), and every topic is fenced

A node in `/owners` is believed to be ours if it names our session: what a request made whose answer was lost is found so.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass

from magnetar.metadata import MetadataStore, Session
from magnetar.metadata.registration import POLL_S, Registration
from magnetar.metadata.store import Check, Create
from magnetar.proto.errors import (
    AlreadyExists,
    DataDirectoryError,
    MagnetarError,
    ServiceNotReady,
    TopicNotServed,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import begin

from ..log.records import topic_path
from .balance import BalanceSettings
from .balance.core.placement import BundlePlacement
from .cluster_view import NEW, ClusterView, KnownBounds, KnownOwner, put_bounds
from .core.bundles import Bundle, topic_hash
from .ownership import BrokerRow, Host, Located
from .records import (
    READY,
    BrokerLoad,
    BrokerRecord,
    OwnerRecord,
    bounds_path,
    broker_path,
    owner_path,
)

_log = logging.getLogger(__name__)

# So long a look-up waits for the owner that a client could not reach to lose its node; in session timeouts.
_HELD_TIMEOUTS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnershipSettings:
    """Of one broker."""

    name: str  # unique in the cluster
    url: str  # where clients reach it
    zone: str = ""
    group: str = ""
    session_timeout_s: float = 4.0
    default_bundles: int = 4  # of a namespace that nobody divided yet
    version: str = ""
    http: str = ""  # where its HTTP is
    pulsar: str = ""  # where it speaks Pulsar's protocol; "": nowhere


class State(enum.Enum):
    """Of a bundle at this broker; see the module docstring."""

    ACQUIRING = "acquiring"
    OWNED = "owned"
    MOVING = "moving"
    ARRIVING = "arriving"


class Held:
    """A bundle at this broker."""

    __slots__ = ("state", "to", "version", "work")

    def __init__(self, state: State, version: int = 0) -> None:
        self.state = state
        self.version = version  # of its node; OWNED and MOVING only
        self.to: BrokerRow | None = None  # MOVING: where it goes
        self.work: asyncio.Task[None] | None = None  # that will end this state


class BundleOwnership:
    """Of `Ownership`, what concerns one bundle. `begin` before use, `end` afterwards.

    What owners are asked to do is carried out by `transfers.Transfers`.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        settings: OwnershipSettings,
        balance: BalanceSettings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.metadata = metadata
        self.settings = settings
        self.name = settings.name
        self.held: dict[Bundle, Held] = {}
        self.look = asyncio.Event()  # something may be to do for `Transfers`
        self.view = ClusterView(metadata, settings.default_bundles, self.look.set)
        self.state = READY  # as the broker's node says, or will
        self._placement = BundlePlacement(balance, rng.randrange)
        self._host: Host | None = None
        self._clock = clock
        self._started_ms = clock.now_ms()
        self.load = BrokerLoad()
        self._registration = Registration(
            metadata,
            broker_path(self.name),
            self._record,
            settings.session_timeout_s,
            name=f"broker {self.name}",
            taken=f"another broker is registered as {self.name}: give this one a broker.name of its own",
            on_lost=self._lost,
            in_session=self.in_session,
        )

    # --- the session -------------------------------------------------------------------------------------------------

    async def begin(self, host: Host) -> None:
        """Registers the broker. Raises ServiceNotReady when that is not possible within a few session timeouts."""
        self._host = host
        try:
            await self._registration.start()
        except BaseException:
            await self.end()
            raise

    async def in_session(self, session: Session) -> None:
        """What runs beside, while the broker is registered; cancelled when the session is lost."""

    def set_state(self, state: str) -> None:
        """What the broker's node says of it."""
        self.state = state
        self._registration.changed()

    def _record(self) -> bytes:
        settings = self.settings
        return BrokerRecord(
            settings.url,
            settings.zone,
            settings.group,
            self.state,
            self._started_ms,
            settings.version,
            self.load,
            self.host.problems(),
            settings.http,
            settings.pulsar,
        ).encode()

    def _lost(self) -> None:
        """The session is lost: another broker may own every bundle soon, so nothing is confirmed from now on."""
        self.forget(list(self.held))
        _log.warning(
            "broker %s lost its session with the metadata store: all of its topics are fenced", self.name
        )
        self.host.fence(
            TopicNotServed(
                f"broker {self.name} lost its session with the metadata store; another one may serve the topic: look it up"
            )
        )

    @property
    def session(self) -> Session:
        """To make nodes with. Raises ServiceNotReady."""
        return self._registration.session

    @property
    def valid(self) -> bool:
        return self._registration.standing

    @property
    def host(self) -> Host:
        """The broker's topics."""
        assert self._host is not None
        return self._host

    async def end(self) -> None:
        """The broker's nodes go. May be called again."""
        self.forget(list(self.held))
        await self._registration.close()
        await self.view.close()

    # --- bundles -----------------------------------------------------------------------------------------------------

    def holding(self, name: TopicName) -> tuple[Bundle, Held] | None:
        """The bundle of a topic if this broker has to do with it."""
        namespace, place = name.full_namespace, topic_hash(name)
        for bundle, held in self.held.items():
            if bundle.first <= place <= bundle.last and bundle.namespace == namespace:
                return bundle, held
        return None

    def owned(self) -> list[Bundle]:
        """Those whose topics are served here, but for what is arriving."""
        return [bundle for bundle, held in self.held.items() if held.state in (State.OWNED, State.MOVING)]

    def check(self, name: TopicName) -> None:
        if not self.valid:
            raise TopicNotServed(
                f"broker {self.name} has no session with the metadata store; look topic {name} up"
            )
        found = self.holding(name)
        if found is None or found[1].state is State.ACQUIRING:
            raise TopicNotServed(f"broker {self.name} does not serve topic {name}; look it up")
        bundle, held = found
        if held.state is State.MOVING:
            assert held.to is not None
            raise TopicNotServed(
                f"bundle {bundle} of topic {name} moves to broker {held.to.name}", url=held.to.url
            )

    def serves(self, name: TopicName) -> bool:
        try:
            self.check(name)
        except TopicNotServed:
            return False
        return True

    def forget(self, bundles: Iterable[Bundle]) -> None:
        """They are not held any more, whatever was under way."""
        for bundle in bundles:
            held = self.held.pop(bundle, None)
            if held is not None and held.work is not None and held.work is not asyncio.current_task():
                held.work.cancel()

    async def acquire(self, bundle: Bundle, known: KnownBounds) -> None:
        """Returns when the bundle is owned here, or somebody was first. Concurrent calls share one attempt."""
        held = self.held.get(bundle)
        if held is None:
            held = self.held[bundle] = Held(State.ACQUIRING)
            held.work = begin(self._make_node(bundle, held, known), f"ownership of bundle {bundle}")
        if held.state is State.ACQUIRING and held.work is not None:
            await asyncio.wait([held.work])

    async def _make_node(self, bundle: Bundle, held: Held, known: KnownBounds) -> None:
        """The bounds are checked, or made, in the same commit: what was divided meanwhile must not be owned as a whole."""
        namespace = bundle.namespace
        try:
            session = self.session
            asked = (await self.view.transfers.get()).get(bundle)
            moved = asked is not None and asked.record.to == self.name
            moved_ms = self._clock.now_ms() if moved else 0
            record = OwnerRecord(self.name, self.settings.url, "", session.session_id, moved_ms)
            bounds = (
                put_bounds(namespace, known.bounds, NEW)
                if known.version == NEW
                else Check(bounds_path(namespace), known.version)
            )
            await self.metadata.commit([bounds, Create(owner_path(bundle), record.encode(), session)])
        except (AlreadyExists, VersionConflict):
            pass
        except MagnetarError as error:  # whether the node was made is found out by reading
            _log.warning("bundle %s could not be taken: %s", bundle, error)
            await asyncio.sleep(POLL_S)  # who looks it up tries again at once
        else:
            if self.held.get(bundle) is held:
                held.state, held.work = State.OWNED, None
                _log.info("broker %s owns bundle %s", self.name, bundle)
        finally:
            self.view.owners(namespace).drop()
            if held.state is not State.OWNED:
                self.view.drop(namespace)
                if self.held.get(bundle) is held:
                    del self.held[bundle]

    async def adopt_what_is_ours(self) -> None:
        """Nodes of our session that we did not know of: the answers to the requests that made them were lost."""
        for namespace in self.view.namespaces():
            owners = self.view.owners(namespace)
            changed = owners.changed
            found = await owners.get()
            if changed is not owners.changed:  # out of date: some of them may have been let go of meanwhile
                self.look.set()
                continue
            for bundle, owner in found.items():
                self._adopt(bundle, owner)

    def _adopt(self, bundle: Bundle, owner: KnownOwner) -> bool:
        """False: it is not ours, or it is a part of what is being divided here, and ours as such until that is done."""
        if bundle in self.held:
            return True
        if not self.valid or owner.record.session != self.session.session_id:
            return False
        wholes = [held for held in self.held if held.contains(bundle)]
        if any(self.held[whole].work is not None for whole in wholes):
            return False
        self.forget(wholes)  # they were divided, and the answer to that was lost
        self.held[bundle] = Held(State.OWNED, owner.version)
        _log.info("broker %s owns bundle %s, as it finds", self.name, bundle)
        self.look.set()
        return True

    def _arrive(self, bundle: Bundle) -> None:
        if bundle in self.held:  # since the owner was asked for
            return
        held = self.held[bundle] = Held(State.ARRIVING)
        held.work = begin(self._await_arrival(bundle, held), f"arrival of bundle {bundle}")

    async def _await_arrival(self, bundle: Bundle, held: Held) -> None:
        """The owner's node says that the bundle moves here; waits until it is gone, and makes our own."""
        while True:
            owners = self.view.owners(bundle.namespace)
            changed = owners.changed
            try:
                owner = (await owners.get()).get(bundle)
                known = await self.view.bounds(bundle.namespace)
            except MagnetarError as error:
                _log.warning("the arrival of bundle %s cannot be followed: %s", bundle, error)
                await asyncio.sleep(POLL_S)
                continue
            if owner is None:
                held.state = State.ACQUIRING
                await self._make_node(bundle, held, known)
                break
            if owner.record.to != self.name:  # it stays there, or goes elsewhere
                break
            await changed.wait()
        if self.held.get(bundle) is held and held.state is not State.OWNED:
            del self.held[bundle]
        if self.held.get(bundle) is not held:
            await self._unload_strays(bundle)

    async def _unload_strays(self, bundle: Bundle) -> None:
        """Topics that were loaded while the bundle seemed to arrive, and does not."""
        error = TopicNotServed(f"bundle {bundle} is not served by broker {self.name}; look the topic up")
        strays = [name for name in self.host.loaded() if bundle.holds(name)]
        await asyncio.gather(*(self.host.unload(name, error) for name in strays))

    # --- look-ups ----------------------------------------------------------------------------------------------------

    async def claim(self, name: TopicName) -> None:
        if self.valid and (await self.view.bounds(name.full_namespace)).version == NEW:
            await self.locate(name, authoritative=True, unreachable="", claim=True)

    async def locate(
        self, name: TopicName, *, authoritative: bool, unreachable: str, claim: bool = False
    ) -> Located:
        """See Ownership. `claim`: somebody makes the topic, which is what takes a bundle of a namespace without topics."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _HELD_TIMEOUTS * self.settings.session_timeout_s
        namespace, place = name.full_namespace, topic_hash(name)
        while True:
            await self._until(
                self._registration.registered, deadline, "has no session with the metadata store"
            )
            known = await self.view.bounds(namespace)
            bundle = known.bounds.bundle_of(namespace, place)
            if (held := self.held.get(bundle)) is not None:
                if held.state is State.ACQUIRING:
                    self._may_go_on(deadline, f"cannot take bundle {bundle} now")
                    await self.acquire(bundle, known)
                    continue
                if held.state is State.MOVING and held.to is not None and not self.host.has(name):
                    return Located(held.to.url, False)
                return Located(self.settings.url, True)
            if known.version == NEW and not claim and await self.metadata.get(topic_path(name)) is None:
                return await self._place(bundle, authoritative, unreachable)
            owners = self.view.owners(namespace)
            changed = owners.changed
            owner = (await owners.get()).get(bundle)
            if bundle in self.held:  # somebody else who looked it up was first
                continue
            if changed is not owners.changed:  # what was read is out of date
                self._may_go_on(deadline, f"finds that the owners of {namespace} change all the time")
                continue
            if owner is None:
                found = await self._place(bundle, authoritative, unreachable)
                if not found.final:
                    return found
                self._may_go_on(deadline, f"cannot take bundle {bundle} now")
                await self.acquire(bundle, known)
                continue
            if owner.damage:
                raise DataDirectoryError(owner.damage)
            record = owner.record
            if record.broker == self.name and record.session == self.session.session_id:
                if not self._adopt(bundle, owner):
                    return Located(self.settings.url, True)
            elif record.to == self.name and authoritative:
                self._arrive(bundle)
            elif record.broker == self.name:  # of a session of ours that has not ended everywhere yet
                await self._until(changed, deadline, "waits for the end of its former session")
            elif record.url == unreachable and loop.time() < deadline:
                try:
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
                except TimeoutError:
                    return Located(record.url, True)
            else:
                return Located(record.url, True)

    async def _until(self, event: asyncio.Event, deadline: float, what: str) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            raise self._not_in_time(what) from None

    def _may_go_on(self, deadline: float, what: str) -> None:
        """Before a look-up waits once more. Raises ServiceNotReady when it has waited for long enough."""
        if asyncio.get_running_loop().time() >= deadline:
            raise self._not_in_time(what)

    def _not_in_time(self, what: str) -> ServiceNotReady:
        return ServiceNotReady(f"broker {self.name} {what}; try again, or ask another one")

    async def _place(self, bundle: Bundle, authoritative: bool, unreachable: str) -> Located:
        """Where a bundle goes that nobody owns; final: it is to be taken here."""
        asked = (await self.view.transfers.get()).get(bundle)
        brokers = await self.view.brokers.get()
        if authoritative and self.state == READY:
            chosen = self.name
        elif asked is not None and asked.record.to in brokers and brokers[asked.record.to].state == READY:
            chosen = asked.record.to
        else:
            chosen = await self.choose(bundle, excluded_url=unreachable)
        if chosen == self.name and self.state != READY:  # which its node does not say yet
            chosen = await self.choose(bundle, excluded=self.name)
        if chosen == self.name:
            return Located(self.settings.url, True)
        return Located(brokers[chosen].url, False)

    async def choose(self, bundle: Bundle, *, excluded_url: str = "", excluded: str = "") -> str:
        """The name of a broker for the bundle. Raises ServiceNotReady if none takes any."""
        brokers = await self.view.brokers.get()
        if excluded_url and not excluded:
            excluded = next((name for name, row in brokers.items() if row.url == excluded_url), "")
        facts, now = await self.view.broker_facts(), asyncio.get_running_loop().time()
        self._placement.update(facts, now)
        binding = await self.view.binding(bundle.namespace)
        counted = self.view.has_bounds(bundle.namespace)
        chosen = self._placement.place(str(bundle), binding, now, exclude=excluded, counted=counted)
        if chosen is None:
            group = f" of group {binding.group} (its namespace's broker_group)" if binding.strict else ""
            raise ServiceNotReady(
                f"no broker{group} takes bundle {bundle} now ({len(brokers)} brokers are registered); start one, or end "
                "their draining"
            )
        return chosen
