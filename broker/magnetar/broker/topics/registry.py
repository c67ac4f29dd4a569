"""The topics of this process: loaded once however many ask, made when first used, unloaded, deleted.

There is one record for each topic name that this broker has to do with, and its state says what happens:

    (nothing)  --first use-->                            LOADING
    LOADING    --its list and each cursor were read-->   SERVED
    LOADING    --that failed-->                          FAILED     --0.1 s--> (nothing)
    SERVED     --nobody uses it, or its bundle moves-->  UNLOADING  --cursors and list are written--> (nothing)
    SERVED     --another owner, or no session-->         FENCED     --its cursors and its ledger are let go--> (nothing)
    SERVED     --`delete_topic`-->                       DELETING   --cursors, ledgers, the list are deleted--> (nothing)

Whoever asks for a topic that is LOADING, or on its way to (nothing), waits for the end of that and looks again; so two
instances of a topic never run side by side, and nothing that arrives is lost. FAILED has no topic, only an error, which
whoever asks gets at once: a storm of clients does not make one load after another. A topic that is UNLOADING can still be
fenced: then what is queued fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    AlreadyExists,
    MagnetarError,
    ServiceNotReady,
    TopicBusy,
    TopicNotFound,
    TopicNotServed,
)
from magnetar.proto.ids import NO_PARTITION, TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import Jobs, LongTask, begin

from ..dispatch.core.entry_source import DispatchCounters
from ..export.orphans import find_staged
from ..export.topic_export import TopicExport
from ..log.reading import ArchiveReader, NoArchives
from ..log.records import TopicRecord, topic_path
from ..log.ring import Rings
from ..log.shared_reads import SharedReads
from ..log.tail_cache import TailCache
from ..ownership.ownership import Ownership, SoleBroker, TopicCounters
from ..resources.budget import ByteBudget
from ..resources.rates import Buckets
from ..resources.stores import Bookies, Ledgers
from ..settings import BrokerSettings
from ..tenancy.creation import Creation
from ..tenancy.deletion import Deletions
from ..tenancy.inactivity import Inactivity
from ..tenancy.objects import Objects
from .components import Components, PublishCounters
from .partitions import PartitionedTopics
from .policies import NamespacePolicies
from .schemas import Schemas
from .topic import Topic
from .watches import TopicWatches

_log = logging.getLogger(__name__)

_READ_AHEAD_SHARE = 0.2  # of the memory budget: entries read for consumers that are behind
_LOADS_AT_ONCE = 64
_UNLOADS_AT_ONCE = 16
_LOOK_S = 2.0
_MAX_PROBLEMS = 20  # that a broker names
_TOPICS_PER_TURN = 50  # of maintenance: a millisecond of the loop
_FAILURE_MEMORY_S = 0.1


class TopicState(enum.Enum):
    """Of a topic name at this broker; see the module docstring."""

    LOADING = "loading"
    FAILED = "failed"
    SERVED = "served"
    UNLOADING = "unloading"
    DELETING = "deleting"
    FENCED = "fenced"


class HeldTopic:
    """A topic name at this broker."""

    __slots__ = ("create", "error", "name", "state", "topic", "work")

    def __init__(self, name: TopicName, *, create: bool) -> None:
        self.name = name
        self.state = TopicState.LOADING
        self.create = create  # LOADING: the topic is made if it does not exist
        self.topic: Topic | None = None  # except LOADING and FAILED
        self.error: MagnetarError | None = None  # why it could not be loaded; FAILED only
        self.work: asyncio.Task[None] | None = None  # that will end this state; except SERVED and FAILED

    @property
    def served(self) -> Topic | None:
        """The topic, if it is SERVED."""
        return self.topic if self.state is TopicState.SERVED else None


async def _ends_of(held: Iterable[HeldTopic]) -> bool:
    """Returns when the state that each is in has ended, if it ends by itself: True if there was any such."""
    works = [one.work for one in held if one.work is not None]
    if works:
        await asyncio.wait(works)
    return bool(works)


class Broker:
    """See the module docstring. `start` before use, `close` in the end."""

    def __init__(
        self,
        metadata: MetadataStore,
        ledgers: Ledgers,
        settings: BrokerSettings,
        clock: Clock,
        bookies: Bookies | None = None,
        archives: ArchiveReader | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        """`bookies`: where they listen, for clients that go there themselves. `archives`: reads archived ledgers.

        `ownership`: which topics are served here; without it all are. It is the broker's, which starts and closes it.
        """
        self.settings = settings
        self.ownership: Ownership = ownership or SoleBroker(
            settings.name, settings.service_url, settings.http_url, settings.pulsar_url_for_clients
        )
        self.metadata = metadata
        self.clock = clock
        self.ledgers = ledgers
        self.bookies = bookies
        self.cache = TailCache(settings.tail_cache_bytes)
        self._shared_reads = SharedReads(settings.shared_read_bytes)
        self._rings = Rings(settings.non_persistent_bytes)
        self.publish_budget = ByteBudget(settings.publish_bytes)
        self._read_budget = ByteBudget(int(settings.memory_budget_bytes * _READ_AHEAD_SHARE))
        self.published = PublishCounters()
        self.dispatched = DispatchCounters()
        self.watches = TopicWatches(None if self.ownership.alone else metadata)
        self.namespaces = NamespacePolicies(metadata, settings)
        self.objects = Objects(metadata, settings, clock)
        self.creation = Creation(self.objects, metadata, settings, self.namespaces)
        self.schemas = Schemas(metadata, clock, partial(self.creation.make, topics=0))
        self.partitioned = PartitionedTopics(metadata, clock, self.watches, self.creation)
        self.deletions = Deletions(
            self.objects, metadata, self.partitioned, self.ownership, partial(self.delete_topic, force=True)
        )
        self.inactivity = Inactivity(
            metadata, clock, self.namespaces, self.partitioned, partial(self.topic, create=False),
            lambda name, check: self.delete_topic(name, force=False, check=check),
        )  # fmt: skip
        self._components = Components(
            metadata, ledgers, settings, clock, self.cache, self._shared_reads, self.publish_budget,
            self._read_budget, self.published, self.dispatched, archives or NoArchives(), self.namespaces,
            self.partitioned, bookies, asyncio.Semaphore(settings.max_compactions), self.ownership, self._rings,
            Buckets(), Buckets(), self.creation,
        )  # fmt: skip
        self._held: dict[str, HeldTopic] = {}
        self.connections: dict[object, None] = {}  # of clients: each listener notes those that are ready
        self._load_slots = asyncio.Semaphore(_LOADS_AT_ONCE)
        self._rounds: list[LongTask] = []
        self._jobs = Jobs("broker")
        self._name_prefix = ""
        self._names = 0
        self._closing = False
        self._problems: dict[str, str] = {}
        self._degraded = 0  # topics; both as of the last look for problems
        # What the process knows to be wrong, of itself and of its cluster; whoever made the broker may know more than it.
        self.trouble: Callable[[], Mapping[str, str]] = self.problems

    async def start(self) -> None:
        """Claims a prefix for generated names and begins the maintenance rounds."""
        number = await self.metadata.next_id("broker-starts")
        self._name_prefix = f"{self.settings.name}-{number}"
        await self.ownership.start(self)
        self.deletions.start()
        self._rounds = [
            LongTask("the maintenance of topics", self._maintain),
            LongTask("the expiry of messages", self._expire),
            LongTask("the look for problems", self._follow_problems),
        ]

    def generate_name(self) -> str:
        """A producer or consumer name that was never given before."""
        self._names += 1
        return f"{self._name_prefix}-{self._names}"

    # --- topics ------------------------------------------------------------------------------------------------------

    @property
    def topics(self) -> dict[str, Topic]:
        """Those that are SERVED, by name."""
        served = TopicState.SERVED
        return {
            key: held.topic
            for key, held in self._held.items()
            if held.state is served and held.topic is not None
        }

    async def topic(self, name: TopicName, *, create: bool) -> Topic:
        """The loaded topic. Concurrent calls share one load, and its failure if it fails.

        Raises TopicNotFound, TopicBusy, or what the load met.
        """
        if not self.has(name) and not self.ownership.serves(name):
            if create and self.ownership.valid:
                await self.creation.check(name)
                await self.ownership.claim(name)
            elif not create and not await self.exists(name):
                raise TopicNotFound(f"topic {name} does not exist")
        while True:
            held = self._held.get(str(name)) or self._begin_load(name, create=create)
            if (topic := held.served) is not None:
                topic.used_at = asyncio.get_running_loop().time()
                return topic
            await _ends_of([held])  # a caller who gives up does not stop it for the others
            if held.error is not None:
                if create and not held.create and isinstance(held.error, TopicNotFound):
                    continue
                # A copy for each who waited: raising an error adds a traceback to it.
                raise type(held.error)(held.error.message, **held.error.details)

    def _begin_load(self, name: TopicName, *, create: bool) -> HeldTopic:
        if self._closing:
            raise TopicNotServed("the broker is stopping; look the topic up again")
        self.ownership.check(name)
        held = self._held[str(name)] = HeldTopic(name, create=create)
        held.work = begin(self._load(held), f"load of topic {name}")
        return held

    async def _load(self, held: HeldTopic) -> None:
        try:
            async with self._load_slots:
                held.topic = await self._load_topic(held.name, create=held.create)
            held.state = TopicState.SERVED
        except MagnetarError as error:
            held.error = error.with_traceback(None)  # which refers to this frame, and so to itself
        except Exception as error:
            _log.exception("loading topic %s failed", held.name)
            held.error = ServiceNotReady(f"loading topic {held.name} failed here: {error!r}")
        held.work = None
        if isinstance(held.error, TopicNotFound):
            self._forget(held)  # it may be made in the next moment, and finding that out costs one look
        elif held.error is not None:
            held.state = TopicState.FAILED
            asyncio.get_running_loop().call_later(_FAILURE_MEMORY_S, self._forget, held)

    async def _load_topic(self, name: TopicName, *, create: bool) -> Topic:
        topic = Topic(name, self._components, self._fenced)
        try:
            made = await topic.load(create=create)
            self.ownership.check(name)  # it may have moved meanwhile
        except BaseException:
            topic.fence(TopicBusy(f"topic {name} could not be loaded"))
            await topic.end()
            raise
        if made:
            self.watches.changed(name, exists=True)
        return topic

    def _end(
        self, held: HeldTopic, state: TopicState, ending: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """The one way out of SERVED: nothing of the topic is left here when `ending` is over, whatever became of it."""

        async def end() -> None:
            try:
                await ending
            finally:
                self._forget(held)

        held.state = state
        held.work = begin(end(), f"end of topic {held.name}, {state.value}")
        return held.work

    def _unload(self, held: HeldTopic, error: MagnetarError | None = None, drain_s: float = 5.0) -> None:
        """Begins that if the topic is SERVED."""
        if (topic := held.served) is not None:
            error = error or TopicNotServed(f"topic {held.name} is being closed here; look it up again")
            self._end(held, TopicState.UNLOADING, topic.end(error, drain_s=drain_s))

    def _fenced(self, topic: Topic) -> None:
        """A topic fenced itself: the next call loads it anew, once it has let go."""
        held = self._held.get(str(topic.name))
        if held is not None and held.served is topic:
            self._end(held, TopicState.FENCED, topic.end())

    def _forget(self, held: HeldTopic) -> None:
        if self._held.get(str(held.name)) is held:
            del self._held[str(held.name)]

    # --- for ownership: see Host -------------------------------------------------------------------------------------

    def problems(self) -> dict[str, str]:
        """See Host; also for /health. As of a few seconds ago."""
        return self._problems

    async def look_for_problems(self) -> None:
        """Looks at every topic, in turns of the loop, and how fast its counters rise."""
        found = {
            f"bookie {bookie}": "it failed a moment ago: reads and adds go elsewhere"
            for bookie in self.ledgers.suspects()
        }
        if self.bookies is not None and (lack := self.settings.lack_of_bookies(len(self.bookies.writable()))):
            found["bookies"] = lack
        degraded = 0

        def look(topic: Topic) -> None:
            nonlocal degraded
            degraded += topic.degraded
            topic.count_rates()
            if len(found) < _MAX_PROBLEMS and (exceeded := topic.limits.held or topic.limits.refusal):
                found[f"topic {topic.name}"] = f"it takes no messages: {exceeded}"
            for name, subscription in topic.subscriptions.items():
                if len(found) < _MAX_PROBLEMS and (trouble := subscription.trouble()):
                    found[f"subscription {name} of {topic.name}"] = trouble

        await self._for_all_topics("problems", look)
        if degraded:
            found["topics"] = (
                f"{degraded} of them write fewer copies than their policy says: too few bookies are there"
            )
        self._problems, self._degraded = found, degraded

    def loaded(self) -> list[TopicName]:
        """Those that end here, those that are served (whoever was used last comes last), those that are being loaded."""

        def used_at(held: HeldTopic) -> float:
            if held.served is not None:
                return held.served.used_at
            return math.inf if held.state is TopicState.LOADING else -math.inf

        held = [one for one in self._held.values() if one.state is not TopicState.FAILED]
        return [one.name for one in sorted(held, key=used_at)]

    def has(self, name: TopicName) -> bool:
        """True for one of `loaded`."""
        held = self._held.get(str(name))
        return held is not None and held.state is not TopicState.FAILED

    def in_use(self, name: TopicName) -> bool:
        """True for a topic with clients, or with work under way."""
        held = self._held.get(str(name))
        return held is not None and held.served is not None and held.served.in_use

    def counters(self) -> list[TopicCounters]:
        """Of all topics that are loaded."""
        return [
            TopicCounters(
                topic.name,
                topic.messages_in,
                topic.bytes_in,
                topic.dispatched.messages_out,
                topic.dispatched.bytes_out,
            )
            for topic in self.topics.values()
        ]

    async def unload(self, name: TopicName, error: MagnetarError) -> None:
        """Closes a topic: what is queued is confirmed, its users get `error`. Returns when nothing of it is left."""
        held = self._held.get(str(name))
        if held is not None:
            if held.state is TopicState.LOADING:
                await _ends_of([held])
            self._unload(held, error)  # one that ends already ends by that
            await _ends_of([held])

    def fence(self, error: MagnetarError) -> None:
        """Nothing of any topic is confirmed any more when this returns; they let go afterwards."""
        for held in list(self._held.values()):
            if held.topic is not None:
                held.topic.fence(error)

    # --- what there is -----------------------------------------------------------------------------------------------

    async def exists(self, name: TopicName) -> bool:
        """True if the topic is loaded or recorded."""
        held = self._held.get(str(name))
        if held is not None and held.topic is not None:
            return True
        stored = await self.metadata.get(topic_path(name))
        return stored is not None and not TopicRecord.decode(stored.value, topic_path(name)).deleting

    async def delete_topic(
        self, name: TopicName, *, force: bool, dry: bool = False, check: Callable[[Topic], bool] | None = None
    ) -> None:
        """Deletes it with all it has, unless `dry` or `check` says no. Raises TopicNotFound, TopicInUse."""
        topic = await self.topic(name, create=False)
        if not force:
            await topic.probe_users()
        held = self._held.get(str(name))
        if held is None or held.served is not topic:
            raise TopicBusy(f"topic {name} is being closed or deleted; try again")
        if not force:
            topic.check_unused()
        if dry or (check is not None and not check(topic)):
            return

        async def delete() -> None:
            await topic.delete()
            self.watches.changed(name, exists=False)

        # A task of its own: it goes on when the caller gives up.
        await asyncio.shield(self._end(held, TopicState.DELETING, delete()))

    async def find(self, name: TopicName) -> Topic:
        """For producing and consuming: the topic, made if policies allow it. Raises TopicNotFound, PartitionNotFound."""
        if name.partition != NO_PARTITION:
            return await self.known(name)
        held = self._held.get(str(name))
        if (held is not None and held.served is not None) or await self.exists(name):
            with contextlib.suppress(TopicNotFound):  # it is deleted just now
                return await self.topic(name, create=False)
        return await self.topic(name, create=await self.creation.by_use(name) is not None)

    async def partitions(self, name: TopicName) -> int:
        """How many one has that is about to be used, and is made if there is none and policies say so. Raises TopicBusy."""
        count = await self.partitioned.count(name)
        if count or name.partition != NO_PARTITION or await self.exists(name):
            return count
        if (wanted := await self.creation.by_use(name)) is None:
            raise TopicNotFound(f"topic {name} does not exist")
        if wanted:
            try:
                await self.partitioned.create(name, wanted)
            except AlreadyExists:  # somebody else made it, in whichever form
                return await self.partitioned.count(name)
        return wanted

    async def known(self, name: TopicName) -> Topic:
        """For administration: the topic if it exists. Raises TopicNotFound, PartitionNotFound."""
        if name.partition != NO_PARTITION:
            await self.partitioned.check(name)
        elif not await self.exists(name):
            raise await self.partitioned.missing(name)
        return await self.topic(name, create=False)

    # --- maintenance, end ---------------------------------------------------------------------------------------------

    async def _maintain(self) -> None:
        loop = asyncio.get_running_loop()
        look_at = loop.time()  # when to look for staged ledgers of topics that are not loaded
        while True:
            await asyncio.sleep(self.settings.maintenance_interval_s)
            # Both may have to wait, for topics that cannot be loaded or for bookies; the rounds do not.
            if loop.time() >= look_at:
                look_at = loop.time() + self.settings.staged_ttl_ms / 1000
                self._jobs.begin("looking for staged ledgers", self._find_staged)
            if idle := await self._round():
                self._jobs.begin("unloading idle topics", partial(self._unload_idle, idle))

    async def _find_staged(self) -> None:
        async def export_of(name: TopicName) -> TopicExport:
            return (await self.topic(name, create=False)).export

        async def look(name: TopicName) -> None:
            if not self.has(name):
                await self.inactivity.look(name)

        self.inactivity.begin()
        await find_staged(self.metadata, self.ownership.serves, export_of, look)

    async def _round(self) -> list[HeldTopic]:
        """Every topic has its round. Returns those that nobody uses."""
        idle: list[HeldTopic] = []

        def maintain(topic: Topic) -> None:
            topic.maintain()
            if self.inactivity.due(topic):
                self._jobs.begin(f"what nobody uses of {topic.name}", partial(self.inactivity.round, topic))
            held = self._held.get(str(topic.name))
            if held is not None and self._is_idle(held):
                idle.append(held)

        await self._for_all_topics("maintenance", maintain)
        return idle

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.settings.message_expiry_interval_s)
            await self._for_all_topics("expiry", lambda topic: topic.maintenance.expire())

    async def _follow_problems(self) -> None:
        while True:
            await self.look_for_problems()
            await asyncio.sleep(_LOOK_S)

    async def _for_all_topics(self, what: str, visit: Callable[[Topic], None]) -> None:
        """Those that are served, in turns of the loop."""
        for number, topic in enumerate(list(self.topics.values()), 1):
            try:
                if topic.not_served is None:
                    visit(topic)
            except Exception:  # a defect in one topic must not end the rounds of all
                _log.exception("the round of %s of topic %s failed", what, topic.name)
            if number % _TOPICS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _is_idle(self, held: HeldTopic) -> bool:
        limit_ms, topic = self.settings.topic_idle_unload_ms, held.served
        if topic is None or not limit_ms:
            return False
        idle_ms = 1000 * (asyncio.get_running_loop().time() - topic.used_at)
        return idle_ms >= limit_ms and not topic.in_use and not topic.maintenance.waits_for_time

    async def _unload_idle(self, idle: list[HeldTopic]) -> None:
        for first in range(0, len(idle), _UNLOADS_AT_ONCE):
            now = [held for held in idle[first : first + _UNLOADS_AT_ONCE] if self._is_idle(held)]
            for held in now:
                self._unload(held)
            await _ends_of(now)

    async def close(self, *, drain_seconds: float = 5.0) -> None:
        """Closes every topic: queued messages are confirmed, cursors written, ledgers closed; others get what they can."""
        await self._hand_over(drain_seconds)
        self._closing = True
        await self.deletions.close()
        for rounds in self._rounds:
            await rounds.close()
        await self._jobs.cancel()
        await self.namespaces.followed.close()
        await self.partitioned.followed.close()
        self.watches.close()
        busy = True
        while busy:  # what is being loaded is closed afterwards
            for held in self._held.values():
                self._unload(held, drain_s=drain_seconds)
            busy = await _ends_of(self._held.values())
        await self.ownership.close()

    async def _hand_over(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.ownership.hand_over()
        except TimeoutError:
            _log.warning("not all topics could be handed over to other brokers within %g s", seconds)
        except Exception:  # whatever it is, the topics are closed here
            _log.exception("the topics could not be handed over to other brokers")

    def figures(self) -> dict[str, float]:
        """Counters and gauges of the broker, for /metrics; all are counted per run, entry or delivery, never per message."""
        return {
            "topics": len(self.topics),
            "connections": len(self.connections),
            "degraded_topics": self._degraded,
            "messages_in_total": self.published.messages_in,
            "bytes_in_total": self.published.bytes_in,
            "entries_in_total": self.published.entries_in,
            "send_runs_total": self.published.runs_in,
            "attached_ledgers_total": self.published.attached_ledgers,
            "attached_messages_total": self.published.attached_messages,
            "published_batches_total": self.published.published_batches,
            "messages_out_total": self.dispatched.messages_out,
            "bytes_out_total": self.dispatched.bytes_out,
            "deliveries_total": self.dispatched.deliveries,
            "entry_reads_total": self.dispatched.reads,
            "entry_read_bytes_total": self.dispatched.read_bytes,
            "unreadable_entries": self.dispatched.unreadable_entries,
            "skipped_entries_total": self.dispatched.skipped_entries,
            "dropped_messages_total": self.dispatched.dropped_messages,
            "dispatch_failures_total": self.dispatched.failures,
            "publish_queue_bytes": self.publish_budget.used,
            "tail_cache_bytes": self.cache.used,
            "tail_cache_entries": len(self.cache),
            "read_ahead_bytes": self._read_budget.used,
            "non_persistent_bytes": self._rings.used,
            "shared_read_bytes": self._shared_reads.used,
            "shared_reads_total": self._shared_reads.joined,
            "ledger_read_bytes_total": self._shared_reads.fetched_bytes,
            **self._components.ledgers.figures(),
            **self._components.archives.figures(),
            **self.ownership.figures(),
        }
